"""Gold steps and supporting passages as metadata, in the words of this project, from the words of each data set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from turntree.envs.datasets.contexts import Context, fact_pairs, supporting_titles
from turntree.envs.datasets.fields import decoded_list

__all__ = ["gold_metadata", "resolved"]

_HOPS = re.compile(r"(\d)hop\w*(?=__)")
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
