"""Reads a YAML configuration of verl or of what was made from it, with the line of every value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from turntree.errors import DataError
from turntree.trainers.import_config.settings import Launch, Note, Setting

__all__ = ["read_yaml"]

_MOST = 20_000


def read_yaml(path: Path) -> Launch:
    """Every leaf of the file as a dotted key. ``${...}`` interpolations are resolved where the file holds their target.

    Raises :class:`DataError` with the line for what is not YAML, or not a mapping.
    """
    import yaml

    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise DataError(f"{path}: expected a YAML configuration, found one that is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise DataError(f"{path}: expected a YAML configuration, found {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise DataError(f"{path}: expected a mapping of sections such as data, actor_rollout_ref, trainer, found none")
    found = list(islice(_checked(root, path), _MOST + 1))
    if len(found) > _MOST:
        raise DataError(f"{path}: expected at most {_MOST} settings, found more; an alias (*name) may repeat itself")
    leaves = {key: (value, line) for key, value, line in found}
    settings, notes = [], []
    for key, (value, line) in leaves.items():
        if key.split(".")[0] in ("defaults", "hydra"):
            notes.append(Note(line, f"{key}: {value}", "Hydra's own: what it includes must be passed too"))
            continue
        text, unresolved = _resolved(value, leaves)
        settings.append(Setting(key, text, line, unresolved))
    return Launch(path.name, "", tuple(settings), tuple(notes))


def _checked(root: Any, path: Path) -> Iterator[tuple[str, str, int]]:
    try:
        yield from _leaves(root, "")
    except RecursionError as error:
        raise DataError(f"{path}: expected settings, found an alias (*name) that holds itself") from error


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, str, int]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _leaves(value, f"{prefix}.{key.value}" if prefix else str(key.value))
    elif isinstance(node, yaml.SequenceNode):
        scalars = all(isinstance(item, yaml.ScalarNode) for item in node.value)
        text = json.dumps([item.value for item in node.value]) if scalars else "[...]"
        yield prefix, text, node.start_mark.line + 1
    else:
        yield prefix, str(node.value) or "null", node.start_mark.line + 1


def _resolved(value: str, leaves: dict[str, tuple[str, int]]) -> tuple[str, str]:
    """The value behind ``${a.b}`` or ``${oc.select:a.b,default}``, and what could not be found out."""
    seen: set[str] = set()
    while value.startswith("${") and value.endswith("}") and value not in seen:
        seen.add(value)
        inner, _, default = value[2:-1].removeprefix("oc.select:").partition(",")
        if inner.strip() in leaves:
            value = leaves[inner.strip()][0]
        elif default:
            value = default.strip()
        else:
            return value, f"{value} is not in the file"
    return (value, f"{value} is not in the file") if "${" in value else (value, "")
