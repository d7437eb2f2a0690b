"""A corpus out of the passages that come with questions, and the questions with the ids of their gold passages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.envs.datasets.contexts import Context
from turntree.envs.datasets.files import file_stem
from turntree.envs.datasets.layouts import Entry
from turntree.envs.datasets.reading import Unanswerable, UniqueIds, file_entries, refuse_or_skip, save_questions
from turntree.envs.task import FrozenDict, Question
from turntree.errors import DataError
from turntree.search_backend.corpus import save_corpus
from turntree.search_backend.passage import Passage

__all__ = ["ContextCorpus", "corpus_from_contexts"]


@dataclass(frozen=True, slots=True)
class ContextCorpus:
    """Passages of all contexts, each once, and the questions that had contexts.

    ``without_context`` and ``unanswered`` name (by id) questions that were left out. ``unresolved``: supporting titles,
    by question, that no passage of the corpus has; recall of such a question counts the found ones only.
    """

    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]
    without_context: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    unresolved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def meta(self) -> dict[str, Any]:
        """Counts, and a hash over passages and questions."""
        rows = [[p.id, p.title, p.text] for p in self.passages], [q.to_json() for q in self.questions]
        return {
            "passages": len(self.passages),
            "questions": len(self.questions),
            "without_context": len(self.without_context),
            "unanswered": len(self.unanswered),
            "unresolved_titles": sum(map(len, self.unresolved.values())),
            "sha256": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        }

    def save(self, folder: str | Path) -> None:
        """Write ``corpus.jsonl``, ``questions.jsonl`` and ``meta.json``: a folder for ``env.questions``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_corpus(path / "corpus.jsonl", self.passages)
        save_questions(path / "questions.jsonl", self.questions)
        text = json.dumps(self.meta(), indent=2) + "\n"
        (path / "meta.json").write_text(text, encoding="utf-8")


def corpus_from_contexts(
    *sources: str | Path, out: str | Path | None = None, prefix: str = "", unanswerable: Unanswerable = "refuse"
) -> ContextCorpus:
    """The corpus of one or several question files with inline contexts; written to the folder ``out``, if given.

    Passages are keyed by (title, text): the same title may stand over several paragraphs. Ids are ``prefix`` (the
    first file's name) and a number, in order of appearance. Each question gets ``supporting_ids`` and, where its gold
    steps are known, ``steps`` (``query``, ``answer``, ``supporting_id``).

    Raises :class:`DataError` where no question has contexts, and as :func:`load_questions` does.
    """
    files = [Path(source) for source in sources]
    if not files:
        raise DataError("expected at least one question file, found none")
    builder = _Builder(prefix or file_stem(files[0]))
    unanswered: list[str] = []
    for file in files:
        for entry in file_entries(file)[1]:
            if entry.missing:
                refuse_or_skip(entry, unanswerable)
                unanswered.append(entry.id or "")
            else:
                builder.add(entry)
    if not builder.passages:
        raise DataError(
            f"{files[0]}: expected questions with passages under 'context' or 'paragraphs', found none; "
            "take a corpus such as wiki-18 instead"
        )
    corpus = builder.finish(unanswered)
    if out is not None:
        corpus.save(out)
    return corpus


class _Builder:
    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.passages: dict[tuple[str, str], Passage] = {}
        self.by_title: dict[str, list[str]] = {}
        self.entries: list[tuple[str, Entry, dict[int, str]]] = []
        self.without: list[str] = []
        self.ids = UniqueIds()

    def add(self, entry: Entry) -> None:
        id = self.ids.of(entry.id or "")
        if not entry.contexts:
            self.without.append(id)
            return
        places = {i: self._passage(context) for i, context in enumerate(entry.contexts)}
        self.entries.append((id, entry, places))

    def _passage(self, context: Context) -> str:
        title, text = " ".join(context.title.split()), context.text.strip()
        found = self.passages.get((title, text))
        if found is None:
            found = Passage(f"{self.prefix}-{len(self.passages):05d}", title, text)
            self.passages[title, text] = found
            self.by_title.setdefault(title.casefold(), []).append(found.id)
        return found.id

    def finish(self, unanswered: Sequence[str]) -> ContextCorpus:
        questions, unresolved = [], {}
        for id, entry, places in self.entries:
            ids, lost = self._supporting(entry, places)
            if lost:
                unresolved[id] = lost
            metadata = {**entry.metadata, "supporting_ids": ids}
            if steps := _steps(entry, places):
                metadata["steps"] = steps
            if "decomposition" in metadata:
                metadata["decomposition"] = _supported(metadata["decomposition"], entry.contexts, places)
            questions.append(Question(id, entry.question, entry.answers, FrozenDict(metadata)))
        return ContextCorpus(
            tuple(self.passages.values()), tuple(questions), tuple(self.without), tuple(unanswered), unresolved
        )

    def _supporting(self, entry: Entry, places: Mapping[int, str]) -> tuple[list[str], tuple[str, ...]]:
        """Ids of the supporting passages, and titles that none of the question's passages has."""
        marked = [places[i] for i, context in enumerate(entry.contexts) if context.supporting]
        have = {c.title for c in entry.contexts if c.supporting}
        lost = []
        for title in entry.metadata.get("supporting_titles", ()):
            if title in have:
                continue
            # A title that another question's context spells alike and only once can mean nothing else.
            others = self.by_title.get(" ".join(title.split()).casefold(), [])
            if len(others) == 1:
                marked += others
            else:
                lost.append(title)
        return list(dict.fromkeys(marked)), tuple(lost)


def _steps(entry: Entry, places: Mapping[int, str]) -> list[dict[str, str]]:
    """Gold steps with the passage of each; [] unless every step's passage is known."""
    rows = [
        {"query": s["query"], "answer": s["answer"], "supporting_id": _place(s, entry.contexts, places)}
        for s in entry.metadata.get("decomposition", ())
    ]
    if not rows:
        rows = [
            {
                "query": f"{subject} {relation}",
                "answer": answer,
                "supporting_id": _about(subject, entry.contexts, places),
                "subject": subject,
                "relation": relation,
            }
            for subject, relation, answer in entry.metadata.get("evidences", ())
        ]
    return rows if all(row["supporting_id"] for row in rows) else []


def _supported(
    steps: Iterable[Mapping[str, Any]], contexts: Sequence[Context], places: Mapping[int, str]
) -> list[dict[str, Any]]:
    made = []
    for step in steps:
        place = _place(step, contexts, places)
        kept = {k: v for k, v in step.items() if k != "support_idx"}
        made.append({**kept, "support": place} if place else kept)
    return made


def _place(step: Mapping[str, Any], contexts: Sequence[Context], places: Mapping[int, str]) -> str:
    index, title = step.get("support_idx"), step.get("support_title")
    for i, context in enumerate(contexts):
        if index is not None and context.index == index:
            return places[i]
    same = [places[i] for i, context in enumerate(contexts) if title and context.title == title]
    return same[0] if len(same) == 1 else ""


def _about(subject: str, contexts: Sequence[Context], places: Mapping[int, str]) -> str:
    """The one supporting passage whose title is the subject, or begins with it (``Get Low (song)``)."""
    wanted = subject.casefold()
    supporting = [(c.title.casefold(), places[i]) for i, c in enumerate(contexts) if c.supporting]
    same = {id for title, id in supporting if title == wanted}
    longer = {id for title, id in supporting if title.startswith(f"{wanted} (")}
    return next((ids.pop() for ids in (same, longer) if len(ids) == 1), "")
