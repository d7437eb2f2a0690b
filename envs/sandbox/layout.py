"""What is shown inside of a sandbox: the standard library, libraries that it needs, packages that were asked for."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.envs.sandbox import inside
from turntree.envs.sandbox.inside import kernel, seccomp
from turntree.envs.sandbox.inside.box import HOME
from turntree.envs.sandbox.options import SandboxOptions
from turntree.errors import ConfigError, ToolError

__all__ = [
    "Plan",
    "binds",
    "command",
    "environment",
    "library",
    "library_inside",
    "links",
    "loader",
    "make_plan",
    "python",
    "trial_command",
]

Plan = dict[str, Any]
"""What the other side is told to build: JSON."""

_NOBODY = 65534
_START_S = 60.0
# Imports every extension module of the standard library, then names the shared libraries that this took.
_LIBRARIES = """
import importlib, os, sys
folder = sys.argv[1]
for name in sorted(os.listdir(folder) if os.path.isdir(folder) else []):
    if name.endswith(".so") and not name.startswith(("_tkinter", "_test", "xx", "_ctypes_test")):
        try:
            importlib.import_module(name.split(".")[0])
        except BaseException:
            pass
found = {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if line.count("/") and ".so" in line}
print("\\n".join(sorted(path for path in found if os.path.isfile(path))))
"""
# The modules of this side are not imported as part of turntree, which would import much more.
_BOOT = """
import os, sys, types
sys.argv[:] = ["", *sys.argv[2:]]
folder = {folder!r}
for name in ("turntree", "turntree.envs", "turntree.envs.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules["turntree.envs.sandbox"].__path__ = [os.path.dirname(folder)]
from turntree.envs.sandbox.inside import kernel, {module}
if {fixed!r} and kernel.without_address_randomisation():
    os.execv(sys.executable, sys.orig_argv)
{module}.main()
"""


def library() -> Path:
    """The folder of the standard library."""
    return Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))


def library_inside() -> str:
    """Where the standard library lies inside."""
    return f"/python/{sys.platlibdir}/{library().name}"


def python() -> str:
    """The interpreter without a virtual environment around it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def make_plan(options: SandboxOptions, *, layers: Sequence[str], zygote: bool = True) -> Plan:
    """Everything that the other side is told, as JSON-able data. ``layers``: those of the probe that work."""
    isolated = "namespaces" in layers
    root = os.geteuid() == 0
    user, group = (_NOBODY, _NOBODY) if root and _readable_by_all() else (os.geteuid(), os.getegid())
    return {
        "zygote": zygote,
        "namespaces": list(kernel.NAMESPACES) if isolated and zygote else [],
        "user": user,
        "group": group,
        "binds": binds(options, started_inside=not zygote) if isolated else [],
        "links": list(links(started_inside=not zygote)) if isolated else [],
        "hidden": [f"{library_inside()}/{name}" for name in ("site-packages", "dist-packages")],
        "library": str(library()),
        "library_inside": library_inside(),
        "home": HOME,
        "disk_mb": options.disk_mb,
        "files": 1024,
        "memory_mb": options.memory_mb,
        "cpu_s": options.cpu_s,
        "processes": options.live * options.threads + 64,
        "landlock": "landlock" in layers,
        "seccomp": "seccomp" in layers,
        "notify": "seccomp-notify" in layers,
    }


@functools.cache
def _readable_by_all() -> bool:
    """Whether another user could read the library, once it is shown where they can reach it."""
    folder = library()
    return all(os.stat(path).st_mode & 0o004 for path in (folder, folder / "os.py"))


def binds(options: SandboxOptions, *, started_inside: bool = False) -> list[tuple[str, str]]:
    """(path outside, path inside) of everything that is shown.

    A Python that was not ``started_inside`` has its own library loaded already, which may lie in somebody's folder.
    """
    shown = [(str(library()), library_inside()), ("/dev/null", "/dev/null")]
    platform_library = Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_prefix})) / "lib-dynload"
    if platform_library.is_dir() and platform_library.parent != library():
        shown.append((str(platform_library), f"{library_inside()}/lib-dynload"))
    libraries = (path for path in _shared_libraries() if started_inside or "/libpython" not in path)
    shown += [(path, path) for path in libraries]
    if os.path.isfile("/etc/ld.so.cache"):
        shown.append(("/etc/ld.so.cache", "/etc/ld.so.cache"))
    return shown + [pair for name in options.packages for pair in _package(name)]


