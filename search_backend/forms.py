"""The requests that the server takes, one model each, and how their answers are written."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from turntree.search_backend.dialects import ShapeError, contents_of, headed_text, read_passage
from turntree.search_backend.passage import Passage

__all__ = [
    "Ask",
    "BadRequest",
    "RequestLimits",
    "batch_search_form",
    "rerank_form",
    "retrieve_form",
    "search_form",
    "to_json",
]

Found = Sequence[Sequence[Passage]]


class BadRequest(ValueError):
    """A request that cannot be answered; ``param`` is the key that is at fault."""

    def __init__(self, message: str, *, param: str = "") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may hold. ``default_k``: passages where it does not say."""

    max_queries: int = 4096
    max_k: int = 1000
    max_query_chars: int = 16384
    default_k: int = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that was understood: what to search, what to rank, and how to write the answer.

    ``documents``: what each query's passages are ranked among (/rerank); None where they are searched.
    ``rerank_k``: passages that are left of ``k`` after ranking; None where nothing is ranked.
    ``ignored``: keys that no published server knows and that were left out of account.
    """

    queries: Sequence[str]
    k: int
    write: Callable[[Found], Any]
    documents: Found | None = None
    rerank_k: int | None = None
    ignored: tuple[str, ...] = ()


class _Form(BaseModel):
    """Keys of a request. Published servers ignore others, and clients send some (``dataset``, ``collection``)."""

    model_config = ConfigDict(extra="allow", strict=True)

    @property
    def ignored(self) -> tuple[str, ...]:
        return tuple(self.model_extra or ())


_K = Field(default=None, ge=1, description="passages for each query (null: the server's default)")
_SCORES = Field(default=False, description="whether each document comes with its score")


F = TypeVar("F", bound=_Form)


class Retrieve(_Form):
    """Search-R1, verl, Tree-GRPO, SkyRL-Gym."""

    queries: list[str]
    topk: int | None = _K
    return_scores: bool = _SCORES


class RetrieveOne(_Form):
    """SkyRL's retrieval server: one query, answered by a list of one list."""

    query: str
    topk: int | None = _K
    return_scores: bool = _SCORES


class RetrieveTexts(_Form):
    """ZeroSearch: one query, answered by its documents alone."""

    query: str
    top_k: int | None = _K


class RetrieveRerank(_Form):
    """Search-R1's retrieval and rerank server in one."""

    queries: list[str]
    topk_retrieval: int | None = Field(default=10, ge=1, description="passages that are ranked anew")
    topk_rerank: int | None = Field(default=3, ge=1, description="passages that are left")
    return_scores: bool = _SCORES


class Rerank(_Form):
    """Search-R1's rerank server. Documents are those of an answer of /retrieve, with or without scores."""

    queries: list[str]
    documents: list[list[Any]]
    rerank_topk: int | None = _K
    return_scores: bool = _SCORES


class Search(_Form):
    """ReSearch's server over FlashRAG: one query."""

    query: str
    top_n: int = Field(default=10, ge=1)
    return_score: bool = False


class BatchSearch(_Form):
    """ReSearch's server over FlashRAG: several queries."""

    query: list[str]
    top_n: int = Field(default=10, ge=1)
    return_score: bool = False


def retrieve_form(body: bytes, limits: RequestLimits) -> Ask:
    """``POST /retrieve``: the form follows from the keys. Raises :class:`BadRequest`."""
    value = _value(body)
    if "queries" in value and ("topk_retrieval" in value or "topk_rerank" in value):
        both = _read(RetrieveRerank, value)
        left = _k(both.topk_rerank, "topk_rerank", limits)
        k = max(_k(both.topk_retrieval, "topk_retrieval", limits), left)
        return Ask(
            _queries(both.queries, limits),
            k,
            _ranked(both.return_scores, headed=False),
            rerank_k=left,
            ignored=both.ignored,
        )
    if "query" in value and "top_k" in value:
        texts = _read(RetrieveTexts, value)
        queries, k = _queries([texts.query], limits, "query"), _k(texts.top_k, "top_k", limits)
        return Ask(queries, k, _texts, ignored=texts.ignored)
    if "query" in value:
        one = _read(RetrieveOne, value)
        queries, k = _queries([one.query], limits, "query"), _k(one.topk, "topk", limits)
        return Ask(queries, k, _scored if one.return_scores else _bare, ignored=one.ignored)
    many = _read(Retrieve, value)
    queries, k = _queries(many.queries, limits), _k(many.topk, "topk", limits)
    return Ask(queries, k, _scored if many.return_scores else _bare, ignored=many.ignored)


def search_form(body: bytes, limits: RequestLimits) -> Ask:
    """``POST /search``. Raises :class:`BadRequest`."""
    one = _read(Search, _value(body))
    write = _with_scores if one.return_score else _documents
    queries = _queries([one.query], limits, "query")
    k = _k(one.top_n, "top_n", limits)
    return Ask(queries, k, lambda found: _first(write(found), scores=one.return_score), ignored=one.ignored)


def batch_search_form(body: bytes, limits: RequestLimits) -> Ask:
    """``POST /batch_search``. Raises :class:`BadRequest`."""
    many = _read(BatchSearch, _value(body))
    queries = _queries(many.query, limits, "query")
    write = _with_scores if many.return_score else _documents
    return Ask(queries, _k(many.top_n, "top_n", limits), write, ignored=many.ignored)


