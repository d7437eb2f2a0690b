"""What code may take, and how it must be kept in."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from turntree.errors import ConfigError

__all__ = ["Isolation", "SandboxOptions"]

Isolation = Literal["auto", "unshare", "bubblewrap", "none"]
"""Who builds the walls; ``none`` has to be allowed."""

_PACKAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_LEAST_MEMORY_MB = 64


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """Limits of the code inside, and its walls.

    ``cpu_s`` and ``wall_s``: seconds of a cell, of processor time and by the clock. ``memory_mb``: address space of an
    interpreter. ``disk_mb``: room in its temporary folder. ``threads``: at a time, the main one included.
    ``output_chars``: characters of a result; of longer ones beginning and end are kept. ``code_chars``: characters of
    a cell. ``packages``: installed packages that can be imported besides the standard library, by their import names.
    ``isolation``: ``auto`` takes what works. ``allow_unisolated``: go on without walls where none can be had (limits
    stay). ``workers``: cells that run at the same time, 0 for one a core. ``live``: interpreters that are kept to go
    on from, 0 for none: cells are then executed again before each new one.

    Raises ``ConfigError`` for values out of range.
    """

    cpu_s: float = 5.0
    wall_s: float = 30.0
    memory_mb: int = 512
    disk_mb: int = 16
    threads: int = 8
    output_chars: int = 4000
    code_chars: int = 20_000
    packages: tuple[str, ...] = ()
    isolation: Isolation = "auto"
    allow_unisolated: bool = False
    workers: int = 0
    live: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "packages", tuple(self.packages))
        for name in ("cpu_s", "wall_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ConfigError(f"sandbox {name}: expected a positive number of seconds, found {value!r}")
        least = {
            "memory_mb": _LEAST_MEMORY_MB, "disk_mb": 1, "threads": 1, "output_chars": 100, "code_chars": 1,
            "workers": 0, "live": 0,
        }  # fmt: skip
        for name, smallest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
                raise ConfigError(f"sandbox {name}: expected an integer of at least {smallest}, found {value!r}")
        if self.code_chars > 20_000:
            raise ConfigError(f"sandbox code_chars: expected at most 20000, found {self.code_chars}")
        if self.isolation not in get_args(Isolation):
            raise ConfigError(
                f"sandbox isolation: expected one of {', '.join(get_args(Isolation))}, found {self.isolation!r}"
            )
        wrong = [name for name in self.packages if not isinstance(name, str) or not _PACKAGE.fullmatch(name)]
        if wrong:
            raise ConfigError(f"sandbox packages: expected import names such as 'numpy', found {wrong!r}")
        if self.isolation == "none" and not self.allow_unisolated:
            raise ConfigError(
                "sandbox isolation=none: the code of a model would run with this user's rights on this machine; say "
                "allow_unisolated=true as well if that is meant"
            )

    @property
    def fingerprint(self) -> str:
        """What results depend on; how many interpreters there are and how they are kept in changes none."""
        left_out = ("isolation", "allow_unisolated", "workers", "live")
        told: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return ",".join(f"{name}={value}" for name, value in told.items() if name not in left_out)
