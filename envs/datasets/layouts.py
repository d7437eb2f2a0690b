"""From a row of any published layout to questions: answers, gold steps, supporting titles, inline contexts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from turntree.envs.datasets.contexts import Context, supporting_titles, take_contexts
from turntree.envs.datasets.fields import ALIAS_KEYS, ANSWER_KEYS, ID_KEYS, QUESTION_KEYS, answer_texts, find, row_id
from turntree.envs.datasets.files import Row
from turntree.envs.datasets.gold import gold_metadata
from turntree.errors import DataError

__all__ = ["Entry", "entries"]

MAX_EXTRA = 2000
"""Characters of a further field's JSON that still go into the metadata, which travels with every snapshot."""

_WRAPPED = re.compile(r"\s*Answer the given question\b.*\bQuestion:(.*)\Z", re.DOTALL)
_EXPECTED = (
    f"expected a question under one of {list(QUESTION_KEYS)} and its answers under one of {list(ANSWER_KEYS)}, "
    "or SQuAD, CMRC or verl rows"
)


@dataclass(slots=True)
class Entry:
    """One question as it stands in a file. ``missing`` says why it cannot be asked and scored, '' where it can.

    ``id`` is None where the file gives none; ``left_out`` names fields that are too long for metadata.
    """

    where: str
    layout: str
    id: str | None
    question: str
    answers: tuple[str, ...]
    missing: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    contexts: tuple[Context, ...] = ()
    left_out: tuple[str, ...] = ()


def entries(row: Row, *, stem: str) -> Iterator[Entry]:
    """The questions of one row; SQuAD-style rows hold several. ``stem`` names the file in derived ids.

    Raises ``DataError`` with the row's place where there is no question, or a value is not what its name says.
    """
    if _has_qas(row.data):
        yield from _squad(row)
    elif _is_verl(row.data):
        yield _verl(row, stem)
    else:
        yield _flat(row)


# One question a row ---------------------------------------------------------------------------------------------------


def _flat(row: Row) -> Entry:
    question_key = find(row.data, QUESTION_KEYS)
    if question_key is None:
        corpus = " (that is a corpus: search.corpus takes it)" if "contents" in row.data else ""
        raise DataError(f"{row.where}: {_EXPECTED}, found the keys {_keys(row.data)}{corpus}; convert the file")
    answer_key = find(row.data, ANSWER_KEYS)
    id_key = find(row.data, ID_KEYS)
    question = _question(row.data[question_key], row.where)
    answers, missing = _answers(row, answer_key)
    missing = missing if question.strip() else _BLANK
    own = _own_metadata(row)
    contexts = take_contexts(row.data, own, row.where)
    used = {question_key, answer_key, id_key, "metadata", *contexts.keys}
    used |= {key for key in (find(row.data, [name]) for name in ALIAS_KEYS) if answer_key and key}
    extras = {k: v for k, v in row.data.items() if k not in used and v is not None}
    gold = gold_metadata({**extras, **own}, id=row.data.get(id_key) if id_key else None, contexts=contexts.items)
    if "decomposition" in gold:
        extras.pop("question_decomposition", None)
    kept, left_out = _short(extras)
    return Entry(
        where=row.where,
        layout=_layout(row.data),
        id=None if id_key is None else row_id(row.data[id_key], row.where),
        question=question,
        answers=answers,
        missing=missing,
        metadata={**kept, **own} | gold,
        contexts=contexts.items,
        left_out=(*left_out, *contexts.keys),
    )


def _answers(row: Row, key: str | None) -> tuple[tuple[str, ...], str]:
    """All answers, main ones first, and why there are none."""
    if key is None:
        return (), f"{_EXPECTED}, found the keys {_keys(row.data)}"
    found = list(answer_texts(row.data[key], row.where, key=key))
    for name in ALIAS_KEYS:
        alias = find(row.data, [name])
        if found and alias is not None:
            found += answer_texts(row.data[alias], row.where, key=name)
    unanswerable = row.data.get("answerable") is False or row.data.get("is_impossible") is True
    if unanswerable:
        return (), "expected an answerable question, found one that its data set marks as unanswerable"
    if not found:
        return (), f"expected a list of answers under {key!r}, found {row.data[key]!r:.60}"
    return tuple(dict.fromkeys(found)), ""


