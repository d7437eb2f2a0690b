"""A Gymnasium environment over a pure core, with snapshots, restore and forks."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium.error import InvalidAction, ResetNeeded
from gymnasium.utils import seeding

from turntree.envs.agent_task import AgentTask, TaskCore
from turntree.envs.core import Finish, Pending, Step, ToolCall, ToolFailure, ToolResult, TurnCore
from turntree.envs.loading import reject_unknown
from turntree.envs.snapshot import Snapshot
from turntree.envs.spaces import UnicodeText
from turntree.envs.task import FrozenDict, thaw
from turntree.envs.tools import CallCounter, execute, repeatable
from turntree.errors import ConfigError, SnapshotError, ToolError

__all__ = ["TurnEnv"]

S = TypeVar("S")


class TurnEnv(gymnasium.Env[str, str], Generic[S]):
    """Episodes of model turns: ``reset`` gives the prompt's text, ``step`` takes one turn and gives the observation.

    ``core`` holds the rules, or is an :class:`AgentTask` that does; ``tasks`` are the questions an episode may be about
    (drawn with ``np_random`` at reset). ``render_mode="ansi"`` makes :meth:`render` give the episode as a text.
    A tool call that fails is retried ``tool_retries`` times after ``tool_backoff_s`` seconds, doubling; when it still
    fails, ``step`` raises ``ToolError`` and the environment is as before, so the same turn may be sent again.

    ``calls`` counts the tool calls that this environment object made; it is not part of the state.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own declaration
    reset_options = ("snapshot", "task", "index")

    def __init__(
        self,
        core: TurnCore[S] | AgentTask[Any],
        tasks: Sequence[Any],
        *,
        tool_retries: int = 2,
        tool_backoff_s: float = 0.5,
        action_examples: Sequence[str] = (),
        render_mode: str | None = None,
    ) -> None:
        if not len(tasks):
            raise ConfigError("expected at least one task, found an empty sequence; give the environment questions")
        if tool_retries < 0 or not 0 <= tool_backoff_s < float("inf"):
            raise ConfigError(
                f"expected tool_retries >= 0 and a finite tool_backoff_s >= 0, found {tool_retries}, {tool_backoff_s}"
            )
        if render_mode is not None:
            reject_unknown([render_mode], self.metadata["render_modes"], what="render mode")
        if isinstance(core, AgentTask):
            action_examples = action_examples or core.examples
            core = cast("TurnCore[S]", TaskCore(core))
        self.core: TurnCore[S] = core
        self.tasks = tasks
        self.render_mode = render_mode
        self.tool_retries = tool_retries
        self.tool_backoff_s = tool_backoff_s
        self.calls = CallCounter()
        self.observation_space = UnicodeText()
        self.action_space = UnicodeText(examples=action_examples)
        self._state: S | None = None
        self._observation = ""
        self._info = FrozenDict()
        self._done = False
        self._frozen_random: tuple[Any, FrozenDict] = None, FrozenDict()

    # -- Gymnasium -------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        ``options`` takes one of ``snapshot`` (a :class:`Snapshot` or its JSON form: continue from there; a ``seed``
        given beside it re-derives the random stream), ``task`` (an own task) or ``index`` (of ``tasks``); without
        them a task is drawn. Raises ``ConfigError`` for anything else.
        """
        options = dict(options or {})
        reject_unknown(options, self.reset_options, what="reset option")
        if len(options) > 1:
            raise ConfigError(f"expected one reset option at a time, found {sorted(options)}")
        if "snapshot" in options:
            return self.restore(self._as_snapshot(options["snapshot"]), seed=seed)
        super().reset(seed=seed)
        task, index = self._choose(options)
        state, observation = self.core.initial(task, seed=int(self.np_random.integers(2**63)))
        info = {"task_id": getattr(task, "id", None), "task_index": index}
        self._state, self._observation, self._info, self._done = state, observation, FrozenDict(info), False
        return observation, thaw(self._info)

    def step(self, action: str, *, finish: Finish = "stop") -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn: act, execute the tools, resolve.

        ``finish="length"`` says that the text was cut at the turn's length limit. Raises ``ResetNeeded`` before the
        first reset and after the end of an episode, ``ToolError`` when a tool fails (the state is then unchanged).
        """
        outcome = self.begin(action, finish=finish)
        return self.end(self._resolve(outcome) if isinstance(outcome, Pending) else outcome)

    def begin(self, action: str, *, finish: Finish = "stop") -> Step[S] | Pending[S]:
        """The first half of :meth:`step`: read the turn, change nothing.

        Whoever drives many environments collects the calls of every ``Pending``, executes them in one batch,
        has :meth:`resolve` make a ``Step`` of the outcomes, and hands it to :meth:`end`. Raises like :meth:`step`.
        """
        if not isinstance(action, str):
            raise InvalidAction(f"expected the text of a turn (str), found {type(action).__name__}")
        return self.core.act(self._require_open(), action, finish=finish)

    def end(self, step: Step[S]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The second half of :meth:`step`: go on to where the turn led."""
        self._state, self._observation, self._info = step.state, step.observation, step.info
        self._done = step.done
        return step.observation, float(step.reward), step.terminated, step.truncated, thaw(step.info)

    def resolve(self, pending: Pending[S], outcomes: Sequence[ToolResult | ToolFailure]) -> Step[S]:
        """The step that a turn is with the outcomes of its calls, in call order; changes nothing.

        Raises ``ToolError`` when a call failed.
        """
        results = [self._expect(call, outcome) for call, outcome in zip(pending.calls, outcomes, strict=True)]
        return self.core.resolve(self._require_open(), pending, results)

    @property
    def done(self) -> bool:
        """Whether the episode is over (False before the first reset)."""
        return self._done

    def render(self) -> str | None:
        """The episode so far as a text, with ``render_mode="ansi"``; None without. Raises before the first reset."""
        if self._state is None:
            raise ResetNeeded("render() was called before reset(); call reset() first")
        return self.core.render(self._state) if self.render_mode == "ansi" else None

    # -- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state as a value, in O(1). Raises ``SnapshotError`` before the first reset."""
        if self._state is None:
            raise SnapshotError("there is no episode to take a snapshot of; call reset() first")
        return Snapshot(
            fingerprint=self.core.fingerprint,
            state=self._state,
            observation=self._observation,
            info=self._info,
            done=self._done,
            np_random=self._random_state(),
        )

    def _random_state(self) -> FrozenDict:
        """The state of ``np_random``; snapshots between two draws share it."""
        state: Any = self.np_random.bit_generator.state
        if not isinstance(self.np_random.bit_generator, np.random.PCG64):
            return FrozenDict(state)  # other kinds hold arrays, which == does not compare
        if state != self._frozen_random[0]:
            self._frozen_random = state, FrozenDict(state)
        return self._frozen_random[1]

    def restore(self, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Continue from ``snapshot``: exactly (``seed=None``), or with random streams re-derived from ``seed``.

        Returns the observation and info that the episode stood at, like ``reset``. Raises ``SnapshotError`` when
        the snapshot belongs to another environment.
        """
        if not isinstance(snapshot, Snapshot):
            raise SnapshotError(f"expected a Snapshot, found {type(snapshot).__name__}; use env.snapshot()")
        snapshot.check(self.core.fingerprint)
        state: S = snapshot.state
        if seed is None:
            self._np_random = _generator(snapshot.np_random)
            self._np_random_seed = -1
        else:
            self._np_random, self._np_random_seed = seeding.np_random(seed)
            state = self.core.reseed(state, seed)
        self._state, self._observation = state, snapshot.observation
        self._info, self._done = snapshot.info, snapshot.done
        return self._observation, thaw(self._info)

    def fork(self) -> TurnEnv[S]:
        """An independent environment in the same state; the core and the tasks, which never change, are shared."""
        twin = self.sibling()
        twin.restore(self.snapshot())
        return twin

    def sibling(self) -> Self:
        """An independent environment over the same core and tasks that was not reset yet."""
        twin = copy.copy(self)
        twin.calls = CallCounter()
        twin.action_space = copy.deepcopy(self.action_space)
        twin.observation_space = copy.deepcopy(self.observation_space)
        twin._np_random, twin._np_random_seed = None, None
        twin._state, twin._observation, twin._info, twin._done = None, "", FrozenDict(), False
        return twin

    def clone_state(self) -> Snapshot:
        """ALE's name for :meth:`snapshot`."""
        return self.snapshot()

    def restore_state(self, state: Snapshot) -> None:
        """ALE's name for :meth:`restore`."""
        self.restore(state)

    def encode_snapshot(self, snapshot: Snapshot) -> dict[str, Any]:
        """The snapshot as JSON-able data."""
        return snapshot.to_json(self.core)

    def decode_snapshot(self, data: Mapping[str, Any]) -> Snapshot:
        """The inverse of :meth:`encode_snapshot`; raises ``SnapshotError`` on anything else."""
        return Snapshot.from_json(data, self.core)

    # -- inside ----------------------------------------------------------------------------------------------

    def as_task(self, value: Any) -> Any:
        """Turn the reset option ``task`` into a task of the core; subclasses read other forms here."""
        return value

    def _choose(self, options: Mapping[str, Any]) -> tuple[Any, int | None]:
        if "task" in options:
            return self.as_task(options["task"]), None
        if "index" not in options:
            index = int(self.np_random.integers(len(self.tasks)))
            return self.tasks[index], index
        index = options["index"]
        if not isinstance(index, (int, np.integer)) or not 0 <= index < len(self.tasks):
            raise ConfigError(f"reset option 'index': expected an integer in 0..{len(self.tasks) - 1}, found {index!r}")
        return self.tasks[int(index)], int(index)

    def _as_snapshot(self, value: Any) -> Snapshot:
        return self.decode_snapshot(value) if isinstance(value, Mapping) else value

    def _require_open(self) -> S:
        if self._state is None:
            raise ResetNeeded("step() was called before reset(); call reset() first")
        if self._done:
            raise ResetNeeded("the episode is over (terminated or truncated); call reset() or restore() a snapshot")
        return self._state

    def _resolve(self, pending: Pending[S]) -> Step[S]:
        outcomes = execute(
            self.core.tools,
            pending.calls,
            retries=self.tool_retries,
            backoff_s=self.tool_backoff_s,
            counter=self.calls,
        )
        return self.resolve(pending, outcomes)

    def _expect(self, call: ToolCall, outcome: ToolResult | ToolFailure) -> ToolResult:
        if isinstance(outcome, ToolResult):
            return outcome
        tries = self.tool_retries + 1 if repeatable(self.core.tools[call.tool]) else 1
        times = f"{tries} times, last with" if tries > 1 else "with"
        raise ToolError(
            f"a tool call ({call.tool}) failed {times} {outcome.kind}: {outcome.message}. The episode is "
            "unchanged: repair the tool and send the same turn again"
        )


def _generator(state: Mapping[str, Any]) -> np.random.Generator:
    """A generator in the given bit-generator state."""
    name = str(state.get("bit_generator"))
    kind = getattr(np.random, name, None)
    if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
        raise SnapshotError(f"the snapshot's random state is of unknown kind {name!r}; expected one of numpy's")
    given = thaw(state)
    try:
        bits = kind(0)
        bits.state = given
        if kind is np.random.PCG64 and bits.state != given:  # the states of others hold arrays
            raise ValueError(f"numpy takes it for {bits.state}")
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError) as error:
        raise SnapshotError(f"the snapshot's random state cannot be read: {error}") from error
    return np.random.Generator(bits)
