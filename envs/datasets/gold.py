"""Gold steps and supporting passages as metadata, in the words of this project, from the words of each data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from turntree.envs.datasets.contexts import Context, fact_pairs, supporting_titles
from turntree.envs.datasets.fields import decoded_list
from turntree.envs.task import thaw

__all__ = ["gold_metadata", "gold_steps", "resolved"]

_HOPS = re.compile(r"(\d)hop\w*(?=__)")
_QUALIFIER = re.compile(r"\s*\([^()]*\)$")
_VERDICTS = frozenset(("yes", "no", "true", "false"))
_REFERENCE = re.compile(r"#(\d+)")


def gold_metadata(metadata: Mapping[str, Any], *, id: object, contexts: Sequence[Context]) -> dict[str, Any]:
    """What to add to a row's metadata: ``supporting_titles``, ``decomposition``, ``evidences``, ``type``, ``hops``.

    ``decomposition`` (MuSiQue): question, answer and ``query`` of each step, ``#1`` replaced by the first answer;
    ``evidences`` (2WikiMultihopQA): triples. Only what the row itself says; nothing is guessed.
    """
    found: dict[str, Any] = {}
    titles = _titles(metadata, contexts)
    if titles and "supporting_titles" not in metadata:
        found["supporting_titles"] = titles
    if pairs := fact_pairs(metadata.get("supporting_facts")):
        found["supporting_facts"] = [list(pair) for pair in pairs]
    if steps := _decomposition(metadata.get("question_decomposition") or metadata.get("decomposition"), contexts):
        found["decomposition"] = steps
        found.setdefault("hops", metadata.get("hops", len(steps)))
    if triples := _triples(metadata.get("evidences")):
        found["evidences"] = triples
    if isinstance(id, str) and (match := _HOPS.match(id)):
        found |= {"type": metadata.get("type", match[0]), "hops": metadata.get("hops", int(match[1]))}
    if "reasoning_types" in metadata and "type" not in metadata:
        found["type"] = metadata["reasoning_types"]
    return found


def gold_steps(question: str, answers: Sequence[str], metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The searches that lead to the answer, as far as the metadata tell them; () where they do not.

    Each has a ``query``, the ``answer`` that it brings, and, where they are known, ``subject`` and ``relation``,
    ``supporting_id``, or ``parts`` (what a passage must name for the step to be told). In this order of preference:
    ``steps`` as they are (generated worlds); ``decomposition`` (MuSiQue); ``evidences`` (2WikiMultihopQA); the
    ``supporting_titles`` (HotpotQA), searched by title, those that the question names first. Where it names none, the
    question itself is the first query. A title's step brings the next title, the last one the answer.
    """
    if isinstance(steps := metadata.get("steps"), (list, tuple)) and steps:
        return tuple(steps)
    if rows := metadata.get("decomposition"):
        return _decomposed(rows)
    if triples := _triples(thaw(metadata.get("evidences"))):
        told = [tuple(_plain(cell) for cell in triple) for triple in triples]
        if not all(map(all, told)):
            return ()
        return tuple({"query": f"{s} {r}", "answer": o, "subject": s, "relation": r} for s, r, o in told)
    titles = [title for title in metadata.get("supporting_titles", ()) if _plain(str(title))]
    if not titles or not answers:
        return ()
    compares = metadata.get("type") == "comparison" or answers[0].casefold() in _VERDICTS
    return _title_steps(question, answers[0], titles, compares=compares)


