"""How good a checker is: its verdicts against labelled trajectories, beside those of the answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turntree.agents.completeness import AnswerChecker, Checker, Poll, Tally
from turntree.agents.scorer import Failed, Finished
from turntree.errors import ConfigError
from turntree.trainers.labelled import Labelled, labelled_row
from turntree.trainers.stats import Interval, PairedDifference, bootstrap_mean, paired_difference, share_interval

__all__ = ["Audit", "Judgement", "audit", "judge"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """How one judge agrees with the labels, over the trajectories that it judged; ``failed``: the others.

    ``tp`` counts complete ones that it calls complete. Precision, recall and F1 are of "complete".
    """

    name: str
    tp: int
    fp: int
    fn: int
    tn: int
    failed: int
    accuracy: Interval
    precision: Interval
    recall: Interval
    f1: Interval

    def to_json(self) -> dict[str, Any]:
        """Plain data: counts, and mean and bounds of each figure (NaN as null)."""
        counts = {name: getattr(self, name) for name in ("tp", "fp", "fn", "tn", "failed")}
        return {"name": self.name, **counts, **{name: _plain(getattr(self, name)) for name in _FIGURES}}


_FIGURES = ("accuracy", "precision", "recall", "f1")


def _plain(interval: Interval) -> dict[str, float | int | None]:
    numbers = {"mean": interval.mean, "low": interval.low, "high": interval.high}
    return {**{k: None if math.isnan(v) else v for k, v in numbers.items()}, "n": interval.n}


def judge(name: str, scores: Sequence[float | Failed], labels: Sequence[bool]) -> Judgement:
    """Compare scores with labels; a score above a half says "complete"."""
    pairs = [(score > 0.5, label) for score, label in zip(scores, labels, strict=True) if not isinstance(score, Failed)]
    tp, fp, fn, tn = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))
    return Judgement(
        name,
        tp,
        fp,
        fn,
        tn,
        failed=len(scores) - len(pairs),
        accuracy=share_interval([1.0] * (tp + tn) + [0.0] * (fp + fn)),
        precision=share_interval([1.0] * tp + [0.0] * fp),
        recall=share_interval([1.0] * tp + [0.0] * fn),
        f1=_f1_interval(tp, fp + fn),
    )


def _f1_interval(tp: int, wrong: int) -> Interval:
    """F1 = 2 J / (1 + J) grows with J = TP / (TP + FP + FN), a share, whose bounds it takes over."""
    share = share_interval([1.0] * tp + [0.0] * wrong)
    mean, low, high = (2 * j / (1 + j) for j in (share.mean, share.low, share.high))
    return Interval(mean, low, high, share.n, share.confidence)


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found.

    ``judges``: the checker, then exact match and F1 of the answer. ``gains``: accuracy of the checker minus that of
    each other judge, over the trajectories that both judged. ``failures``: failed votes by kind, and ``examples``: the
    message of the first one of each. ``agreement``: the share of pairs of votes on one
    trajectory that agree; ``kappa``: the same less what chance gives (Fleiss 1971). Tokens are those of replies that
    came now, with a verdict or without.
    """

    judges: tuple[Judgement, ...]
    gains: dict[str, PairedDifference]
    agreement: Interval
    kappa: float
    trajectories: int
    complete: int
    votes: int
    valid_votes: int
    cached_votes: int
    prompt_tokens: int
    completion_tokens: int
    failures: dict[str, int]
    examples: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        counts = ("trajectories", "complete", "votes", "valid_votes", "cached_votes")
        return {
            "judges": [judgement.to_json() for judgement in self.judges],
            "gains": {
                name: {**_plain(g.difference), "wins": g.wins, "losses": g.losses, "ties": g.ties}
                for name, g in self.gains.items()
            },
            "agreement": _plain(self.agreement),
            "kappa": None if math.isnan(self.kappa) else self.kappa,
            **{name: getattr(self, name) for name in counts},
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "failures": self.failures,
            "examples": self.examples,
        }

    def lines(self) -> list[str]:
        """A table for people."""
        out = [
            f"{self.trajectories} trajectories, {self.complete} of them complete; 95 % intervals",
            f"{'judge':<14}{'accuracy':>22}{'precision':>22}{'recall':>22}{'F1':>22}   TP  FP  FN  TN  failed",
        ]
        for j in self.judges:
            figures = "".join(f"{_short(getattr(j, name)):>22}" for name in _FIGURES)
            out.append(f"{j.name:<14}{figures} {j.tp:>4}{j.fp:>4}{j.fn:>4}{j.tn:>4}{j.failed:>8}")
        for name, gain in self.gains.items():
            out.append(f"accuracy of {self.judges[0].name} minus {name}: {gain.difference}")
        kappa = "" if math.isnan(self.kappa) else f", kappa {self.kappa:.3f}"
        out.append(f"agreement of votes: {self.agreement}{kappa}")
        each = (self.prompt_tokens + self.completion_tokens) / self.trajectories
        out.append(
            f"votes: {self.votes}, valid {self.valid_votes}, from the cache {self.cached_votes}; tokens: "
            f"{self.prompt_tokens} prompt, {self.completion_tokens} completion, {each:.1f} a trajectory"
        )
        out += [f"failed votes: {kind} x {count}: {self.examples[kind]}" for kind, count in self.failures.items()]
        return out


