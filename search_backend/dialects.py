"""How published clients ask a retrieval server, and how published servers answer: both as plain JSON values.

Requests (``DIALECTS``): ``search_r1`` (Search-R1, verl, Tree-GRPO, SkyRL-Gym: ``queries``, ``topk``,
``return_scores``), ``skyrl`` (SkyRL's retrieval server: one ``query``), ``zerosearch`` (one ``query``, ``top_k``),
``research`` (ReSearch's server over FlashRAG: ``query`` as a list, ``top_n``), ``queries`` (Search-R1's web servers:
``queries`` alone). Answers of all of them are recognised by their shape, see :func:`read_answer`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from turntree.search_backend.passage import Passage
from turntree.search_backend.rows import parse_contents, render_contents

__all__ = ["DIALECTS", "Dialect", "ShapeError", "contents_of", "headed_text", "read_answer", "read_passage"]

_ID_KEYS = ("id", "_id", "docid", "doc_id", "idx", "url", "link")
_TEXT_KEYS = ("text", "content", "snippet", "passage")
_LIST_KEYS = ("result", "results", "documents", "passages", "data")
_HEADED = re.compile(r"\(Title: (.*)\) ?(.*)", re.DOTALL)


class ShapeError(ValueError):
    """An answer that is not what a retrieval server answers; the message says what was expected and quotes it."""


class Dialect(NamedTuple):
    """How a request is written. ``single``: it holds one query."""

    single: bool
    queries: str
    k: str = ""
    scores: str = ""

    def request(self, queries: Sequence[str], k: int) -> dict[str, Any]:
        """The JSON body; of a ``single`` dialect ``queries`` has one element."""
        body: dict[str, Any] = {self.queries: queries[0] if self.single else list(queries)}
        if self.k:
            body[self.k] = k
        if self.scores:
            body[self.scores] = True
        return body


DIALECTS: dict[str, Dialect] = {
    "search_r1": Dialect(single=False, queries="queries", k="topk", scores="return_scores"),
    "skyrl": Dialect(single=True, queries="query", k="topk", scores="return_scores"),
    "zerosearch": Dialect(single=True, queries="query", k="top_k"),
    "research": Dialect(single=False, queries="query", k="top_n", scores="return_score"),
    "queries": Dialect(single=False, queries="queries"),
}
"""Request forms by name."""


# -- what a server sends ------------------------------------------------------------------------------------------


def contents_of(passage: Passage) -> str:
    """``contents`` as in wiki-18, always with a title line; a line break in a title becomes a space."""
    return render_contents(" ".join(passage.title.splitlines()), passage.text)


def headed_text(contents: str) -> str:
    """``(Title: "T") text``, as Search-R1's rerank server writes the documents that it ranked."""
    title, _, text = contents.partition("\n")
    return f"(Title: {title}) {text}"


# -- what a client reads ------------------------------------------------------------------------------------------


def read_answer(document: Any, count: int) -> list[list[Passage]]:
    """The passages for each of ``count`` queries.

    Read are ``{"result": [[...], ...]}`` (also under ``results``, ``documents``, ``passages``, ``data``) and plain
    lists: one list for each query, ``[lists, scores]``, and for one query its documents alone or ``[documents,
    scores]``. A document is a string or an object with ``contents``, or ``text`` and ``title``, bare or under
    ``document`` beside its ``score``. What has no id gets a hash of its content.

    Raises :class:`ShapeError` for everything else, such as error objects and another number of lists than queries.
    """
    if isinstance(document, Mapping):
        key = next((key for key in _LIST_KEYS if key in document), None)
        if key is None or document.get("error"):
            raise ShapeError(f'expected {{"result": [[...], ...]}}, found {_shown(document)}')
        lists = document[key]
        if not isinstance(lists, list) or not lists:
            return _lists(lists, count)
        return [_passages(lists)] if count == 1 and _is_document(lists[0]) else _lists(lists, count)
    if not isinstance(document, list):
        raise ShapeError(f"expected an object or a list, found {_shown(document)}")
    return _plain(document, count)


