"""What a resumed run must share with the one that it continues: part of its configuration, as flat dotted keys."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.errors import CheckpointError

__all__ = ["check_fingerprint", "config_fingerprint"]


def config_fingerprint(config: Mapping[str, Any], sections: Sequence[str]) -> dict[str, Any]:
    """The part of a configuration that a resumed run must share, as flat dotted keys.

    ``sections`` are dotted paths (``"algorithm"``, ``"model.path"``); all keys below them count, absent ones are left
    out. Values become JSON data.
    """
    flat: dict[str, Any] = {}
    for section in sections:
        value: Any = config
        for part in section.split("."):
            value = value[part] if isinstance(value, Mapping) and part in value else None
        _flatten_config(section, value, flat)
    return flat


def check_fingerprint(saved: Mapping[str, Any] | None, current: Mapping[str, Any], *, source: Path) -> None:
    """Raise :class:`CheckpointError` listing each key whose value differs between ``saved`` and ``current``."""
    saved, now = saved or {}, json.loads(json.dumps(current, default=str))
    differing = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
    if differing:
        lines = "\n".join(f"  {key}: {saved.get(key)!r} there, {now.get(key)!r} now" for key in differing)
        raise CheckpointError(
            f"{source} was made with another configuration:\n{lines}\n"
            "Set these keys back to resume, or start a new run in another folder"
        )


def _flatten_config(key: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _flatten_config(f"{key}.{name}", item, flat)
    elif isinstance(value, float) and not math.isfinite(value):
        flat[key] = str(value)
    elif value is not None:
        flat[key] = json.loads(json.dumps(value, default=str))
