"""How hard questions are: for one search, for a search a step, and for an agent that has to guess what is meant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.envs.task import FrozenDict, Question
from turntree.errors import DataError
from turntree.search_backend.bm25 import BM25Backend
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = ["Difficulty", "Uncertainty", "difficulty", "uncertainty"]


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Shares of what the first ``k`` passages hold.

    ``one_search``: questions whose own text, as one query, finds all supporting passages. ``gold_steps``: gold searches
    that find all of their passages. ``all_steps``: questions of which every gold search does. ``by_type`` and
    ``by_hops``: ``one_search`` and ``all_steps`` of each kind.
    """

    k: int
    questions: int
    one_search: float
    gold_steps: float
    all_steps: float
    by_type: FrozenDict
    by_hops: FrozenDict


def difficulty(
    questions: Sequence[Question], passages: Sequence[Passage], *, k: int = 3, backend: SearchBackend | None = None
) -> Difficulty:
    """Search for each question, and for each gold step, in ``passages`` (by BM25 where no ``backend`` is given).

    Works for every set whose metadata hold ``supporting_ids`` and ``steps`` with a ``query`` and a ``supporting_id``:
    generated worlds, and real sets through ``corpus_from_contexts``. Raises :class:`DataError` for others.
    """
    _require_steps(questions)
    search = backend or BM25Backend.from_passages(passages)
    whole = _found(search, [q.question for q in questions], k)
    at_once = [set(q.metadata["supporting_ids"]) <= found for q, found in zip(questions, whole)]
    steps = [[s for s in q.metadata["steps"] if "supporting_id" in s] for q in questions]
    found = iter(_found(search, [s["query"] for of_one in steps for s in of_one], k))
    stepwise = [[set(_supporting(s)) <= next(found) for s in of_one] for of_one in steps]
    hits = [hit for of_one in stepwise for hit in of_one]
    complete = [all(of_one) for of_one in stepwise]

    def split(key: str) -> FrozenDict:
        groups: dict[str, list[int]] = {}
        for i, question in enumerate(questions):
            groups.setdefault(str(question.metadata.get(key)), []).append(i)
        return FrozenDict(
            {
                name: {
                    "questions": len(rows),
                    "one_search": _share([at_once[i] for i in rows]),
                    "all_steps": _share([complete[i] for i in rows]),
                }
                for name, rows in sorted(groups.items())
            }
        )

    return Difficulty(k, len(questions), _share(at_once), _share(hits), _share(complete), split("type"), split("hops"))


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """What an agent meets that knows the options of each turn, but chooses wrongly with probability ``noise``.

    ``turns``: mean number of uncertain turns of a question, ``fewest`` the smallest. A turn is uncertain where at least
    one wrong option is a dead end: it finds somebody, so that nothing shows that it was wrong. ``options``: how many a
    turn has. ``entropy``: of the first choice at each depth, in nats. ``dead_ends`` and ``nothing``: shares of the
    wrong options that lead astray, and of those that find nothing and may be tried again. ``success``: probability of
    a right answer with ``retries`` further tries in all.
    """

    noise: float
    retries: int
    questions: int
    turns: float
    fewest: int
    options: float
    entropy: tuple[float, ...]
    dead_ends: float
    nothing: float
    success: float