def _own_metadata(row: Row) -> dict[str, Any]:
    own = row.data.get("metadata")
    if isinstance(own, str):
        try:
            own = json.loads(own)
        except (ValueError, RecursionError):
            own = row.data["metadata"]
    if own is not None and not isinstance(own, Mapping):
        raise DataError(f"{row.where}: expected an object under 'metadata', found {own!r:.60}; fix the row")
    return dict(own or {})


def _layout(data: Mapping[str, Any]) -> str:
    """What the layout is called: for people and passports; nothing depends on it."""
    keys = {key.lower() for key in data}
    signs = (
        ("flashrag", {"golden_answers"}),
        ("musique", {"question_decomposition"}),
        ("2wikimultihopqa", {"evidences"}),
        ("hotpotqa", {"supporting_facts"}),
        ("popqa", {"possible_answers"}),
        ("frames", {"prompt", "wiki_links"}),
        ("simpleqa", {"urls"}),
        ("squad", {"context", "answers"}),
    )
    if isinstance(data.get("Answer", data.get("answer")), Mapping):
        return "triviaqa"
    return next((name for name, needed in signs if needed <= keys), "question-answer")


# verl -----------------------------------------------------------------------------------------------------------------


def _is_verl(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("prompt"), list) or "reward_model" in data


def _verl(row: Row, stem: str) -> Entry:
    extra = _mapping(row.data.get("extra_info"))
    own = _own_metadata(row)
    contexts = take_contexts(row.data, own, row.where)
    value = _verl_answers(row.data, extra)
    answers = () if value is None else answer_texts(value, row.where, key="answers")
    used = {"id", "question", "golden_answers", "prompt", "reward_model", "metadata", *contexts.keys}
    rest = {k: v for k, v in row.data.items() if k not in used and v is not None}
    gold = gold_metadata({**rest, **own}, id=row.data.get("id"), contexts=contexts.items)
    kept, left_out = _short(rest)
    question = _question(_verl_question(row, extra), row.where)
    return Entry(
        where=row.where,
        layout="verl",
        id=_verl_id(row, extra, stem),
        question=question,
        answers=answers,
        missing=_BLANK if not question.strip() else "" if answers else _verl_missing(row, value),
        metadata={**kept, **own} | gold,
        contexts=contexts.items,
        left_out=(*left_out, *contexts.keys),
    )


def _verl_missing(row: Row, value: object) -> str:
    if value is not None:
        return f"expected a list of answers, found {value!r:.60}"
    return (
        "expected 'reward_model.ground_truth.target', 'golden_answers' or 'extra_info.answer', "
        f"found no answers among the keys {_keys(row.data)}"
    )


def _verl_question(row: Row, extra: Mapping[str, Any]) -> object:
    for value in (row.data.get("question"), extra.get("question")):
        if value is not None:
            return value
    prompt = row.data.get("prompt")
    messages = prompt if isinstance(prompt, list) else []
    users = [m["content"] for m in messages if isinstance(m, dict) and m.get("role") == "user" and "content" in m]
    if not users:
        raise DataError(
            f"{row.where}: expected 'question', 'extra_info.question' or a message of the user in 'prompt', "
            f"found no question among the keys {_keys(row.data)}; convert the file"
        )
    # Search-R1's instructions end with the question; they are not part of it.
    wrapped = _WRAPPED.fullmatch(users[-1]) if isinstance(users[-1], str) else None
    return wrapped[1].strip() if wrapped else users[-1]


