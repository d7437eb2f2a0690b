"""Reading and writing question files."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

from turntree.envs.datasets.files import file_stem, read_rows
from turntree.envs.datasets.layouts import Entry, entries
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, DataError
from turntree.search_backend.rows import json_line

__all__ = [
    "QuestionFile",
    "Unanswerable",
    "file_entries",
    "join_questions",
    "load_questions",
    "read_questions",
    "save_questions",
]

_log = logging.getLogger(__name__)

Unanswerable = Literal["refuse", "skip"]
"""What to do with a blank question, one without an answer, or one that its data set marks as unanswerable."""


@dataclass(frozen=True, slots=True)
class QuestionFile:
    """What was read from one file.

    ``container`` and ``layout`` say what the file turned out to be, ``sha256`` is of its bytes as they lie there.
    ``skipped`` counts blank and unanswered questions that were left out, ``renamed`` ids that were repeated and made
    unique, ``left_out`` the fields that are too long for metadata (contexts among them), by name.
    """

    path: Path
    container: str
    layout: str
    sha256: str
    questions: tuple[Question, ...]
    skipped: int = 0
    renamed: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)


def load_questions(
    path: str | Path, *, limit: int | None = None, unanswerable: Unanswerable = "refuse"
) -> list[Question]:
    """Read questions in file order, whatever published layout the file has; see ``docs/data.md`` for all of them.

    Every answer and alias arrives in ``golden_answers``. Supporting titles, gold steps and the row's further fields
    become metadata; inline contexts do not (:func:`turntree.envs.datasets.corpus_from_contexts` takes them). Ids are
    the file's own; a missing one is derived from the file's name and the row, a repeated one gets a number.

    ``unanswerable="skip"`` leaves out blank questions and those without an answer, and logs how many; by default they
    are an error.

    Raises :class:`DataError` with file and row for another layout, a missing field, an empty question or no answer.
    """
    found = read_questions(path, limit=limit, unanswerable=unanswerable)
    if found.skipped:
        _log.warning("%s: %d blank questions, or ones without an answer, were skipped", path, found.skipped)
    return list(found.questions)


def read_questions(
    path: str | Path, *, limit: int | None = None, unanswerable: Unanswerable = "refuse"
) -> QuestionFile:
    """Like :func:`load_questions`, with what was found out about the file. ``limit`` counts questions that are kept."""
    if limit is not None and limit < 0:
        raise ConfigError(f"expected limit >= 0 or None, found {limit}")
    file = Path(path)
    container, found = file_entries(file)
    skipped = 0
    renamed = 0
    left_out: Counter[str] = Counter()
    layouts: Counter[str] = Counter()

    def kept() -> Iterator[Entry]:
        nonlocal skipped
        for entry in found:
            if entry.missing:
                refuse_or_skip(entry, unanswerable)
                skipped += 1
                continue
            yield entry

    ids = UniqueIds()
    questions: list[Question] = []
    for entry in islice(kept(), limit):
        left_out.update(set(entry.left_out))
        layouts[entry.layout] += 1
        id = ids.of(entry.id or "")
        renamed += id != entry.id
        questions.append(Question(id, entry.question, entry.answers, FrozenDict(entry.metadata)))
    if not questions and limit != 0:
        reason = f"{skipped} blank ones or ones without an answer, and no other" if skipped else "none"
        raise DataError(f"{file}: expected questions, found {reason}; pass the file that holds the answers")
    layout = layouts.most_common(1)[0][0] if layouts else ""
    return QuestionFile(
        file, container, layout, file_sha256(file), tuple(questions), skipped, renamed, dict(sorted(left_out.items()))
    )


def file_entries(path: Path) -> tuple[str, Iterator[Entry]]:
    """The container of a file and its questions one by one, each with an id; contexts included."""
    container, rows = read_rows(path)
    stem = file_stem(path)

    def named() -> Iterator[Entry]:
        for row in rows:
            for count, entry in enumerate(entries(row, stem=stem), start=1):
                if entry.id is None:
                    entry.id = f"{stem}-{row.number}" if entry.layout != "squad" else f"{stem}-{row.number}-{count}"
                yield entry

    return container, named()


def refuse_or_skip(entry: Entry, unanswerable: Unanswerable) -> None:
    """Nothing for ``skip``. Raises ``DataError`` for ``refuse``, ``ConfigError`` for any other word."""
    if unanswerable not in get_args(Unanswerable):
        raise ConfigError(f"unanswerable={unanswerable!r} is not known; expected 'refuse' or 'skip'")
    if unanswerable == "refuse":
        raise DataError(
            f"{entry.where}: {entry.missing}; fix or remove the row, or leave such questions out with "
            "unanswerable='skip'"
        )


def file_sha256(path: Path) -> str:
    """Hash of a file's bytes, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def join_questions(sets: Mapping[str, Iterable[Question]]) -> list[Question]:
    """Several sets as one, in order: each id gets the set's name in front, ``metadata["dataset"]`` holds the name.

    Ids are unique in the result, whatever the sets call their questions.
    """
    ids = UniqueIds()
    return [
        replace(q, id=ids.of(f"{name}:{q.id}"), metadata=FrozenDict({**q.metadata, "dataset": name}))
        for name, questions in sets.items()
        for q in questions
    ]


def save_questions(path: str | Path, questions: Iterable[Question] | Sequence[Question]) -> None:
    """Write FlashRAG JSON Lines, LF line ends, that :func:`load_questions` gives back."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for question in questions:
            file.write(json_line(question.to_json()))


class UniqueIds:
    """Ids as they come; a repeated one gets the first free ``-2``, ``-3``, ... behind it."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.counts: Counter[str] = Counter()

    def of(self, id: str) -> str:
        found = id
        while found in self.taken:
            self.counts[id] += 1
            found = f"{id}-{self.counts[id] + 1}"
        self.taken.add(found)
        return found
