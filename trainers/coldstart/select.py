"""Rejection sampling: which of a question's trajectories are kept, and why the others are not. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from turntree.agents.scorer import Failed, Scorer, score
from turntree.trainers.coldstart.filters import Filter
from turntree.trainers.coldstart.played import Key, Played

__all__ = ["Judged", "Verdict", "best_of", "judge"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A trajectory with its score by the criterion (``Failed``: it could not be judged) and the score's parts.

    ``objections``: what the filters say, (filter, reason) each; empty where nothing is wrong.
    """

    played: Played
    score: float | Failed
    parts: Mapping[str, float] = field(default_factory=dict)
    objections: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a trajectory.

    ``reason`` is a word to count by: ``kept``; ``failed`` (it has no end), a filter's name, ``unscored`` (the
    criterion failed), ``min_score``, ``same`` (the turns of a better one), ``rank`` (others are better). ``detail``
    says more. ``rank`` counts from 1 among those that nothing else speaks against, None for the rest.
    """

    key: Key
    reason: str
    detail: str
    judged: Judged | None = None
    rank: int | None = None

    @property
    def kept(self) -> bool:
        """Whether it is learnt from."""
        return self.reason == "kept"

    @property
    def score(self) -> float | None:
        """The criterion's number, None where there is none."""
        found = None if self.judged is None else self.judged.score
        return found if isinstance(found, float) else None


def judge(played: Sequence[Played], *, criterion: Scorer | None, filters: Mapping[str, Filter]) -> list[Judged]:
    """Score a batch and ask the filters, one outcome each, in order; filtered ones are scored too.

    Raises what the criterion raises where it can judge nothing more (``CostLimitError``, a dead checker).
    """
    scored = score([one.finished for one in played], scorer=criterion)
    return [
        Judged(
            one,
            float(found.reward) if not isinstance(found.reward, Failed) else found.reward,
            dict(found.parts),
            tuple((name, said) for name, rule in filters.items() if (said := rule(one))),
        )
        for one, found in zip(played, scored, strict=True)
    ]


def best_of(
    judged: Sequence[Judged],
    *,
    keep: int,
    min_score: float | None = None,
    failures: Mapping[Key, Failed] | None = None,
) -> list[Verdict]:
    """The verdicts on all trajectories of one question, by the number of the sample.

    The best ``keep`` stay: by score, then by fewest calls, then by fewest generated tokens, then by number. One whose
    turns equal those of a better one is not kept beside it. More samples never make the best one worse.
    """
    verdicts = [Verdict(key, "failed", f"{f.kind}: {f.message}") for key, f in (failures or {}).items()]
    running: list[tuple[float, Judged]] = []
    for one in judged:
        objection = _objection(one, min_score)
        if objection is None and isinstance(one.score, float):
            running.append((one.score, one))
        elif objection is not None:
            verdicts.append(Verdict(one.played.key, *objection, one))
    ranked = sorted(running, key=lambda pair: (-pair[0], *_effort(pair[1].played)))
    kept: dict[tuple[str, ...], Key] = {}
    for rank, (_, one) in enumerate(ranked, 1):
        key, texts = one.played.key, tuple(turn.text for turn in one.played.finished.turns)
        verdict = Verdict(key, "rank", f"{rank} of {len(ranked)}", one, rank)
        if texts in kept:
            verdict = replace(verdict, reason="same", detail=f"the turns of sample {kept[texts].sample}")
        elif len(kept) < keep:
            verdict = replace(verdict, reason="kept")
            kept[texts] = key
        verdicts.append(verdict)
    return sorted(verdicts, key=lambda verdict: verdict.key.sample)


def _objection(one: Judged, min_score: float | None) -> tuple[str, str] | None:
    """Why a trajectory does not take part, the first reason and all details; None if it does."""
    if one.objections:
        return one.objections[0][0], "; ".join(f"{name}: {said}" for name, said in one.objections)
    if isinstance(one.score, Failed):
        return "unscored", f"{one.score.kind}: {one.score.message}"
    if min_score is not None and one.score < min_score:
        return "min_score", f"{one.score:g}, at least {min_score:g} is needed"
    return None


def _effort(played: Played) -> tuple[int, int, int]:
    return played.calls, played.tokens, played.key.sample
