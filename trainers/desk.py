"""Asking an engine for batches, whatever its manners: it may answer in any order, lose requests, or die.

And asking those who judge: in the rollout's own thread, or, where all of them declare that they can (an attribute
``overlaps`` that is true), in another one while trees grow on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.agents.engines.protocol import Engine, Generation, Request
from turntree.agents.scorer import Answers, Failed, Finished, Finisher, Scored, Scorer, score
from turntree.errors import CostLimitError, EngineError
from turntree.trainers.inbox import Inbox

__all__ = ["EngineDesk", "JudgeDesk", "Judging"]

DEAD_AFTER = 16
"""Failed requests in a row, none answered between them, after which an engine is taken for dead."""


class EngineDesk:
    """Asks the engine for batches, from any number of threads; when a batch fails, finds out which requests do."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answered = 0
        self.failed_in_a_row = 0
        self.error: Exception | None = None
        self._lock = threading.Lock()

    def ask(self, requests: Sequence[Request]) -> list[tuple[int, Generation | Failed]]:
        """(index, reply) in the order in which the engine answered.

        Raises ``EngineError`` after ``DEAD_AFTER`` failures in a row.
        """
        replies: dict[int, Generation | Failed] = {}
        error = self._collect(range(len(requests)), requests, replies)
        if error is not None:
            for i in range(len(requests)):
                if i not in replies:
                    single = self._collect([i], requests, replies) if len(requests) > 1 else error
                    if single is not None:
                        replies[i] = self._give_up(requests[i], single)
        return list(replies.items())

    def abandon(self) -> None:
        """Tell an engine that takes requests from several threads that nobody waits for the answers any more."""
        abandon: Any = getattr(self.engine, "abandon", None)
        if abandon is not None:
            abandon()

    def check(self) -> None:
        """Raise the engine's error if it never answered: nothing was rolled out, so there is nothing to return."""
        if self.error is not None and not self.answered:
            raise self._typed(self.error) from self.error

    def _collect(
        self, places: Sequence[int], requests: Sequence[Request], replies: dict[int, Generation | Failed]
    ) -> Exception | None:
        try:
            arrived = _generate(self.engine, [requests[i] for i in places])
        except Exception as error:  # engines are remote servers and GPUs: anything can come out of them
            return error
        for place, reply in arrived:
            if isinstance(reply, Exception):  # of this request alone, after the engine's own retries
                replies[places[place]] = self._give_up(requests[places[place]], reply)
                continue
            replies[places[place]] = reply
            with self._lock:
                self.answered += 1
                self.failed_in_a_row = 0
        return None

    def _give_up(self, request: Request, error: Exception) -> Failed:
        if isinstance(error, CostLimitError):  # the engine is well; what is left is not asked
            return Failed(type(error).__name__, str(error))
        with self._lock:
            self.error = error
            self.failed_in_a_row += 1
            dead = self.failed_in_a_row >= DEAD_AFTER
        if dead:
            raise self._typed(error) from error
        return Failed(type(error).__name__, f"request {request.key}: {error}")

    def _typed(self, error: Exception) -> EngineError:
        answering = getattr(self.engine, "engine", self.engine)  # the one inside, where answers are recorded
        return EngineError(
            f"{type(answering).__name__} failed {self.failed_in_a_row} requests in a row after answering "
            f"{self.answered}; the last error was {type(error).__name__}: {error}"
        )


def _generate(engine: Engine, requests: Sequence[Request]) -> Sequence[tuple[int, Generation | Exception]]:
    """One engine call. Engines that answer as results arrive offer ``as_completed(requests)``.

    Such an engine may yield an exception in the place of a generation; that request is not asked again.
    """
    if not requests:
        return []
    arriving: Any = getattr(engine, "as_completed", None)
    if arriving is not None:
        pairs = list(arriving(requests))
        if sorted(i for i, _ in pairs) != list(range(len(requests))):
            raise EngineError(f"{type(engine).__name__} did not answer each of {len(requests)} requests exactly once")
        return pairs
    generations = engine.generate(requests)
    if len(generations) != len(requests):
        raise EngineError(
            f"{type(engine).__name__} answered {len(generations)} generations to {len(requests)} requests; it must "
            "give exactly one for each, in the same order"
        )
    return list(enumerate(generations))


@dataclass(frozen=True, slots=True)
class Judging:
    """Who finishes and judges trajectories, and when a finisher is asked; see :func:`turntree.agents.scorer.score`."""

    scorer: Scorer | None = None
    finisher: Finisher | None = None
    answers: Answers = "if_needed"

    @property
    def overlaps(self) -> bool:
        """Whether all who judge declare that they may be asked from another thread, one call at a time."""
        judges = [judge for judge in (self.scorer, self.finisher) if judge is not None]
        return bool(judges) and all(getattr(judge, "overlaps", False) for judge in judges)

    def __call__(self, finished: Sequence[Finished]) -> list[Scored]:
        return score(finished, scorer=self.scorer, finisher=self.finisher, answers=self.answers)


class JudgeDesk:
    """Asks for the rewards of batches of trajectories, one batch at a time. ``busy`` while one is being judged."""

    def __init__(self, judging: Judging, inbox: Inbox | None) -> None:
        self.judging = judging
        self.inbox = inbox if judging.overlaps else None
        self.busy = False

    def ask(self, finished: Sequence[Finished], then: Callable[[Sequence[Scored]], None]) -> None:
        """``then`` gets one outcome each: at once, or when the inbox is emptied."""
        if self.inbox is None or not finished:
            then(self.judging(finished))
            return
        self.busy = True
        self.inbox.submit("judge", 1, functools.partial(self.judging, finished), functools.partial(self._judged, then))

    def _judged(self, then: Callable[[Sequence[Scored]], None], scored: Sequence[Scored]) -> None:
        self.busy = False
        then(scored)
