"""A task of your own: the author writes what happens, :class:`TaskCore` keeps the books of the episode.

An author derives from :class:`AgentTask`, writes ``initial_state``, ``prompt`` and ``transition``, and gives an
instance to :class:`turntree.envs.TurnEnv`. Reading turns, corrections, limits, tools, randomness, snapshots and
rendering are then the same for every task.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import typing
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np

from turntree.envs.actions import ActionGrammar, PlainText
from turntree.envs.codec import check_value, decode, encode
from turntree.envs.core import Action, Finish, Pending, Step, TextTool, ToolCall, ToolResult, TurnCore
from turntree.envs.grammar import Observation, ParsedTurn, TurnRecord
from turntree.envs.limits import OnLength
from turntree.envs.loading import reject_unknown
from turntree.envs.snapshot import History, RandomStream
from turntree.envs.task import EMPTY, FrozenDict, thaw
from turntree.envs.tools import tool_fingerprint, tool_spec
from turntree.envs.truncation import ObservationLimit, Tokenizer
from turntree.errors import ConfigError, SnapshotError, ToolError, TurnTreeError

__all__ = ["AgentTask", "Episode", "TaskCore"]

S = TypeVar("S")

Rng = np.random.Generator


class AgentTask(ABC, Generic[S]):
    """The rules of a task, written by its author. ``S`` is the task's own state: an immutable value.

    ``initial_state`` must say in its return annotation what type the state is; it is stored by that type (see
    :mod:`turntree.envs.codec`). An instance never changes: everything that an episode changes belongs in the state.
    Its public attributes are part of the environment's fingerprint; raise ``version`` when the rules change otherwise.
    """

    #: How turns are read; the tags of ``tools`` are added to it.
    grammar: ActionGrammar = PlainText()
    #: Tools by the name of their tag.
    tools: Mapping[str, TextTool] = FrozenDict()
    #: Model turns of an episode.
    max_turns: int = 8
    #: A turn cut at its length limit: one correction, or the end of the episode.
    on_length: OnLength = "correct"
    #: The number that runs of this task are judged by: reward, success, or a key of the last turn's info.
    metric: ClassVar[str] = "reward"
    version: ClassVar[int] = 1
    #: Turns for random play.
    examples: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def initial_state(self, task: Any, rng: Rng) -> S:
        """The state before the first turn of an episode about ``task``."""

    @abstractmethod
    def prompt(self, state: S) -> str:
        """What the agent is told first; the grammar's instructions follow."""

    def transition(self, state: S, action: Action, rng: Rng) -> Step[S]:
        """What an action does: the new state, what the agent sees, reward, and whether the episode is over."""
        raise NotImplementedError(f"{type(self).__name__} must implement transition(): what does {action.kind!r} do?")

    def act(self, state: S, action: Action, rng: Rng) -> Step[S] | tuple[ToolCall, ...]:
        """A finished step, or the tool calls that the action asks for. By default the tool that the action names."""
        if action.kind in self.tools:
            return (ToolCall(action.kind, action.argument),)
        return self.transition(state, action, rng)

    def resolve(self, state: S, action: Action, results: Sequence[ToolResult], rng: Rng) -> Step[S]:
        """The step that ends with the results of the calls of :meth:`act`, in order. By default they are shown."""
        return Step(state, "\n".join(str(result.value) for result in results))

    def truncated_reward(self, state: S) -> float:
        """What an episode is worth that ended at a limit, besides the rewards of its turns."""
        return 0.0

    def success(self, state: S) -> bool | None:
        """Whether the task is done, asked at the end of an episode; None where there is no such thing."""
        return None

    def solution(self, task: Any) -> Sequence[str]:
        """Turns that solve ``task``, for ``turntree sft`` and for tests; empty where none are known."""
        return ()


@dataclass(frozen=True, slots=True)
class Episode(Generic[S]):
    """An episode between two turns. ``inner`` is the task's own state, ``memory`` what ``in_state`` tools remember.

    ``length_cuts`` counts the turns in a row that were cut at their length limit.
    """

    inner: S
    prompt: str
    stream: RandomStream
    history: History[TurnRecord] = field(default_factory=lambda: History[TurnRecord]())
    length_cuts: int = 0
    stop_reason: str = ""
    memory: FrozenDict = EMPTY

    @property
    def turns(self) -> int:
        """Model turns so far."""
        return len(self.history)