def _short(interval: Interval) -> str:
    if math.isnan(interval.mean):
        return "-"
    if math.isnan(interval.low):
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def audit(
    labelled: Sequence[Labelled],
    poll: Poll,
    *,
    name: str = "checker",
    f1_threshold: float = 0.5,
    on_batch: Callable[[int, int], None] = lambda done, total: None,
    batch: int = 64,
) -> tuple[Audit, list[dict[str, Any]]]:
    """Let the checker vote on every trajectory; the findings, and one row a trajectory with votes and score.

    Raises ``ConfigError`` without trajectories, and what the poll raises.
    """
    if not labelled:
        raise ConfigError("expected labelled trajectories, found none")
    finished, labels = [item.finished for item in labelled], [item.label for item in labelled]
    tallies: list[Tally] = []
    for start in range(0, len(finished), batch):
        tallies += poll(finished[start : start + batch])
        on_batch(len(tallies), len(finished))
    scores = [poll.result(tally) for tally in tallies]
    answers: dict[str, Checker] = {"answer EM": AnswerChecker("em"), "answer F1": AnswerChecker("f1", f1_threshold)}
    others = {title: _once(checker, finished) for title, checker in answers.items()}
    found = _summary({name: scores, **others}, labels, tallies)
    return found, [
        {**labelled_row(item), "votes": _votes(tally), "score": None if isinstance(score, Failed) else score}
        for item, tally, score in zip(labelled, tallies, scores)
    ]


def _once(checker: Checker, finished: Sequence[Finished]) -> list[float | Failed]:
    poll = Poll(checker, votes=1, dead_after=None)
    return [poll.result(tally) for tally in poll(finished)]


def _summary(scores: Mapping[str, Sequence[float | Failed]], labels: Sequence[bool], tallies: Sequence[Tally]) -> Audit:
    (_, own), *others = scores.items()
    votes = [vote for tally in tallies for vote in tally.votes]
    lost = [vote for vote in votes if isinstance(vote, Failed)]
    failures = [vote.kind for vote in lost]
    agreement, kappa = _agreement([tally.valid for tally in tallies])
    prompt, completion = (sum(tally.tokens[i] for tally in tallies) for i in (0, 1))
    return Audit(
        judges=tuple(judge(title, values, labels) for title, values in scores.items()),
        gains={title: _gain(values, own, labels) for title, values in others},
        agreement=agreement,
        kappa=kappa,
        trajectories=len(labels),
        complete=sum(labels),
        votes=len(votes),
        valid_votes=len(votes) - len(failures),
        cached_votes=sum(tally.cached for tally in tallies),
        prompt_tokens=prompt,
        completion_tokens=completion,
        failures={kind: failures.count(kind) for kind in sorted(set(failures))},
        examples={vote.kind: vote.message for vote in reversed(lost)},
    )


def _gain(a: Sequence[float | Failed], b: Sequence[float | Failed], labels: Sequence[bool]) -> PairedDifference:
    right = [
        (float((x > 0.5) == label), float((y > 0.5) == label))
        for x, y, label in zip(a, b, labels)
        if not isinstance(x, Failed) and not isinstance(y, Failed)
    ]
    return paired_difference([x for x, _ in right], [y for _, y in right])


def _agreement(ballots: Sequence[Sequence[bool]]) -> tuple[Interval, float]:
    """Share of agreeing pairs a trajectory with at least two valid votes, and kappa over these trajectories."""
    several = [votes for votes in ballots if len(votes) > 1]
    shares = [float(np.mean([a == b for a, b in itertools.combinations(votes, 2)])) for votes in several]
    interval = bootstrap_mean(shares)
    if not several:
        return interval, math.nan
    yes = float(np.mean([vote for votes in several for vote in votes]))
    chance = yes**2 + (1 - yes) ** 2
    return interval, math.nan if chance == 1 else (interval.mean - chance) / (1 - chance)


def _votes(tally: Tally) -> list[bool | str]:
    return [vote.kind if isinstance(vote, Failed) else vote.complete for vote in tally.votes]
