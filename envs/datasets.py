"""Question files: FlashRAG JSON Lines and Search-R1 / verl parquet. Anything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, DataError, MissingExtraError

__all__ = ["load_questions", "save_questions"]

_FLASHRAG = '{"id", "question", "golden_answers", "metadata"}'
_VERL = '{"prompt", "reward_model": {"ground_truth": {"target"}}, "extra_info"}'
_PARQUET_MAGIC = b"PAR1"


def load_questions(path: str | Path, *, limit: int | None = None) -> list[Question]:
    """Read questions in file order.

    FlashRAG JSON Lines: ``id`` and ``metadata`` may be missing; a missing id is derived from the file's name and the
    row number. Search-R1 / verl parquet (needs the extra ``parquet``): the question is ``question``, else
    ``extra_info.question``, else the last user message; the answers are ``golden_answers``, else
    ``reward_model.ground_truth.target``, else ``extra_info.answer``, else ``reward_model.ground_truth``; the id is
    derived from data source, split and index where there is none, and the other fields become metadata.

    Raises :class:`DataError` with file and row for another layout, an empty question, empty answers or a repeated id.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"expected limit >= 0 or None, found {limit}")
    file = Path(path)
    is_parquet = _head(file) == _PARQUET_MAGIC
    rows = _verl_questions(file) if is_parquet else _flashrag_questions(file)
    return _unique(islice(rows, limit), file)


def save_questions(path: str | Path, questions: Iterable[Question]) -> None:
    """Write FlashRAG JSON Lines, LF line ends, that :func:`load_questions` gives back."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question in questions:
            file.write(json.dumps(question.to_json(), ensure_ascii=False) + "\n")


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise DataError(f"expected a readable question file at {path}, found {error}; check the path") from error


def _unique(questions: Iterable[tuple[str, Question]], path: Path) -> list[Question]:
    seen: dict[str, str] = {}
    out: list[Question] = []
    for where, question in questions:
        if question.id in seen:
            raise DataError(
                f"{where}: expected unique ids, found {question.id!r} again (first at {seen[question.id]}); "
                "make the ids unique, or leave them out to have them derived"
            )
        seen[question.id] = where
        out.append(question)
    if not out and path.stat().st_size == 0:
        raise DataError(f"{path}: expected questions, found an empty file")
    return out


def _flashrag_questions(path: Path) -> Iterator[tuple[str, Question]]:
    for number, row in _json_rows(path):
        where = f"{path}, line {number}"
        if "question" not in row or "golden_answers" not in row:
            raise DataError(
                f"{where}: expected FlashRAG rows {_FLASHRAG} (or a parquet file of {_VERL}), "
                f"found the keys {sorted(row)}; convert the file"
            )
        metadata = row.get("metadata")
        if metadata is not None and not isinstance(metadata, Mapping):
            raise DataError(f"{where}: expected an object under 'metadata', found {metadata!r:.60}")
        id = row.get("id")
        yield (
            where,
            Question(
                id=f"{path.stem}-{number}" if id is None else _id(id, where),
                question=_question(row["question"], where),
                golden_answers=_answers(row["golden_answers"], where),
                metadata=FrozenDict(metadata),
            ),
        )


def _json_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig").strip()
                row = json.loads(text) if text else None
            except ValueError as error:  # of the encoding and of JSON
                raise DataError(
                    f"{path}, line {number}: expected JSON Lines of {_FLASHRAG} or a parquet file, "
                    f"found {line[:60]!r} ({error})"
                ) from error
            if not text:
                continue
            if not isinstance(row, dict):
                inner = f" of rows with the keys {sorted(row[0])}" if isinstance(row, list) and _is_table(row) else ""
                raise DataError(
                    f"{path}, line {number}: expected one JSON object {_FLASHRAG} a line, "
                    f"found a {type(row).__name__}{inner}; convert the file to JSON Lines"
                )
            yield number, row


def _is_table(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], dict)


def _verl_questions(path: Path) -> Iterator[tuple[str, Question]]:
    for number, row in enumerate(_parquet_rows(path), start=1):
        where = f"{path}, row {number}"
        extra = _mapping(row.get("extra_info"))
        used = {"id", "question", "golden_answers", "prompt", "reward_model"}
        yield (
            where,
            Question(
                id=_verl_id(row, extra, path, number, where),
                question=_question(_verl_question(row, extra, where), where),
                golden_answers=_answers(_verl_answers(row, extra, where), where),
                metadata=FrozenDict({k: v for k, v in row.items() if k not in used and v is not None}),
            ),
        )


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs pyarrow: pip install 'turntree[parquet]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected a complete parquet file, found {error}; fetch it again") from error


def _verl_question(row: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> object:
    if row.get("question") is not None:
        return row["question"]
    if extra.get("question") is not None:
        return extra["question"]
    prompt = row.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    users = [m["content"] for m in messages if isinstance(m, dict) and m.get("role") == "user" and "content" in m]
    if not users:
        raise DataError(f"{where}: expected {_VERL}, found no question among the keys {sorted(row)}")
    return users[-1]


def _verl_answers(row: Mapping[str, Any], extra: Mapping[str, Any], where: str) -> object:
    truth = _mapping(row.get("reward_model")).get("ground_truth")
    # A bare ground truth comes last: some files join all aliases in it with commas.
    options = (row.get("golden_answers"), _mapping(truth).get("target"), extra.get("answer"), truth)
    found = next((o for o in options if o is not None and not isinstance(o, dict)), None)
    if found is None:
        raise DataError(f"{where}: expected {_VERL}, found no answers among the keys {sorted(row)}")
    return found


def _verl_id(row: Mapping[str, Any], extra: Mapping[str, Any], path: Path, number: int, where: str) -> str:
    """The row's id with its data source in front (files of several sources repeat ids), else one derived."""
    source = str(row.get("data_source") or path.stem).replace("/", "_")
    if row.get("id") is not None:
        return f"{source}_{_id(row['id'], where)}"
    if extra.get("index") is not None:
        return f"{source}_{extra.get('split') or path.stem}_{extra['index']}"
    return f"{source}_{path.stem}_{number}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _id(value: object, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise DataError(f"{where}: expected a non-empty string or integer id, found {value!r:.60}")
    return str(value)


def _question(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: expected a question, found {value!r:.60}; fix or remove the row")
    return value


def _answers(value: object, where: str) -> tuple[str, ...]:
    """Answers as strings, in order, without blanks and repeats; numbers are written out."""
    items: Sequence[object] = value if isinstance(value, (list, tuple)) else [value]
    bad = next((i for i in items if isinstance(i, bool) or not isinstance(i, (str, int, float))), None)
    texts = tuple(dict.fromkeys(str(i) for i in items if str(i).strip()))
    if bad is not None or None in items or not texts:
        raise DataError(f"{where}: expected a list of answers, found {value!r:.60}; fix or remove the row")
    return texts