class TaskCore(TurnCore[Episode[S]]):
    """The core of an :class:`AgentTask`.

    A turn that cannot be read, or was cut at its length limit, is not executed: the agent is told why and may go on.
    After the last turn the episode is truncated; a tool call in it is not executed. ``max_observation_tokens`` bounds
    one observation, counted by ``tokenizer``.

    ``info`` of every turn holds ``action``, ``turns``, ``overrun``, ``other_dialect``, where they apply
    ``invalid_reason`` and ``observation_truncated``, and what the task's step says; at the end ``stop_reason``
    (``done``, ``turns``, ``length``, ``context``), ``format_valid`` (no turn was corrected) and ``success`` if the task
    knows.
    """

    def __init__(
        self,
        rules: AgentTask[S],
        *,
        max_observation_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if not isinstance(rules, AgentTask):
            raise ConfigError(f"expected an AgentTask, found {rules!r:.100}; derive your rules from it")
        _check_limits(rules)
        self.rules = rules
        self.tools = dict(rules.tools)
        self.metric = rules.metric
        self.grammar = rules.grammar.with_actions(
            {name: tool_spec(name, tool).description for name, tool in rules.tools.items()}
        )
        self._kind = _state_type(rules)
        self._limit = _limit(max_observation_tokens, tokenizer, self.grammar)
        self._fingerprint = self._hash()

    @property
    def fingerprint(self) -> str:
        """Hash of the rules' class, version and attributes, of grammar, tools and token limit."""
        return self._fingerprint

    @property
    def stop(self) -> tuple[str, ...]:
        return self.grammar.stop

    def limited(self, max_observation_tokens: int, tokenizer: Tokenizer) -> TaskCore[S]:
        """The same core with observations of at most ``max_observation_tokens`` tokens."""
        return TaskCore(self.rules, max_observation_tokens=max_observation_tokens, tokenizer=tokenizer)

    def initial(self, task: Any, *, seed: int) -> tuple[Episode[S], str]:
        """The state before the first turn, and the prompt with the grammar's instructions."""
        rng, stream = RandomStream(seed).draw()
        inner = self.rules.initial_state(task, rng)
        check_value(inner, where=f"the state of {type(self.rules).__name__}")
        prompt = "\n\n".join(part for part in (self.rules.prompt(inner), self.grammar.instructions()) if part)
        if self.rules.max_turns == 1:
            prompt = f"{prompt}\n\n{self.grammar.last_turn_notice().strip()}"
        return Episode(inner, prompt, stream), prompt

    def act(self, state: Episode[S], text: str, *, finish: Finish = "stop") -> Step[Episode[S]] | Pending[Episode[S]]:
        """Read one turn and do what it asks for. A turn cut at its length limit is never executed."""
        self._require_open(state)
        parsed = self.grammar.parse(text)
        if finish == "length":
            return self._cut(state, text, parsed)
        state = replace(state, length_cuts=0)
        if parsed.action.kind == "invalid":
            return self._correct(state, text, parsed)
        rng, stream = state.stream.draw()
        outcome = self.rules.act(state.inner, parsed.action, rng)
        if not isinstance(outcome, tuple):
            return self._after(replace(state, stream=stream), text, parsed, outcome)
        if self._is_last(state):
            return self._end(state, "turns", text=text, parsed=parsed)
        return Pending(text, parsed.action, self._remembering(state, outcome))

    def resolve(
        self, state: Episode[S], pending: Pending[Episode[S]], results: Sequence[ToolResult]
    ) -> Step[Episode[S]]:
        """Finish a turn with the results of its calls."""
        _, stream = state.stream.draw()  # the first draw was that of act()
        rng, stream = stream.draw()
        memory = {
            call.tool: result.memory
            for call, result in zip(pending.calls, results, strict=True)
            if self.tools[call.tool].effects == "in_state"
        }
        state = replace(state, stream=stream, length_cuts=0, memory=FrozenDict({**state.memory, **memory}))
        step = self.rules.resolve(state.inner, pending.action, results, rng)
        return self._after(state, pending.text, self.grammar.parse(pending.text), step)

    def truncate(self, state: Episode[S], reason: str) -> Step[Episode[S]]:
        """End the episode from outside; the step has no turn of its own."""
        self._require_open(state)
        return self._end(state, reason)

    def reseed(self, state: Episode[S], seed: int) -> Episode[S]:
        return replace(state, stream=RandomStream(seed))

    def encode_state(self, state: Episode[S]) -> dict[str, Any]:
        """The state as JSON-able data."""
        return {
            "inner": encode(state.inner),
            "prompt": state.prompt,
            "stream": state.stream.to_json(),
            "history": encode(state.history),
            "length_cuts": state.length_cuts,
            "stop_reason": state.stop_reason,
            "memory": thaw(state.memory),
        }

    def decode_state(self, data: Mapping[str, Any]) -> Episode[S]:
        """The inverse of :meth:`encode_state`; raises ``SnapshotError`` on anything else."""
        where = f"the state of {type(self.rules).__name__}"
        try:
            return Episode(
                inner=decode(self._kind, data["inner"], where=where),
                prompt=decode(str, data["prompt"]),
                stream=RandomStream.from_json(data["stream"]),
                history=decode(History[TurnRecord], data["history"], where="history"),
                length_cuts=decode(int, data["length_cuts"]),
                stop_reason=decode(str, data["stop_reason"]),
                memory=FrozenDict(data["memory"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"expected {where}, found something else ({type(error).__name__}: {error})") from error

    def render(self, state: Episode[S]) -> str:
        """The prompt, then every turn and what was shown for it."""
        parts = [state.prompt, *(part for turn in state.history for part in (turn.text, turn.observation))]
        return "\n".join(part.strip() for part in parts if part.strip())

    # -- inside ------------------------------------------------------------------------------------------------------

    def _require_open(self, state: Episode[S]) -> None:
        if state.stop_reason:
            raise TurnTreeError(f"the episode is over ({state.stop_reason}); go on from an earlier state")

    def _is_last(self, state: Episode[S]) -> bool:
        return state.turns + 1 >= self.rules.max_turns

    def _remembering(self, state: Episode[S], calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
        """The calls, with what each ``in_state`` tool was left with."""
        calls = tuple(calls)
        inside = [
            call.tool for call in calls if call.tool in self.tools and self.tools[call.tool].effects == "in_state"
        ]
        twice = next((name for name in inside if inside.count(name) > 1), None)
        if twice is not None:
            raise ToolError(f"a turn calls the tool {twice!r} twice, but what it remembers is handed from call to call")
        return tuple(
            replace(call, memory=state.memory.get(call.tool)) if call.tool in inside else call for call in calls
        )

    def _after(self, state: Episode[S], text: str, parsed: ParsedTurn, step: Step[S]) -> Step[Episode[S]]:
        """What the task's own step means for the episode. ``state`` has drawn its random numbers."""
        _check_step(step, self.rules)
        moved = replace(state, inner=step.state)
        if step.terminated:
            return self._end(moved, str(step.info.get("stop_reason", "done")), text=text, parsed=parsed, step=step)
        if step.truncated or self._is_last(moved):
            reason = str(step.info.get("stop_reason", "turns"))
            return self._end(moved, reason, text=text, parsed=parsed, step=step)
        shown, cut = self._shown(moved, self.grammar.observation(step.observation))
        after = replace(moved, history=moved.history.append(TurnRecord(text, parsed.action, shown, "results")))
        info = {**_info(after, parsed), **step.info, "observation_truncated": cut}
        return Step(after, shown, reward=float(step.reward), info=FrozenDict(info))

    def _shown(self, state: Episode[S], observation: Observation) -> tuple[str, bool]:
        """The observation within its limit, with the notice before the last turn, and whether it was cut."""
        if state.turns + 2 == self.rules.max_turns:
            observation = replace(observation, tail=observation.tail + self.grammar.last_turn_notice())
        observation, cut = (observation, False) if self._limit is None else self._limit.cut(observation)
        return observation.text, cut

    def _cut(self, state: Episode[S], text: str, parsed: ParsedTurn) -> Step[Episode[S]]:
        """A turn that ran into its length limit."""
        invalid = replace(parsed, action=Action("invalid", "cut_at_length"), span=None)
        if self.rules.on_length == "end" or state.length_cuts or self._is_last(state):
            return self._end(state, "length", text=text, parsed=invalid)
        return self._correct(replace(state, length_cuts=state.length_cuts + 1), text, invalid)

    def _correct(self, state: Episode[S], text: str, parsed: ParsedTurn) -> Step[Episode[S]]:
        """A turn that is not executed: the agent is told why and may go on, unless it was the last."""
        if self._is_last(state):
            return self._end(state, "turns", text=text, parsed=parsed)
        shown, _ = self._shown(state, Observation("", "", self.grammar.correction(parsed.action.argument)))
        after = replace(state, history=state.history.append(TurnRecord(text, parsed.action, shown, "correction")))
        return Step(after, shown, info=FrozenDict(_info(after, parsed)))

    def _end(
        self,
        state: Episode[S],
        reason: str,
        *,
        text: str = "",
        parsed: ParsedTurn | None = None,
        step: Step[S] | None = None,
    ) -> Step[Episode[S]]:
        """The last step of an episode; ``step`` is the task's own, without one (or with an open one) it is cut off."""
        shown = self.grammar.observation(step.observation).text if step is not None and step.observation else ""
        history = state.history
        if parsed is not None:
            history = history.append(TurnRecord(text, parsed.action, shown, "results" if shown else "none"))
        after = replace(state, history=history, stop_reason=reason)
        terminated = step is not None and step.terminated
        reward = float(step.reward) if step is not None else 0.0
        if not terminated:
            reward += float(self.rules.truncated_reward(state.inner))
        info = {**_info(after, parsed), **(step.info if step is not None else {}), "stop_reason": reason}
        info["format_valid"] = all(turn.action.kind != "invalid" for turn in history.newest_first())
        success = self.rules.success(state.inner)
        if success is not None:
            info["success"] = bool(success)
        return Step(after, shown, reward, terminated=terminated, truncated=not terminated, info=FrozenDict(info))

    def _hash(self) -> str:
        rules = self.rules
        parts = {
            "class": f"{type(rules).__module__}:{type(rules).__qualname__}/{rules.version}",
            "attributes": _attributes(rules),
            "grammar": self.grammar.fingerprint,
            "tools": {name: tool_fingerprint(tool) for name, tool in rules.tools.items()},
            "limits": [rules.max_turns, rules.on_length],
            "tokens": self._limit.fingerprint if self._limit else None,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_limits(rules: AgentTask[Any]) -> None:
    turns: Any = rules.max_turns
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise ConfigError(f"{type(rules).__name__}.max_turns: expected an integer of at least 1, found {turns!r}")
    reject_unknown([rules.on_length], get_args(OnLength), what="on_length setting")


def _check_step(step: Any, rules: AgentTask[Any]) -> None:
    """Raise for what no author means: these are bugs, and must not end up as failed episodes."""
    name = type(rules).__name__
    if not isinstance(step, Step):
        raise TypeError(f"{name}: expected a Step (or from act() a tuple of tool calls), found {step!r:.100}")
    if not isinstance(step.observation, str) or not math.isfinite(step.reward):
        raise TypeError(
            f"{name}: expected a text as observation and a finite reward, found {step.observation!r:.60}, {step.reward}"
        )


def _state_type(rules: AgentTask[Any]) -> Any:
    """The type that ``initial_state`` says it returns."""
    name = type(rules).__name__
    try:
        found = typing.get_type_hints(type(rules).initial_state).get("return")
    except NameError as error:
        raise ConfigError(f"{name}.initial_state: its annotations cannot be read: {error}") from error
    if found is None or isinstance(found, TypeVar):
        raise ConfigError(
            f"{name}.initial_state has no return annotation; say what the state is (-> MyState): it is stored by that "
            "type"
        )
    return found


def _limit(max_tokens: int | None, tokenizer: Tokenizer | None, grammar: ActionGrammar) -> ObservationLimit | None:
    if max_tokens is None:
        return None
    if tokenizer is None:
        raise ConfigError("max_observation_tokens is set, but there is no tokenizer to count with; pass tokenizer=")
    limit = ObservationLimit(max_tokens, tokenizer)
    empty, notice = grammar.observation("x"), grammar.last_turn_notice()
    limit.require(empty.head + empty.tail + notice, what="an empty observation with the notice of the last turn")
    limit.require(grammar.correction("no_action") + notice, what="a correction with the notice of the last turn")
    return limit


def _attributes(rules: AgentTask[Any]) -> dict[str, Any]:
    """The public attributes of the rules' instance, as data."""
    instance: Any = rules
    names = [f.name for f in dataclasses.fields(instance)] if dataclasses.is_dataclass(instance) else vars(instance)
    public = (name for name in names if not name.startswith("_") and name not in ("grammar", "tools"))
    own = {name: getattr(instance, name) for name in public}
    for name, value in own.items():
        try:
            check_value(value, where=f"{type(rules).__name__}.{name}")
        except SnapshotError as error:
            raise ConfigError(
                f"{error}. Attributes of a task are part of its fingerprint; begin others with _"
            ) from None
    return {name: encode(value) for name, value in own.items()}


def _info(state: Episode[Any], parsed: ParsedTurn | None) -> dict[str, Any]:
    info: dict[str, Any] = {"action": parsed.action.kind if parsed else "none", "turns": state.turns}
    if parsed is not None:
        info |= {"overrun": "overrun" in parsed.notes, "other_dialect": parsed.other_dialect}
        if parsed.action.kind == "invalid":
            info["invalid_reason"] = parsed.action.argument
    return info