def _verl_answers(data: Mapping[str, Any], extra: Mapping[str, Any]) -> object:
    truth = _mapping(data.get("reward_model")).get("ground_truth")
    # A bare ground truth comes last: some files join all aliases in it with commas.
    options = (data.get("golden_answers"), _mapping(truth).get("target"), extra.get("answer"), truth)
    return next((o for o in options if o is not None and not isinstance(o, Mapping)), None)


def _verl_id(row: Row, extra: Mapping[str, Any], stem: str) -> str:
    """The row's id with its data source in front (files of several sources repeat ids), else one derived."""
    source = str(row.data.get("data_source") or stem).replace("/", "_")
    if row.data.get("id") is not None:
        return f"{source}_{row_id(row.data['id'], row.where)}"
    if extra.get("index") is not None:
        return f"{source}_{extra.get('split') or stem}_{extra['index']}"
    return f"{source}_{stem}_{row.number}"


# SQuAD and CMRC -------------------------------------------------------------------------------------------------------


def _has_qas(data: Mapping[str, Any]) -> bool:
    paragraphs = data.get("paragraphs")
    if isinstance(paragraphs, list) and any(isinstance(p, Mapping) and "qas" in p for p in paragraphs):
        return True
    return isinstance(data.get("qas"), list)


def _squad(row: Row) -> Iterator[Entry]:
    """An article of paragraphs with ``qas``, or one such paragraph (CMRC's own layout)."""
    paragraphs = row.data["paragraphs"] if "qas" not in row.data else [row.data]
    title = str(row.data.get("title") or "")
    for p, paragraph in enumerate(paragraphs, start=1):
        key = find(paragraph, ("context", "context_text")) if isinstance(paragraph, Mapping) else None
        questions = paragraph.get("qas") if key else None
        if key is None or not isinstance(questions, list):
            raise DataError(
                f"{row.where}, paragraph {p}: expected 'context' and 'qas', found {_found(paragraph)}; fix the file"
            )
        context = Context(title, str(paragraph[key]), supporting=True)
        for q, qa in enumerate(questions, start=1):
            yield _squad_question(qa, f"{row.where}, paragraph {p}, question {q}", context)


def _squad_question(qa: object, where: str, context: Context) -> Entry:
    question_key = find(qa, QUESTION_KEYS) if isinstance(qa, Mapping) else None
    if question_key is None or not isinstance(qa, Mapping):
        raise DataError(f"{where}: expected a question under one of {list(QUESTION_KEYS)}, found {_found(qa)}")
    inner = Row(where, 0, qa)
    answers, missing = _answers(inner, find(qa, ("answers", "answer")))
    question = _question(qa[question_key], where)
    id_key = find(qa, ID_KEYS)
    return Entry(
        where=where,
        layout="squad",
        id=None if id_key is None else row_id(qa[id_key], where),
        question=question,
        answers=answers,
        missing=missing if question.strip() else _BLANK,
        metadata={"supporting_titles": list(supporting_titles([context]))},
        contexts=(context,),
    )


# Values ---------------------------------------------------------------------------------------------------------------


_BLANK = "expected a question, found a blank one"


def _question(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected a question, found {value!r:.60}; fix or remove the row")
    return value


def _short(extras: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Further fields without what is too long to travel with a task, and the names of that."""
    # Values that JSON does not know (dates in parquet) become texts.
    texts = {key: json.dumps(value, ensure_ascii=False, default=str) for key, value in extras.items()}
    kept = {key: json.loads(text) for key, text in texts.items() if len(text) <= MAX_EXTRA}
    return kept, tuple(key for key in extras if key not in kept and key not in _REWRITTEN)


# Gold steps arrive in the metadata in this project's words, however long they are in the data set's.
_REWRITTEN = frozenset(("supporting_facts", "question_decomposition", "evidences"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _keys(data: Mapping[str, Any]) -> list[str]:
    return sorted(data)[:20]


def _found(value: object) -> str:
    return f"the keys {_keys(value)}" if isinstance(value, Mapping) else f"a {type(value).__name__}"
