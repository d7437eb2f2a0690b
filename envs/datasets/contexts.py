"""Passages that come with a question: HotpotQA's and 2WikiMultihopQA's contexts, MuSiQue's and SQuAD's paragraphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from turntree.errors import DataError

__all__ = ["Context", "TakenContexts", "fact_pairs", "supporting_titles", "take_contexts"]


@dataclass(frozen=True, slots=True)
class Context:
    """One passage beside a question. ``index`` is MuSiQue's ``idx``, by which gold steps point at it."""

    title: str
    text: str
    supporting: bool = False
    index: int | None = None


class TakenContexts(NamedTuple):
    """The passages of a row, and the names of the fields that held them."""

    items: tuple[Context, ...]
    keys: tuple[str, ...]


def supporting_titles(contexts: Iterable[Context]) -> tuple[str, ...]:
    """Titles of the passages that are marked as supporting, in order, without repeats and blanks."""
    return tuple(dict.fromkeys(c.title for c in contexts if c.supporting and c.title))


def fact_pairs(facts: object) -> list[tuple[str, int]]:
    """``supporting_facts`` as (title, sentence) pairs, from rows or from the hub's columns; [] for anything else."""
    if isinstance(facts, Mapping):
        titles, sentences = facts.get("title"), facts.get("sent_id", facts.get("sent_idx"))
        if isinstance(titles, (list, tuple)) and isinstance(sentences, (list, tuple)):
            return [(str(t), int(s)) for t, s in zip(titles, sentences)]
        return []
    if not isinstance(facts, (list, tuple)):
        return []
    pairs = [f for f in facts if isinstance(f, (list, tuple)) and len(f) == 2 and isinstance(f[1], int)]
    return [(str(title), sentence) for title, sentence in pairs] if len(pairs) == len(facts) else []


def take_contexts(row: Mapping[str, Any], metadata: dict[str, Any], where: str) -> TakenContexts:
    """The passages of a row, from its own fields or those of its ``metadata``, out of which they are removed.

    Raises ``DataError`` for a field of that name in a shape that is none of the published ones.
    """
    facts = fact_pairs(row.get("supporting_facts") or metadata.get("supporting_facts"))
    for source in (row, metadata):
        for key in ("context", "contexts", "paragraphs"):
            value = source.get(key)
            if not value or (source is metadata and not _looks_titled(value)):
                continue
            found = tuple(_contexts(value, facts, source, f"{where}, field {key!r}"))
            if source is metadata:
                del metadata[key]
            return TakenContexts(found, (key,))
    return TakenContexts((), ())


def _looks_titled(value: object) -> bool:
    """Whether a value in free-form metadata can only be a list of passages."""
    if isinstance(value, Mapping):
        return isinstance(value.get("title"), (list, tuple)) and ("sentences" in value or "content" in value)
    items = value if isinstance(value, (list, tuple)) else []
    return bool(items) and all(isinstance(i, Mapping) and ("paragraph_text" in i or "title" in i) for i in items)


def _contexts(value: object, facts: Sequence[tuple[str, int]], row: Mapping[str, Any], where: str) -> Iterator[Context]:
    if isinstance(value, str):  # SQuAD, flat
        yield Context(str(row.get("title") or ""), value, supporting=True)
    elif isinstance(value, Mapping):  # the hub's columns
        titles, texts = value.get("title"), value.get("sentences", value.get("content"))
        if not isinstance(titles, (list, tuple)) or not isinstance(texts, (list, tuple)):
            raise DataError(
                f"{where}: expected columns 'title' and 'sentences', found the keys {sorted(value)}; fix the row"
            )
        yield from _titled(zip(titles, texts), facts, where)
    elif isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        yield from (Context("", text) for text in value)
    elif isinstance(value, (list, tuple)) and all(isinstance(item, Mapping) for item in value):
        yield from _paragraphs(value, facts, where)
    elif isinstance(value, (list, tuple)) and all(isinstance(i, (list, tuple)) and len(i) == 2 for i in value):
        yield from _titled(value, facts, where)
    else:
        raise DataError(
            f"{where}: expected [title, [sentences]] pairs, paragraphs with 'title' and 'paragraph_text', or a text, "
            f"found {value!r:.60}; fix the row"
        )


def _paragraphs(items: Iterable[Mapping[str, Any]], facts: Sequence[tuple[str, int]], where: str) -> Iterator[Context]:
    named = {title for title, _ in facts}
    for item in items:
        text = next((item[key] for key in ("paragraph_text", "text", "content") if key in item), None)
        if not isinstance(text, str):
            raise DataError(f"{where}: expected 'paragraph_text' or 'text', found the keys {sorted(item)}; fix the row")
        title = str(item.get("title") or "")
        marked = bool(item["is_supporting"]) if "is_supporting" in item else title in named
        index = item.get("idx")
        yield Context(title, text, marked, index if isinstance(index, int) else None)


def _titled(items: Iterable[Sequence[Any]], facts: Sequence[tuple[str, int]], where: str) -> Iterator[Context]:
    rows = [(str(title), _sentences(sentences, where)) for title, sentences in items]
    for title, sentences in rows:
        wanted = [s for t, s in facts if t == title]
        # Of two passages of one title the one is meant that has such a sentence.
        alone = sum(t == title for t, _ in rows) == 1
        yield Context(title, _joined(sentences), bool(wanted) and (alone or min(wanted) < len(sentences)))


def _sentences(value: object, where: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
        raise DataError(f"{where}: expected a list of sentences, found {value!r:.60}; fix the row")
    return list(value)


def _joined(sentences: Sequence[str]) -> str:
    """HotpotQA's sentences begin with their space, those of 2WikiMultihopQA do not."""
    spaced = any(s[:1].isspace() for s in sentences[1:])
    return ("" if spaced else " ").join(sentences).strip()