def rerank_form(body: bytes, limits: RequestLimits) -> Ask:
    """``POST /rerank``. Raises :class:`BadRequest`."""
    asked = _read(Rerank, _value(body))
    queries = _queries(asked.queries, limits)
    if len(asked.documents) != len(queries):
        raise BadRequest(
            f"expected a list of documents for each of {len(queries)} queries, found {len(asked.documents)}",
            param="documents",
        )
    longest = max((len(each) for each in asked.documents), default=0)
    if longest > limits.max_k:
        raise BadRequest(f"expected at most {limits.max_k} documents for a query, found {longest}", param="documents")
    try:
        documents = [[read_passage(document) for document in each] for each in asked.documents]
    except ShapeError as error:
        raise BadRequest(str(error), param="documents") from None
    k = _k(asked.rerank_topk, "rerank_topk", limits)
    write = _ranked(asked.return_scores, headed=True)
    return Ask(queries, k, write, documents=documents, rerank_k=k, ignored=asked.ignored)


# -- reading ---------------------------------------------------------------------------------------------------


_JSON: TypeAdapter[Any] = TypeAdapter(Any)


def _value(body: bytes) -> Mapping[str, Any]:
    try:
        value = _JSON.validate_json(body)
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise BadRequest(f"expected JSON, found {body[:60]!r} ({reason})") from None
    if not isinstance(value, dict):
        raise BadRequest(f"expected a JSON object, found {body[:60]!r}")
    return value


def _read(form: type[F], value: Mapping[str, Any]) -> F:
    try:
        read = form.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise BadRequest(f"missing key {param!r}, found {', '.join(value) or 'none'}", param=param) from None
        raise BadRequest(f"{param}: {first['msg']}, found {first['input']!r:.60}", param=param) from None
    wrong = next((key for key in read.ignored if _means_something(key, form)), None)
    if wrong is not None:
        raise BadRequest(f"unknown key {wrong!r}; expected {', '.join(form.model_fields)}", param=wrong)
    return read


_COUNTS = ("k", "n", "num", "topn")
_FORMS = (Retrieve, RetrieveOne, RetrieveTexts, RetrieveRerank, Rerank, Search, BatchSearch)
_MEANINGFUL = frozenset(_COUNTS) | {name.replace("_", "") for form in _FORMS for name in form.model_fields}


def _means_something(key: str, form: type[_Form]) -> bool:
    """Whether an unknown key is a known one misspelt, or of another form: to ignore it would answer another question
    than was asked (``top_k`` beside ``queries``: the default number of passages)."""
    plain = key.lower().replace("_", "").replace("-", "")
    near = difflib.get_close_matches(plain, [name.replace("_", "") for name in form.model_fields], n=1, cutoff=0.8)
    return plain in _MEANINGFUL or bool(near)


def _queries(queries: Sequence[str], limits: RequestLimits, param: str = "queries") -> Sequence[str]:
    if len(queries) > limits.max_queries:
        raise BadRequest(f"{param}: at most {limits.max_queries} of one request, found {len(queries)}", param=param)
    longest = max(map(len, queries), default=0)
    if longest > limits.max_query_chars:
        raise BadRequest(f"{param}: at most {limits.max_query_chars} characters each, found {longest}", param=param)
    return queries


def _k(value: int | None, param: str, limits: RequestLimits) -> int:
    if value is None:
        return min(limits.default_k, limits.max_k)
    if value > limits.max_k:
        raise BadRequest(f"{param}: at most {limits.max_k}, found {value}", param=param)
    return value


# -- writing ---------------------------------------------------------------------------------------------------


def _document(passage: Passage) -> dict[str, Any]:
    return {"id": passage.id, "contents": contents_of(passage)}


def _score(passage: Passage) -> float | None:
    """JSON knows no NaN and no infinity."""
    return passage.score if passage.score is not None and math.isfinite(passage.score) else None


def _bare(found: Found) -> Any:
    return {"result": _documents(found)}


def _scored(found: Found) -> Any:
    return {"result": [[{"document": _document(p), "score": _score(p)} for p in passages] for passages in found]}


def _texts(found: Found) -> Any:
    (passages,) = found
    return [{"id": p.id, "title": p.title, "text": p.text, "score": _score(p)} for p in passages]


def _documents(found: Found) -> Any:
    return [[_document(p) for p in passages] for passages in found]


def _with_scores(found: Found) -> Any:
    return [_documents(found), [[_score(p) for p in passages] for passages in found]]


def _first(value: Any, *, scores: bool) -> Any:
    return [value[0][0], value[1][0]] if scores else value[0]


def _ranked(scores: bool, *, headed: bool) -> Callable[[Found], Any]:
    """Ranked documents are strings in Search-R1: ``(Title: "T") text`` of /rerank, ``contents`` of /retrieve."""

    def text(passage: Passage) -> str:
        contents = contents_of(passage)
        return headed_text(contents) if headed else contents

    def write(found: Found) -> Any:
        if not scores:
            return {"result": [[text(p) for p in passages] for passages in found]}
        return {"result": [[{"document": text(p), "score": _score(p)} for p in passages] for passages in found]}

    return write


def to_json(value: Any) -> bytes:
    """The body of an answer."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
