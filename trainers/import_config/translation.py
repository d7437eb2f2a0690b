"""The working place of a translation: settings in, overrides and a word on every setting out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.trainers.import_config.known import Flavour, counterpart
from turntree.trainers.import_config.settings import Setting, literal

__all__ = ["Entry", "Status", "Translation", "hidden"]

_SECRET = re.compile(r"(?i)(api_?key|token|secret|password|passwd|credential)s?$")
_PLAIN = re.compile(r"[\w./:@+-]*")

Status = Literal["same", "differs", "default", "handled", "none", "unknown", "unresolved", "replaced"]
"""``same``: translated; ``differs``: translated, with another meaning; ``default``: set by the peer's configuration and
not by this file; ``handled``: needs nothing here; ``none``: has no counterpart; ``unknown``: nobody knows it;
``unresolved``: its value could not be found out; ``replaced``: a later line sets it anew."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one setting. ``line`` is 0 for a default; ``becomes`` are the overrides that it led to."""

    status: Status
    key: str
    value: str
    line: int
    becomes: tuple[str, ...] = ()
    note: str = ""


@dataclass(slots=True)
class Translation:
    """Settings by key, and what was made of them so far. Each rule takes the settings that it understands."""

    flavour: Flavour
    settings: dict[str, Setting]
    defaults: Mapping[str, str]
    program: str = ""
    overrides: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Whether the file sets ``key`` to something that is known."""
        return key in self.settings and not self.settings[key].unresolved

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a setting, else the peer's default, else ``default``."""
        if self.has(key):
            return literal(self.settings[key].value)
        return literal(self.defaults[key]) if key in self.defaults and key not in self.settings else default

    def flag(self, key: str) -> bool:
        """A setting that is on or off."""
        return self.get(key) in (True, 1, "True", "true")

    def put(self, **targets: Any) -> tuple[str, ...]:
        """Set overrides (``__`` for a dot); returns them as they are written."""
        made = []
        for name, value in targets.items():
            target = name.replace("__", ".")
            self.overrides[target] = written(value)
            made.append(f"{target}={self.overrides[target]}")
        return tuple(made)

    def say(self, key: str, status: Status, becomes: Iterable[str] = (), note: str = "") -> None:
        """A word on a setting of the file; of one that only the peer's defaults set it says so."""
        if key in self.done:
            return
        setting = self.settings.get(key)
        if setting is None:
            if key in self.defaults and (becomes or note):
                self.done.add(key)
                self.entries.append(Entry("default", key, self.defaults[key], 0, tuple(becomes), note))
            return
        self.done.add(key)
        if setting.unresolved:
            note = f"{setting.unresolved}; set the option by hand" + (f". {note}" if note else "")
            self.entries.append(Entry("unresolved", key, hidden(key, setting.value), setting.line, (), note))
            return
        self.entries.append(Entry(status, key, hidden(key, setting.value), setting.line, tuple(becomes), note))

    def imply(self, what: str, becomes: Iterable[str], note: str) -> None:
        """A word on something that no setting says."""
        self.entries.append(Entry("default", what, "", 0, tuple(becomes), note))

    def rest(self) -> None:
        """A word on every setting that no rule took."""
        for key in self.settings:
            if key in self.done:
                continue
            found = counterpart(key)
            if self.settings[key].unresolved and (found is None or not found[0]):
                self.say(key, "unresolved", note=found[1] if found else "")
            elif found is None:
                self.say(key, "unknown", note="not known to this translation; look it up, it was left out")
            else:
                self.say(key, "handled" if found[0] else "none", note=found[1])


def hidden(name: str, value: str) -> str:
    """The value, unless it is a secret by its name: scripts hold keys, and reports are passed on."""
    return "***" if _SECRET.search(name) and value and not value.startswith("$") else value


def written(value: Any) -> str:
    """A value as an override holds it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value) if isinstance(value, float) else str(value)
