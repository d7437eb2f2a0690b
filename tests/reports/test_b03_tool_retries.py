"""B03: a retried tool call costs one turn and one search, whether the retry is inside or outside of step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turntree.envs import Question, SearchQAEnv
from turntree.errors import RetrievalError, ToolError
from turntree.search_backend import Passage

TURN = "<think>t</think><search>apple</search>"


class Unreliable:
    """Times out as often as it is told to."""

    fingerprint = "unreliable"

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        if self.failures > 0:
            self.failures -= 1
            raise RetrievalError("timed out")
        return [[Passage("a", "Apple", "red fruit")] for _ in queries]


def make(failures: int, retries: int) -> SearchQAEnv:
    questions = [Question("1", "q", ("x",))]
    env = SearchQAEnv(questions, search=Unreliable(failures), tool_retries=retries, tool_backoff_s=0.0)
    env.reset(seed=0)
    return env


def test_b03_a_retry_inside_step_is_invisible() -> None:
    plain, retried = make(0, 2), make(1, 2)
    assert retried.step(TURN) == plain.step(TURN)
    assert retried.snapshot() == plain.snapshot()
    assert retried.calls.attempts == {"search": 2}
    assert retried.calls.calls == {"search": 1}


def test_b03_a_failed_step_changes_nothing_and_may_be_sent_again() -> None:
    env = make(2, 1)
    before = env.snapshot()
    with pytest.raises(ToolError, match=r"failed 2 times.*timed out.*send the same turn again"):
        env.step(TURN)
    assert env.snapshot() == before
    *_, info = env.step(TURN)
    assert (info["turns"], info["searches"]) == (1, 1)
    assert len(env.snapshot().state.history) == 1