@functools.cache
def _shared_libraries() -> tuple[str, ...]:
    """Paths of the shared libraries outside of the library's folder that its modules are linked with."""
    try:
        found = subprocess.run(
            [python(), "-S", "-P", "-c", _LIBRARIES, str(library() / "lib-dynload")],
            capture_output=True, text=True, timeout=_START_S, check=True, stdin=subprocess.DEVNULL, env={},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolError(f"the Python at {python()} could not be started for a sandbox: {error}") from error
    inside_library = str(library()) + os.sep
    return tuple(path for path in found.stdout.splitlines() if not path.startswith(inside_library))


@functools.cache
def links(*, started_inside: bool = False) -> tuple[tuple[str, str], ...]:
    """(target, link): by which names programs ask for the libraries, and links to library folders at the top."""
    tops = (f"/{name}" for name in ("lib", "lib32", "lib64", "libx32"))
    found = [(os.readlink(top), top) for top in tops if os.path.islink(top)]
    shown = {path for path in _shared_libraries() if started_inside or "/libpython" not in path}
    for folder in sorted({os.path.dirname(path) for path in shown}):
        with os.scandir(folder) as entries:
            places = sorted(entry.path for entry in entries if ".so" in entry.name and entry.is_symlink())
        targets = ((os.path.realpath(place), place) for place in places)
        found += [(target, place) for target, place in targets if target in shown]
    return tuple(found)


def loader() -> list[tuple[str, str]]:
    """The program that starts Python: needed where Python is started inside."""
    found = re.search(rb"/lib[\w/.-]*/ld[\w.-]*\.so[\w.]*(?=\0)", Path(python()).read_bytes()[:8192])
    if found is None:
        return []
    path = Path(os.fsdecode(found[0]))
    return [(str(path.resolve()), str(path.parent.resolve() / path.name))]


def _package(name: str) -> list[tuple[str, str]]:
    """An importable package and, beside it, the libraries that wheels bring."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise ConfigError(f"sandbox packages: no package {name!r} can be imported here; install it or leave it out")
    places = [*(spec.submodule_search_locations or ())][:1] or [spec.origin]
    path = Path(places[0])
    beside = path.parent / f"{name}.libs"
    found = [(str(path), f"/packages/{path.name}")]
    return found + ([(str(beside), f"/packages/{beside.name}")] if beside.is_dir() else [])


def command(plan: Plan, argument: str, *, inside_at: str = "") -> list[str]:
    """How the other side is started. ``argument``: its descriptors; ``inside_at``: where it finds its modules."""
    return [*_start("zygote", inside_at), json.dumps(plan), argument]


def trial_command() -> list[str]:
    """How to ask what the kernel grants; the answer is JSON."""
    return _start("trial")


def _start(module: str, inside_at: str = "") -> list[str]:
    folder = inside_at or str(Path(inside.__file__).parent)
    fixed = platform.system() == "Linux" and seccomp.supported()
    boot = _BOOT.format(folder=folder, fixed=fixed, module=module)
    return [python(), "-S", "-P", "-B", "-X", "utf8", "-c", boot, "-"]


def environment() -> dict[str, str]:
    """The variables of the other side: none of this process's own."""
    return {"PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "LANG": "C.UTF-8", "TZ": "UTC", "OPENBLAS_NUM_THREADS": "1"}