def _plain(answer: list[Any], count: int) -> list[list[Passage]]:
    """A list without a name around it: its meaning follows from what is in it and from the number of queries."""
    if len(answer) == count and all(_is_documents(each) for each in answer):
        return _lists(answer, count)
    if len(answer) == 2:
        first, scores = answer
        if _is_lists(first) and _is_lists(scores) and len(first) == len(scores) == count:
            return [_scored(docs, numbers) for docs, numbers in zip(first, scores, strict=True)]
        if count == 1 and _is_documents(first) and isinstance(scores, list):
            return [_scored(first, scores)]
    if count == 1 and _is_documents(answer):
        return [_passages(answer)]
    return _lists(answer, count)


def _lists(value: Any, count: int) -> list[list[Passage]]:
    if not isinstance(value, list):
        raise ShapeError(f"expected a list for each query, found {_shown(value)}")
    if len(value) != count:
        raise ShapeError(f"expected {count} lists, one for each query, found {len(value)}: {_shown(value)}")
    for each in value:
        if not isinstance(each, list):
            raise ShapeError(f"expected a list of documents for each query, found {_shown(each)}")
    return [_passages(each) for each in value]


def _passages(documents: list[Any]) -> list[Passage]:
    return [read_passage(document) for document in documents]


def _scored(documents: list[Any], scores: list[Any]) -> list[Passage]:
    if len(documents) != len(scores):
        raise ShapeError(f"expected a score for each of {len(documents)} documents, found {_shown(scores)}")
    return [read_passage({"document": d, "score": s}) for d, s in zip(documents, scores, strict=True)]


def _is_document(value: Any) -> bool:
    return isinstance(value, (str, Mapping))


def _is_documents(value: Any) -> bool:
    return isinstance(value, list) and all(_is_document(each) for each in value)


def _is_lists(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, list) for each in value)


def read_passage(document: Any) -> Passage:
    """One document of an answer. Raises :class:`ShapeError`."""
    score = None
    if isinstance(document, Mapping) and "document" in document:
        score, document = document.get("score"), document["document"]
    elif isinstance(document, Mapping):
        score = document.get("score")
    if isinstance(document, str):
        return _passage(None, *_parsed(document), score)
    if not isinstance(document, Mapping):
        raise ShapeError(f"expected a document, found {_shown(document)}")
    title = document.get("title") or ""
    key = next((key for key in _TEXT_KEYS if document.get(key) is not None), None)
    if key is not None:
        text = document[key]
    elif "contents" in document:
        text = document["contents"]
        if isinstance(text, str):
            head, text = _parsed(text)
            title = head or title
    else:
        raise ShapeError(f"expected a document with contents or text, found {_shown(document)}")
    if not isinstance(title, str) or not isinstance(text, str):
        raise ShapeError(f"expected strings as title and text, found {_shown(document)}")
    name = next((document[key] for key in _ID_KEYS if document.get(key) not in (None, "")), None)
    return _passage(name, title, text, score)


def _parsed(contents: str) -> tuple[str, str]:
    """Title and text of ``contents``, also in the form of :func:`headed_text`."""
    headed = _HEADED.fullmatch(contents)
    return parse_contents(f"{headed[1]}\n{headed[2]}" if headed else contents)


def _passage(name: Any, title: str, text: str, score: Any) -> Passage:
    if name is not None and (isinstance(name, bool) or not isinstance(name, (str, int))):
        raise ShapeError(f"expected a string or an integer as id, found {_shown(name)}")
    if score is not None and (
        isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score)
    ):
        raise ShapeError(f"expected a finite number or null as score, found {_shown(score)}")
    if name is None:
        name = "sha256:" + hashlib.sha256(f"{title}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Passage(str(name), title, text, None if score is None else float(score))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
