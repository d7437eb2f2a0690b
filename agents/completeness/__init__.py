"""RLTR's reward: whether the tool calls of a trajectory are complete, whatever its answer (arXiv 2508.19598)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from turntree.agents.completeness.cache import VoteCache
from turntree.agents.completeness.calls import Call, CallTurn, call_key, call_turns, is_legal
from turntree.agents.completeness.checkers import AnswerChecker, Ballot, Checker, RuleChecker, Vote
from turntree.agents.completeness.llm import LLMChecker, llm_checker, read_prompt, read_verdict
from turntree.agents.completeness.reward import (
    BAD_ARGUMENTS,
    Penalties,
    Penalty,
    completeness,
    total_reward,
    violations,
)
from turntree.agents.completeness.votes import Poll, Tally
from turntree.agents.scorer import Failed, Finished, Judged
from turntree.agents.texts import EndpointTexts, EngineTexts, Said, Texts
from turntree.envs.loading import check_arguments, construct, reject_unknown, resolve
from turntree.errors import ConfigError

__all__ = [
    "CHECKERS",
    "AnswerChecker",
    "Ballot",
    "Call",
    "CallTurn",
    "Checker",
    "CompletenessScorer",
    "EndpointTexts",
    "EngineTexts",
    "LLMChecker",
    "Penalties",
    "Penalty",
    "Poll",
    "RuleChecker",
    "Said",
    "Tally",
    "Texts",
    "Vote",
    "VoteCache",
    "call_key",
    "call_turns",
    "completeness",
    "llm_checker",
    "load_checker",
    "read_prompt",
    "read_verdict",
    "total_reward",
    "violations",
]

_log = logging.getLogger(__name__)


def _em(**options: Any) -> AnswerChecker:
    return AnswerChecker("em", **options)


def _f1(**options: Any) -> AnswerChecker:
    return AnswerChecker("f1", **options)


CHECKERS: dict[str, Any] = {"rule": RuleChecker, "llm": llm_checker, "em": _em, "f1": _f1}
"""Checkers by name; others are given by import path (a class or factory) or as objects."""

Corrections = Literal["illegal", "penalised"]


def load_checker(checker: Checker | str, arguments: Mapping[str, Any] | None = None) -> Checker:
    """A checker from its name or import path with its arguments, or itself. Raises ``ConfigError``."""
    if not isinstance(checker, str):
        if arguments:
            raise ConfigError(f"checker_args={dict(arguments)} are for a checker given by name, found an object")
        found: Any = checker
    else:
        factory = resolve(checker, CHECKERS, what="checker")
        check_arguments(factory, arguments or {}, what=f"checker={checker}")
        found = construct(factory, arguments or {}, what=f"checker={checker}")
    if not isinstance(found, Checker):
        raise ConfigError(
            f"checker={checker}: expected an object with vote, content, fingerprint and constant, found {found!r:.100}"
        )
    return found


class CompletenessScorer:
    """``R_total``: ``illegal`` where the format is illegal, else ``R_comp + R_rule``.

    ``R_comp`` is the mean of ``votes`` votes of ``checker``; with ``early_stop`` it is their majority (0, 1, or 0.5
    where they are even), and votes that cannot turn it are not asked for. Fewer valid votes than ``quorum`` (default:
    more than half) are ``Failed``: the trajectory has no reward, never a 0.

    Args:
        checker: ``rule``, ``llm``, ``em``, ``f1``, an import path, or an object; ``checker_args``: its arguments.
        seed: of the votes; each vote's own seed follows from it, the content and its number.
        cache: path of an SQLite file of votes ('' : in memory only, the ``cache_size`` newest).
        illegal: ``R_total`` of an illegal format, which no checker is asked about.
        corrections: what a turn is that could not be executed because of its argument or tool: ``illegal``, as the
            environment says, or ``penalised`` by the rules only.
        penalties: see :class:`Penalties`; a mapping such as ``{repeated: 0.1, floor: -0.3}``.
        judge_illegal: ask the checker about illegal formats too. The part ``completeness`` is then there for all; the
            reward is ``illegal`` all the same.

    ``needs_answer`` says whether the checker looks at the answer: where it does not, a rollout writes none.

    Raises ``ConfigError`` for options that do not fit.
    """

    def __init__(
        self,
        *,
        checker: Checker | str = "rule",
        checker_args: Mapping[str, Any] | None = None,
        votes: int = 3,
        quorum: int | None = None,
        early_stop: bool = False,
        seed: int = 0,
        cache: str = "",
        cache_size: int = 100_000,
        illegal: float = -1.0,
        corrections: Corrections = "illegal",
        penalties: Penalties | Mapping[str, Any] | None = None,
        judge_illegal: bool = False,
    ) -> None:
        reject_unknown([corrections], get_args(Corrections), what="value of corrections")
        if isinstance(illegal, bool) or not isinstance(illegal, (int, float)) or not math.isfinite(illegal):
            raise ConfigError(f"illegal={illegal}: expected a finite reward of an illegal format (such as -1)")
        for name, switch in (("early_stop", early_stop), ("judge_illegal", judge_illegal)):
            if not isinstance(switch, bool):
                raise ConfigError(f"{name}={switch!r:.100}: expected true or false")
        self.penalties = Penalties.of(penalties)
        self.illegal = float(illegal)
        self.judge_illegal = judge_illegal
        self._warned = False
        self._excused = (*BAD_ARGUMENTS, "unknown_tool") if corrections == "penalised" else ()
        self.poll = Poll(
            load_checker(checker, checker_args),
            votes=votes,
            quorum=quorum,
            early_stop=early_stop,
            seed=seed,
            cache=VoteCache(cache, size=cache_size),
        )

    @property
    def needs_answer(self) -> bool:
        """Whether a verdict depends on the answer; of a checker that does not say, it may."""
        return bool(getattr(self.poll.checker, "needs_answer", True))

    def __call__(self, finished: Sequence[Finished]) -> list[float | Judged | Failed]:
        """One outcome a trajectory, in order. Parts: ``completeness``, ``rule`` and each rule's own.

        Raises ``CostLimitError`` when the checker's budget is spent, ``EngineError`` when it is dead.
        """
        legal = [is_legal(f, excused=self._excused) for f in finished]
        asked = [ok or self.judge_illegal for ok in legal]
        tallies = iter(self.poll([f for f, ask in zip(finished, asked) if ask]))
        return [
            self._judge(f, next(tallies), legal=ok) if ask else Judged(self.illegal)
            for f, ok, ask in zip(finished, legal, asked)
        ]

    def close(self) -> None:
        """Let go of the cache's file and of what the checker holds: connections, a model."""
        self.poll.close()

    def _judge(self, finished: Finished, tally: Tally, *, legal: bool) -> Judged | Failed:
        r_comp = self.poll.result(tally)
        if not legal:  # the reward is known without a verdict
            if isinstance(r_comp, Failed):
                self._warn_unjudged(r_comp)
                return Judged(self.illegal)
            return Judged(self.illegal, {"completeness": r_comp})
        if isinstance(r_comp, Failed):
            return r_comp
        parts = self.penalties.parts(violations(finished, max_argument=self.penalties.max_argument))
        return Judged(total_reward(r_comp, parts["rule"], legal=True), {"completeness": r_comp, **parts})

    def _warn_unjudged(self, failed: Failed) -> None:
        """Once: nothing else would say why trajectories of illegal format miss in the means of completeness."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "the checker failed on a trajectory of illegal format, which is left out of completeness: %s: %s",
                failed.kind,
                failed.message,
            )
