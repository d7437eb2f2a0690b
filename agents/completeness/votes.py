"""Asking a checker for votes: each once, in batches, and no more than are needed."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.agents.completeness.cache import VoteCache
from turntree.agents.completeness.checkers import NO_GOLD, Ballot, Checker, Spoilt, Vote
from turntree.agents.completeness.reward import completeness, whole
from turntree.agents.scorer import Failed, Finished
from turntree.errors import ConfigError, CostLimitError, EngineError

__all__ = ["Poll", "Tally", "votes_needed"]

DEAD_AFTER = 32
"""Votes that failed in a row, none between them that did not, after which a checker is taken for dead."""


@dataclass(slots=True)
class Tally:
    """The votes on one trajectory, in the order of their numbers. ``cached`` of them were not asked for now."""

    votes: list[Vote | Failed] = field(default_factory=list)
    cached: int = 0

    @property
    def valid(self) -> list[bool]:
        """What those said that were no failure."""
        return [vote.complete for vote in self.votes if isinstance(vote, Vote)]

    @property
    def tokens(self) -> tuple[int, int]:
        """Prompt and completion tokens of what was asked for now."""
        cast = [vote for vote in self.votes if isinstance(vote, (Vote, Spoilt))]
        return sum(v.prompt_tokens for v in cast), sum(v.completion_tokens for v in cast)


def votes_needed(yes: int, no: int, *, left: int, quorum: int) -> int:
    """How many more votes to ask for at once until the majority of all may stand; 0 where it stands.

    It stands when the votes that are ``left`` cannot turn it, whatever they say or if they fail, and ``quorum`` valid
    ones are there. The number is the fewest that could do.
    """
    margin = abs(yes - no)
    to_decide = 0 if margin > left else (left - margin) // 2 + 1
    return min(left, max(to_decide, quorum - yes - no, 0))


class Poll:
    """``votes`` votes of ``checker`` on each trajectory; see :class:`CompletenessScorer` for the options.

    Raises ``ConfigError`` for options that do not go together.
    """

    def __init__(
        self,
        checker: Checker,
        *,
        votes: int = 3,
        quorum: int | None = None,
        early_stop: bool = False,
        seed: int = 0,
        cache: VoteCache | None = None,
        dead_after: int | None = DEAD_AFTER,
    ) -> None:
        for name, number in (("votes", votes), ("quorum", quorum), ("seed", seed)):
            if number is not None:
                whole(name, number)
        if votes < 1:
            raise ConfigError(f"votes={votes}: expected at least one vote")
        if quorum is not None and not 1 <= quorum <= votes:
            raise ConfigError(f"quorum={quorum}: expected valid votes between 1 and votes={votes}")
        self.checker = checker
        self.votes = 1 if checker.constant else votes
        self.quorum = min(self.votes, votes // 2 + 1 if quorum is None else quorum)
        self.early_stop = early_stop
        self.seed = seed
        self.cache = VoteCache() if cache is None else cache
        self._dead_after = dead_after
        self._failed_in_a_row = 0
        self._voted = False

    def __call__(self, finished: Sequence[Finished]) -> list[Tally]:
        """The votes on each trajectory, in order.

        Raises ``CostLimitError`` when the checker's budget is spent, ``EngineError`` when it is dead.
        """
        names = [self._name(f) for f in finished]
        tallies = [Tally() for _ in finished]
        while asked := [
            (i, number)
            for i, tally in enumerate(tallies)
            for number in range(len(tally.votes), len(tally.votes) + self._more(tally))
        ]:
            keys = [f"{names[i]}-{number}" for i, number in asked]
            known: dict[str, Vote | Failed] = {key: Vote(vote) for key, vote in self.cache.find(keys).items()}
            # Equal trajectories are the same question to the checker: it is asked once.
            fresh = {key: Ballot(finished[i], _seed(key)) for key, (i, _) in zip(keys, asked) if key not in known}
            cast = {**known, **self._ask(fresh)}
            for key, (i, _) in zip(keys, asked):
                tallies[i].votes.append(cast[key])
                tallies[i].cached += fresh.pop(key, None) is None
                cast[key] = _bare(cast[key])
        return tallies

    def result(self, tally: Tally) -> float | Failed:
        """``R_comp``; ``Failed`` where fewer votes than the quorum are valid, of the kind that was met most."""
        if len(tally.valid) >= self.quorum:
            return completeness(tally.valid, majority=self.early_stop)
        failures = [vote for vote in tally.votes if isinstance(vote, Failed)]
        kind, _ = Counter(f.kind for f in failures).most_common(1)[0]
        example = next(f.message for f in failures if f.kind == kind)
        counted = f"{len(tally.valid)} of {len(tally.votes)} votes are valid, {self.quorum} are needed"
        return Failed(kind, f"{counted}; {example}")

    def close(self) -> None:
        """Close the cache, and the checker where it has a ``close``."""
        self.cache.close()
        close = getattr(self.checker, "close", None)
        if close is not None:
            close()

    def _more(self, tally: Tally) -> int:
        left = self.votes - len(tally.votes)
        if not self.early_stop or not left:
            return left
        yes = sum(tally.valid)
        return votes_needed(yes, len(tally.valid) - yes, left=left, quorum=self.quorum)

    def _ask(self, ballots: dict[str, Ballot]) -> dict[str, Vote | Failed]:
        if not ballots:
            return {}
        outcomes = self._one_each(self.checker.vote(list(ballots.values())), len(ballots))
        cast = dict(zip(ballots, outcomes))
        self.cache.keep({key: vote.complete for key, vote in cast.items() if isinstance(vote, Vote)})
        for outcome in outcomes:
            self._watch(outcome)
        return cast

    def _one_each(self, outcomes: Any, n: int) -> list[Vote | Failed]:
        given = f"the checker {type(self.checker).__name__} was given {n} ballots and returned"
        if not isinstance(outcomes, (list, tuple)) or len(outcomes) != n:
            found = f"{len(outcomes)} votes" if isinstance(outcomes, (list, tuple)) else f"{outcomes!r:.100}"
            raise ConfigError(f"{given} {found}; return a list with one each")
        for outcome in outcomes:
            if not isinstance(outcome, (Vote, Failed)):
                raise ConfigError(f"{given} {outcome!r:.100} for one; a Vote or Failed is expected")
        return list(outcomes)

    def _watch(self, outcome: Vote | Failed) -> None:
        if isinstance(outcome, Vote):
            self._failed_in_a_row, self._voted = 0, True
            return
        if outcome.kind == CostLimitError.__name__:
            raise CostLimitError(outcome.message)
        self._failed_in_a_row += 1
        if outcome.kind == NO_GOLD and self._voted:  # other questions have gold: the data are mixed
            return
        if self._dead_after is not None and self._failed_in_a_row >= self._dead_after:
            raise EngineError(
                f"the checker failed {self._failed_in_a_row} votes in a row, so nothing is rewarded; the last one: "
                f"{outcome.kind}: {outcome.message}. See that the checker answers, then go on (a run with resume=true)"
            )

    def _name(self, finished: Finished) -> str:
        parts = (self.checker.fingerprint, str(self.seed), self.checker.content(finished))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1  # llama.cpp takes 32 bits


def _bare(vote: Vote | Failed) -> Vote | Failed:
    """A vote that is counted again for an equal trajectory costs nothing again."""
    return Vote(vote.complete) if isinstance(vote, Vote) else Failed(vote.kind, vote.message)