def _decomposed(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    answers = [_plain(str(row.get("answer", ""))) for row in rows]
    queries = [_plain(str(row.get("query") or resolved(str(row["question"]), answers))) for row in rows]
    if not all(answers) or not all(queries):
        return ()
    return tuple(
        {"query": query, "answer": answer} | ({"supporting_id": row["support"]} if row.get("support") else {})
        for row, query, answer in zip(rows, queries, answers, strict=True)
    )


def _title_steps(question: str, answer: str, titles: Sequence[str], *, compares: bool) -> tuple[Mapping[str, Any], ...]:
    """One search a title. What a step brings is not read off a text: it is told where its passage is found."""
    words = question.casefold()
    places = {title: words.find(_bare(title).casefold()) for title in titles}
    named = sorted((title for title in titles if places[title] >= 0), key=lambda title: places[title])
    # What is asked for is not searched by name before the passage that leads to it; else the order of the row stays.
    others = sorted((t for t in titles if places[t] < 0), key=lambda t: _bare(t).casefold() == answer.casefold())
    ordered = [*named, *others]
    brings = ordered if compares else [*map(_bare, ordered[1:]), answer]
    queries = [_bare(title) for title in ordered]
    if not named:
        queries[0] = _plain(question)
    return tuple(
        {"query": query, "answer": brought, "parts": (title,)}
        for query, brought, title in zip(queries, brings, ordered, strict=True)
    )


def _bare(title: str) -> str:
    """The title without what tells it from others of the same name: ``Get Low (song)`` gives ``Get Low``."""
    plain = _plain(title)
    return _QUALIFIER.sub("", plain) or plain


def _plain(text: str) -> str:
    """With single spaces: a turn's action is read without the white space around it."""
    return " ".join(text.split())


def _titles(metadata: Mapping[str, Any], contexts: Sequence[Context]) -> list[str]:
    pairs = fact_pairs(metadata.get("supporting_facts"))
    if pairs:
        return list(dict.fromkeys(title for title, _ in pairs))
    marked = list(supporting_titles(contexts))
    return marked or _linked_titles(metadata.get("wiki_links"))


def _linked_titles(links: object) -> list[str]:
    """Titles from addresses of Wikipedia pages (FRAMES); the list may stand in a string."""
    items = decoded_list(links, "wiki_links") if isinstance(links, str) else links
    if not isinstance(items, (list, tuple)):
        return []
    paths = [urlsplit(item).path for item in items if isinstance(item, str)]
    titles = [unquote(path.rpartition("/wiki/")[2]).replace("_", " ").strip() for path in paths if "/wiki/" in path]
    return list(dict.fromkeys(filter(None, titles)))


def _decomposition(steps: object, contexts: Sequence[Context]) -> list[dict[str, Any]]:
    if not isinstance(steps, (list, tuple)) or not all(isinstance(s, Mapping) and "question" in s for s in steps):
        return []
    answers = [str(step.get("answer", "")) for step in steps]
    by_index = {context.index: context for context in contexts if context.index is not None}
    made = []
    for step, answer in zip(steps, answers):
        question = str(step["question"])
        row: dict[str, Any] = {"question": question, "answer": answer, "query": resolved(question, answers)}
        place = step.get("paragraph_support_idx")
        support = step.get("support_paragraph")
        if isinstance(place, int) and place in by_index:
            row |= {"support_title": by_index[place].title, "support_idx": place}
        elif isinstance(support, Mapping) and support.get("title"):
            row["support_title"] = str(support["title"])
        # What an earlier reading found, and the id in a corpus that was made of these contexts.
        row |= {key: step[key] for key in ("support_title", "support_idx", "support") if key in step and key not in row}
        made.append(row)
    return made


def resolved(question: str, answers: Sequence[str]) -> str:
    """A step's question as a query: ``#1 >> capital`` with the first answer Kenya gives ``Kenya capital``."""

    def answer(match: re.Match[str]) -> str:
        number = int(match[1])
        return answers[number - 1] if 1 <= number <= len(answers) else match[0]

    return " ".join(_REFERENCE.sub(answer, question).replace(">>", " ").split())


def _triples(value: object) -> list[list[str]]:
    if isinstance(value, Mapping):  # FlashRAG and the hub keep them by column
        columns = [value.get(name) for name in ("fact", "relation", "entity")]
        rows = list(zip(*columns)) if all(isinstance(c, (list, tuple)) for c in columns) else []
        return [[str(cell) for cell in row] for row in rows]
    if not isinstance(value, (list, tuple)) or not all(isinstance(t, (list, tuple)) and len(t) == 3 for t in value):
        return []
    return [[str(cell) for cell in triple] for triple in value]