def uncertainty(
    questions: Sequence[Question], passages: Sequence[Passage], *, noise: float = 0.6, retries: int = 2
) -> Uncertainty:
    """Search for every option of every gold step that has ``options``, and look at what comes first.

    A wrong option finds nothing where the first passage names nobody but its own title. The noisy oracle takes the
    right option with probability ``1 - noise``, else one of the others uniformly; what found nothing is not tried
    again. Raises :class:`DataError` where no step has options (those of the profile ``uncertain`` have).
    """
    _require_steps(questions)
    steps = [[s for s in q.metadata["steps"] if len(s.get("options", ())) > 1] for q in questions]
    if not any(steps):
        raise DataError("expected gold steps with options, found none; generate a world of the profile 'uncertain'")
    titles = {p.title for p in passages}
    outcomes = _outcomes(BM25Backend.from_passages(passages), [s for of_one in steps for s in of_one], titles)
    stepwise = [[outcomes[_ask(s)] for s in of_one] for of_one in steps]
    flat = [o for of_one in stepwise for o in of_one]
    wrong = sum(o.dead_ends + o.nothing for o in flat)
    uncertain = [sum(o.dead_ends > 0 for o in of_one) for of_one in stepwise]
    by_depth = [[of_one[d] for of_one in stepwise if len(of_one) > d] for d in range(max(map(len, stepwise)))]
    return Uncertainty(
        noise=noise,
        retries=retries,
        questions=len(questions),
        turns=sum(uncertain) / len(uncertain),
        fewest=min(uncertain),
        options=sum(o.options for o in flat) / len(flat),
        entropy=tuple(_mean([_entropy(o.options, noise) for o in outcomes]) for outcomes in by_depth),
        dead_ends=sum(o.dead_ends for o in flat) / wrong,
        nothing=sum(o.nothing for o in flat) / wrong,
        success=_mean([_success(of_one, noise, retries) for of_one in stepwise]),
    )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Of the options of one step: how many, and how many of the wrong ones lead astray or find nothing."""

    options: int
    dead_ends: int
    nothing: int


def _ask(step: Mapping[str, Any]) -> tuple[str, str]:
    return step["subject"], step["relation"]


def _outcomes(
    search: SearchBackend, steps: Sequence[Mapping[str, Any]], titles: set[str]
) -> dict[tuple[str, str], _Outcome]:
    by_ask = {_ask(s): s for s in steps}
    queries = [s["query"].replace(s["relation"], o) for s in by_ask.values() for o in s["options"]]
    found = iter(search.search(queries, k=1))
    out: dict[tuple[str, str], _Outcome] = {}
    for ask, step in by_ask.items():
        tops = [(o, next(found)) for o in step["options"]]
        wrong = [top for o, top in tops if o != step["relation"]]
        dead = sum(_leads_on(top, titles) for top in wrong)
        out[ask] = _Outcome(len(tops), dead, len(wrong) - dead)
    return out


def _leads_on(found: Sequence[Passage], titles: set[str]) -> bool:
    """Whether the first passage names somebody beside its title."""
    return any(title in p.text for p in found[:1] for title in titles if title != p.title)


def _entropy(options: int, noise: float) -> float:
    shares = [1 - noise, *[noise / (options - 1)] * (options - 1)]
    return -sum(p * math.log(p) for p in shares if p > 0)


def _success(steps: Sequence[_Outcome], noise: float, retries: int) -> float:
    """Probability to pass all steps; a state is how many retries are left."""
    left = {retries: 1.0}
    for step in steps:
        after: dict[int, float] = {}
        for tries, mass in left.items():
            for used, p in enumerate(_passes(step, noise, tries)):
                after[tries - used] = after.get(tries - used, 0.0) + mass * p
        left = after
    return sum(left.values())


def _passes(step: _Outcome, noise: float, tries: int) -> list[float]:
    """Probability to take the right option after 0, 1, ... tries that found nothing."""
    out, mass = [], 1.0
    for used in range(tries + 1):
        out.append(mass * (1 - noise))
        wrong = step.options - 1 - used
        nothing = step.nothing - used
        mass *= noise * nothing / wrong if wrong > 0 and nothing > 0 else 0.0
    return out


def _require_steps(questions: Sequence[Question]) -> None:
    if not questions:
        raise DataError("expected questions to measure, found none")
    for question in questions:
        steps = question.metadata.get("steps")
        if not steps or "supporting_ids" not in question.metadata:
            raise DataError(
                f"question {question.id!r}: expected metadata with 'supporting_ids' and gold 'steps', found "
                f"{sorted(question.metadata)}; a generated world has them, or a set through corpus_from_contexts"
            )


def _found(search: SearchBackend, queries: Sequence[str], k: int) -> list[set[str]]:
    return [{p.id for p in found} for found in search.search(queries, k=k)]


def _supporting(step: Mapping[str, Any]) -> Sequence[str]:
    ids: Sequence[str] = step.get("supporting_ids") or (step["supporting_id"],)
    return ids


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
