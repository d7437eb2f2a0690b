"""``turntree compare``: results side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.commands.console import say
from turntree.errors import ConfigError

__all__ = ["run_compare"]


def run_compare(
    sides: Sequence[str],
    *,
    metrics: Sequence[str],
    flips: int,
    seed: int,
    resamples: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """The first side against each other one."""
    from turntree.trainers.evaluation.compare import compare, read_side
    from turntree.trainers.evaluation.compare_text import markdown, to_json

    if len(sides) < 2:
        raise ConfigError(f"expected at least two results to compare, found {list(sides)}")
    read = [read_side(side, _folders(side)) for side in sides]
    found = [compare(read[0], other, metrics=metrics, seed=seed, resamples=resamples) for other in read[1:]]
    if out is not None:
        _save(out, found, flips)
    if as_json:
        print(json.dumps([_plain(to_json(one)) for one in found], ensure_ascii=False, indent=2))
        return
    for one in found:
        say(markdown(one, flips=flips))
    if out is not None:
        say(f"comparison: {out / 'comparison.md'}, comparison.csv, comparison.json, flips.jsonl")


def _folders(side: str) -> list[Path]:
    """Folders of a side: one, several with commas between, or a pattern such as ``runs/a-seed*``."""
    folders: list[Path] = []
    for part in side.split(",") if not Path(side).exists() else [side]:
        if Path(part).exists():
            folders.append(Path(part))
            continue
        matches = sorted(Path(part).parent.glob(Path(part).name)) if any(c in part for c in "*?[") else []
        if not matches:
            raise ConfigError(f"{part}: expected a folder of results, found nothing there")
        folders += matches
    return folders


def _save(out: Path, found: Sequence[Any], flips: int) -> None:
    from turntree.trainers.atomic import atomic_file, write_json
    from turntree.trainers.evaluation.compare_text import csv_text, flip_json, markdown, to_json

    tables = [csv_text(one) for one in found]
    texts = {
        "comparison.md": "\n".join(markdown(one, flips=flips) for one in found),
        "comparison.csv": tables[0] + "".join(table.partition("\n")[2] for table in tables[1:]),
        "flips.jsonl": "".join(
            json.dumps({"compared": one.b, **flip_json(flip)}, ensure_ascii=False) + "\n"
            for one in found
            for flip in one.flips
        ),
    }
    for name, text in texts.items():
        with atomic_file(out / name) as file:
            file.write(text.encode("utf-8", "backslashreplace"))
    write_json(out / "comparison.json", _plain([to_json(one) for one in found]))


def _plain(value: Any) -> Any:
    from turntree.trainers.evaluate import or_null

    return or_null(value)
