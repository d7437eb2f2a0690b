"""What ``turntree data`` does: list published sets, show and convert question files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turntree.commands.console import say, say_json
from turntree.envs.datasets import (
    DATASETS,
    QuestionFile,
    Unanswerable,
    corpus_from_contexts,
    dataset_spec,
    join_questions,
    load_dataset_questions,
    read_questions,
    save_questions,
)
from turntree.errors import ConfigError

__all__ = ["run_data_convert", "run_data_list", "run_data_show"]


def run_data_list(*, as_json: bool) -> None:
    """``turntree data list``."""
    if as_json:
        say_json([asdict(spec) for spec in DATASETS.values()])
        return
    for spec in DATASETS.values():
        where = f"{spec.repo}/{spec.splits[spec.split]}" if spec.repo else "local files only"
        sizes = ", ".join(f"{split} {size}" for split, size in spec.sizes.items())
        say(f"{spec.name:<18}{spec.language}  {spec.metric}, {spec.normalizer:<8} {sizes}  {where}")
        say(f"{'':<18}{spec.about}; evaluated on {spec.split}")


def run_data_show(
    name: str, *, split: str | None, source: str | None, questions: int, unanswerable: Unanswerable, as_json: bool
) -> None:
    """``turntree data show``."""
    file, passport = _read(name, split, source, unanswerable, None)
    shown = [q.to_json() for q in file.questions[:questions]]
    if as_json:
        say_json({**passport, "left_out": dict(file.left_out), "first": shown})
        return
    for key, value in passport.items():
        say(f"{key}: {value}")
    if file.left_out:
        say("not in the metadata: " + ", ".join(f"{key} ({count} rows)" for key, count in file.left_out.items()))
    for row in shown:
        say(json.dumps(row, ensure_ascii=True))


def run_data_convert(
    names: Sequence[str],
    *,
    out: Path,
    split: str | None,
    source: str | None,
    corpus: bool | None,
    limit: int | None,
    unanswerable: Unanswerable,
) -> None:
    """``turntree data convert``."""
    if (out / "questions.jsonl").exists():
        raise ConfigError(f"{out} already holds questions.jsonl; choose another folder")
    read = {name: _read(name, split, source, unanswerable, limit)[0] for name in names}
    has_contexts = all(
        {"context", "contexts", "paragraphs"} & set(f.left_out) or f.layout == "squad" for f in read.values()
    )
    if corpus and limit is not None:
        raise ConfigError("--corpus takes the passages of whole files; leave --limit out")
    if corpus or (corpus is None and has_contexts and limit is None):
        made = corpus_from_contexts(*(f.path for f in read.values()), out=out, unanswerable=unanswerable)
        say(f"{len(made.questions)} questions, {len(made.passages)} passages -> {out}")
        for what, count in (
            ("without passages", len(made.without_context)),
            ("without an answer", len(made.unanswered)),
        ):
            if count:
                say(f"{count} questions {what} were left out")
        if made.unresolved:
            say(f"{len(made.unresolved)} questions name supporting titles that no passage has")
        return
    out.mkdir(parents=True, exist_ok=True)
    files = {_short(name): file.questions for name, file in read.items()}
    if len(files) < len(read):
        raise ConfigError(f"expected files of different names, found {list(read)}; convert them one by one")
    questions = list(next(iter(files.values()))) if len(files) == 1 else join_questions(files)
    save_questions(out / "questions.jsonl", questions)
    skipped = sum(file.skipped for file in read.values())
    say(f"{len(questions)} questions -> {out / 'questions.jsonl'}" + (f", {skipped} skipped" if skipped else ""))


def _short(name: str) -> str:
    path = Path(name)
    return f"{path.parent.name}-{path.stem}" if path.is_file() else dataset_spec(name).name


def _read(
    name: str, split: str | None, source: str | None, unanswerable: Unanswerable, limit: int | None
) -> tuple[QuestionFile, dict[str, Any]]:
    """A file by its path, else a published set by its name."""
    if Path(name).is_file():
        file = read_questions(name, unanswerable=unanswerable, limit=limit)
        facts = {"file": str(file.path), "container": file.container, "layout": file.layout, "sha256": file.sha256}
        return file, {**facts, "questions": len(file.questions), "skipped": file.skipped, "renamed": file.renamed}
    found = load_dataset_questions(name, split=split, source=source, unanswerable=unanswerable, limit=limit)
    return found.file, found.passport()
