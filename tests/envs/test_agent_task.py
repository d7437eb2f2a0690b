"""An author writes what happens; limits, corrections, tools, randomness, snapshots and rendering follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from turntree.envs import (
    Action,
    ActionTags,
    AgentTask,
    FrozenDict,
    Pending,
    Step,
    TaskCore,
    ToolCall,
    ToolResult,
    TurnEnv,
    execute,
)
from turntree.envs.check import check_fork
from turntree.envs.core import Effects
from turntree.errors import ConfigError, SnapshotError, ToolError, TurnTreeError


@dataclass(frozen=True)
class Dice:
    """How much was thrown so far."""

    goal: int
    total: int = 0


class Notebook:
    """Remembers, in the state, what it was told before."""

    effects: Effects = "in_state"
    description = "notes a line and shows all"

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [ToolResult(" / ".join((*(c.memory or ()), c.argument)), (*(c.memory or ()), c.argument)) for c in calls]


@dataclass(frozen=True)
class Throwing(AgentTask[Dice]):
    """Throw dice until the total is exactly the goal."""

    max_turns: int = 5
    sides: int = 6
    grammar = ActionTags({"throw": "how many dice", "stop": "at the goal"}, bare=("stop",))
    tools = FrozenDict({"note": Notebook()})
    examples = ("<throw> 2 </throw>", "<note> hello </note>", "<throw> many </throw>", "what?")

    def initial_state(self, task: int, rng: np.random.Generator) -> Dice:
        return Dice(task)

    def prompt(self, state: Dice) -> str:
        return f"Get to {state.goal}."

    def transition(self, state: Dice, action: Action, rng: np.random.Generator) -> Step[Dice]:
        if action.kind == "stop":
            return Step(state, "Good.", 1.0, terminated=True, info=FrozenDict({"total": state.total}))
        if not action.argument.isdecimal():
            return Step(state, "Write a number.")
        moved = replace(state, total=state.total + int(rng.integers(1, self.sides + 1, int(action.argument)).sum()))
        return Step(moved, f"You have {moved.total}.", reward=0.25)

    def truncated_reward(self, state: Dice) -> float:
        return -1.0

    def success(self, state: Dice) -> bool:
        return state.total == state.goal


def throwing(**options: Any) -> TurnEnv[Any]:
    return TurnEnv(Throwing(**options), [1, 2, 3], render_mode="ansi", tool_backoff_s=0.0)


def test_it_keeps_every_law() -> None:
    laws = check_fork(throwing(max_turns=40), process=False)
    assert {"restore", "isolation", "reseed", "pickle", "json", "cost"} <= set(laws)


def test_an_episode_from_prompt_to_end() -> None:
    env = throwing()
    prompt, _ = env.reset(seed=0, options={"index": 0})
    assert prompt.startswith("Get to 1.\n\n")
    assert "<note> ... </note>: notes a line and shows all" in prompt
    observation, reward, _, _, info = env.step("<throw> 1 </throw>")
    assert (reward, info["action"], info["turns"]) == (0.25, "throw", 1)
    assert observation.strip() == f"<information>You have {env.snapshot().state.inner.total}.</information>"
    assert "a b" in env.step("<note> a b </note>")[0]
    observation, *_, info = env.step("I wonder.")
    assert "<throw>, <stop>, <note>" in observation
    assert (info["action"], info["invalid_reason"]) == ("invalid", "no_action")
    assert "This is the last turn." in env.step("<note> c </note>")[0]
    observation, reward, terminated, truncated, info = env.step("<stop></stop>")
    assert (observation.strip(), reward, terminated, truncated) == (
        "<information>Good.</information>",
        1.0,
        True,
        False,
    )
    assert (info["stop_reason"], info["format_valid"], info["total"]) == (
        "done",
        False,
        1 if info["success"] else info["total"],
    )
    rendered = env.render()
    assert rendered is not None
    assert rendered.startswith("Get to 1.")
    assert rendered.endswith("<stop></stop>\n<information>Good.</information>")


def test_what_an_in_state_tool_remembers_belongs_to_the_state() -> None:
    env = throwing()
    env.reset(seed=0)
    env.step("<note> a </note>")
    twin = env.fork()
    assert "a / b" in env.step("<note> b </note>")[0]
    assert "a / c" in twin.step("<note> c </note>")[0]
    assert "a / b / d" in env.step("<note> d </note>")[0]


def test_the_last_turn_ends_the_episode_and_its_call_is_not_executed() -> None:
    env = throwing(max_turns=2)
    for last, reward, reason in (
        ("<throw> 1 </throw>", -0.75, "turns"),
        ("<note> x </note>", -1.0, "turns"),
        ("nothing", -1.0, "turns"),
    ):
        env.reset(seed=1)
        assert "This is the last turn." in env.step("nothing")[0]
        calls = dict(env.calls.calls)
        _, got, terminated, truncated, info = env.step(last)
        assert (got, terminated, truncated, info["stop_reason"]) == (reward, False, True, reason)
        assert env.calls.calls == calls
    with pytest.raises(TurnTreeError, match="the episode is over"):
        env.core.act(env.snapshot().state, "x")
    assert "This is the last turn." in throwing(max_turns=1).reset(seed=0)[0]


def test_a_turn_cut_at_its_limit_is_corrected_once() -> None:
    env = throwing()
    env.reset(seed=0)
    observation, _, _, truncated, info = env.step("<throw> 1 </throw>", finish="length")
    assert ("Be brief" in observation, truncated, info["invalid_reason"]) == (True, False, "cut_at_length")
    *_, truncated, info = env.step("<throw> 1 </throw>", finish="length")
    assert (truncated, info["stop_reason"]) == (True, "length")

    class Strict(Throwing):
        on_length = "end"

    strict: TurnEnv[Any] = TurnEnv(Strict(), [1])
    strict.reset(seed=0)
    *_, truncated, info = strict.step("<throw> 1 </throw>", finish="length")
    assert (truncated, info["stop_reason"]) == (True, "length")


def test_siblings_are_independent_only_with_a_seed() -> None:
    env = throwing()
    env.reset(seed=3)
    snapshot = env.snapshot()
    seen = []
    for seed in [None, None, *range(8)]:
        env.restore(snapshot, seed)
        seen.append(env.step("<throw> 9 </throw>")[0])
    assert seen[0] == seen[1]
    assert len(set(seen[2:])) > 1


def test_act_and_resolve_draw_different_numbers_and_the_same_again() -> None:
    class Two(Throwing):
        def act(self, state: Dice, action: Action, rng: np.random.Generator) -> Step[Dice] | tuple[ToolCall, ...]:
            return (ToolCall("note", str(rng.integers(1 << 30))),)

        def resolve(
            self, state: Dice, action: Action, results: Sequence[ToolResult], rng: np.random.Generator
        ) -> Step[Dice]:
            return Step(state, f"{results[0].value} {rng.integers(1 << 30)}")

    core = TaskCore(Two())
    state, _ = core.initial(3, seed=5)

    def turn(state: Any) -> Any:
        pending = core.act(state, "<stop></stop>")
        assert isinstance(pending, Pending)
        results = [r for r in execute(core.tools, pending.calls) if isinstance(r, ToolResult)]
        return core.resolve(state, pending, results)

    first, again = turn(state), turn(state)
    assert first == again
    numbers = first.observation.replace("<information>", " ").replace("</information>", " ").split()
    assert len(set(numbers)) == 2
    assert turn(first.state).observation != first.observation


def test_observations_can_be_limited_in_tokens() -> None:
    class Letters:
        def encode(self, text: str, /) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, ids: Sequence[int], /) -> str:
            return "".join(map(chr, ids))

    core = TaskCore(Throwing()).limited(200, Letters())
    state, _ = core.initial(3, seed=0)
    step = core.resolve(
        state, Pending("<note> x </note>", Action("note", "x"), (ToolCall("note", "x"),)), [ToolResult("y" * 500)]
    )
    assert len(step.observation) <= 200
    assert step.observation.endswith("</information>\n\n")
    assert step.info["observation_truncated"]
    assert core.fingerprint != TaskCore(Throwing()).fingerprint
    with pytest.raises(ConfigError, match="raise the limit"):
        TaskCore(Throwing()).limited(10, Letters())


def test_the_fingerprint_follows_options_version_and_tools() -> None:
    class Other(Throwing):
        version = 2

    class Toolless(Throwing):
        tools = FrozenDict()

    prints = {
        TaskCore(rules).fingerprint
        for rules in (Throwing(), Throwing(sides=8), Throwing(max_turns=6), Other(), Toolless())
    }
    assert len(prints) == 5
    assert TaskCore(Throwing()).fingerprint == TaskCore(Throwing()).fingerprint


def test_snapshots_of_other_shapes_are_refused() -> None:
    env = throwing()
    env.reset(seed=0)
    data = json.loads(json.dumps(env.encode_snapshot(env.snapshot())))
    data["state"]["inner"]["total"] = "many"
    with pytest.raises(SnapshotError, match=r"the state of Throwing\.total: expected int"):
        env.decode_snapshot(data)
    del data["state"]["inner"]
    with pytest.raises(SnapshotError, match="expected the state of Throwing"):
        env.decode_snapshot(data)


def test_mistakes_of_the_author_are_named() -> None:
    class NoHint(Throwing):
        def initial_state(self, task, rng):  # type: ignore[no-untyped-def]
            return Dice(task)

    class Loose(Throwing):
        def initial_state(self, task: int, rng: np.random.Generator) -> Any:
            return [task]

    class Wrong(Throwing):
        def transition(self, state: Dice, action: Action, rng: np.random.Generator) -> Any:
            return state

    class Infinite(Throwing):
        def transition(self, state: Dice, action: Action, rng: np.random.Generator) -> Step[Dice]:
            return Step(state, "", reward=float("inf"))

    class Twice(Throwing):
        def act(self, state: Dice, action: Action, rng: np.random.Generator) -> tuple[ToolCall, ...]:
            return (ToolCall("note", "a"), ToolCall("note", "b"))

    with pytest.raises(ConfigError, match="no return annotation"):
        TaskCore(NoHint())
    with pytest.raises(SnapshotError, match=r"the state of Loose: .*use a tuple"):
        TurnEnv(Loose(), [1]).reset(seed=0)
    for rules in (Wrong(), Infinite()):
        env: TurnEnv[Any] = TurnEnv(rules, [1])
        env.reset(seed=0)
        with pytest.raises(TypeError, match="expected a"):
            env.step("<stop></stop>")
    twice: TurnEnv[Any] = TurnEnv(Twice(), [1])
    twice.reset(seed=0)
    with pytest.raises(ToolError, match="twice"):
        twice.step("<stop></stop>")
    with pytest.raises(ConfigError, match="max_turns"):
        TaskCore(Throwing(max_turns=0))
    with pytest.raises(ConfigError, match="expected an AgentTask"):
        TaskCore(3)  # type: ignore[arg-type]


def test_rendering_needs_a_mode_and_an_episode() -> None:
    env = throwing()
    with pytest.raises(ResetNeeded, match="render"):
        env.render()
    env.reset(seed=0)
    assert str(env.render()).startswith("Get to")
    silent: TurnEnv[Any] = TurnEnv(Throwing(), [1])
    silent.reset(seed=0)
    assert silent.render() is None
    with pytest.raises(ConfigError, match="render mode"):
        TurnEnv(Throwing(), [1], render_mode="human")
