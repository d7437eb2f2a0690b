"""Tool calls are batched, retried where they failed, and counted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from turntree.envs import SearchTool, ToolCall, ToolFailure, ToolResult, execute
from turntree.envs.core import Effects
from turntree.envs.tools import CallCounter
from turntree.errors import RetrievalError, ToolError
from turntree.search_backend import Passage


@dataclass
class Flaky:
    """Fails each argument as often as the table says; records the batches it was sent."""

    name: str = "flaky"
    effects: Effects = "none"
    failures: dict[str, int] = field(default_factory=dict)
    batches: list[list[str]] = field(default_factory=list)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        self.batches.append([call.argument for call in calls])
        return [self._one(call.argument) for call in calls]

    def _one(self, argument: str) -> ToolResult | ToolFailure:
        if self.failures.get(argument, 0) > 0:
            self.failures[argument] -= 1
            return ToolFailure("timeout", f"{argument} timed out")
        return ToolResult(argument.upper())


def calls(*arguments: str, tool: str = "flaky") -> list[ToolCall]:
    return [ToolCall(tool, argument) for argument in arguments]


def test_only_failed_calls_are_sent_again() -> None:
    tool, counter, waits = Flaky(failures={"b": 2}), CallCounter(), list[float]()
    outcomes = execute({"flaky": tool}, calls("a", "b", "c"), backoff_s=0.5, counter=counter, sleep=waits.append)
    assert outcomes == [ToolResult("A"), ToolResult("B"), ToolResult("C")]
    assert tool.batches == [["a", "b", "c"], ["b"], ["b"]]
    assert waits == [0.5, 1.0]
    assert (counter.calls, counter.attempts, counter.failures) == ({"flaky": 3}, {"flaky": 5}, {"flaky": 0})


def test_a_call_that_never_succeeds_is_a_failure_beside_the_others() -> None:
    tool, counter = Flaky(failures={"b": 99}), CallCounter()
    outcomes = execute({"flaky": tool}, calls("a", "b"), retries=1, backoff_s=0, counter=counter)
    assert outcomes == [ToolResult("A"), ToolFailure("timeout", "b timed out")]
    assert (counter.attempts, counter.failures) == ({"flaky": 3}, {"flaky": 1})


def test_identical_calls_are_asked_once_unless_they_have_effects() -> None:
    pure, effect = Flaky(), Flaky(name="effect", effects="in_state")
    counter = CallCounter()
    batch = [*calls("a", "a", "b"), *calls("a", "a", tool="effect")]
    outcomes = execute({"flaky": pure, "effect": effect}, batch, counter=counter)
    assert outcomes == [ToolResult(x) for x in "AABAA"]
    assert (pure.batches, effect.batches) == ([["a", "b"]], [["a", "a"]])
    assert counter.calls == {"flaky": 3, "effect": 2}
    assert counter.attempts == {"flaky": 2, "effect": 2}
    assert counter.shared == {"flaky": 1, "effect": 0}


def test_calls_are_grouped_by_tool_and_answered_in_order() -> None:
    left, right = Flaky(name="left"), Flaky(name="right")
    batch = [ToolCall("left", "a"), ToolCall("right", "b"), ToolCall("left", "c")]
    assert execute({"left": left, "right": right}, batch) == [ToolResult("A"), ToolResult("B"), ToolResult("C")]
    assert (left.batches, right.batches) == ([["a", "c"]], [["b"]])
    assert execute({}, []) == []


class Broken:
    fingerprint = "broken"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        raise self.error


@pytest.mark.parametrize("error", [RetrievalError("down"), ConnectionError("refused"), TimeoutError("slow")])
def test_infrastructure_errors_become_failures(error: Exception) -> None:
    outcomes = execute({"search": SearchTool(Broken(error))}, calls("a", "b", tool="search"), retries=1, backoff_s=0)
    assert outcomes == [ToolFailure(type(error).__name__, str(error))] * 2


def test_bugs_are_raised_not_retried() -> None:
    with pytest.raises(ZeroDivisionError):
        execute({"search": SearchTool(Broken(ZeroDivisionError()))}, calls("a", tool="search"), backoff_s=0)


def test_a_tool_that_does_not_exist_or_miscounts_is_named() -> None:
    with pytest.raises(ToolError, match="'flaky', but the core has \\['search'\\]"):
        execute({"search": SearchTool(Broken(ValueError()))}, calls("a"))

    class Short(Flaky):
        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
            return []

    with pytest.raises(ToolError, match="0 outcomes to 1 calls"):
        execute({"flaky": Short()}, calls("a"))


def test_search_tool_cuts_to_k_and_refuses_other_shapes() -> None:
    class Backend:
        fingerprint = "x"

        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            found = [[Passage(str(i), "", "") for i in range(5)], "not a list"]
            return found[: len(queries)]  # type: ignore[return-value]

    outcomes = SearchTool(Backend(), k=2).run(calls("a", "b", tool="search"))
    assert isinstance(outcomes[0], ToolResult)
    assert [p.id for p in outcomes[0].value] == ["0", "1"]
    assert isinstance(outcomes[1], ToolFailure)
