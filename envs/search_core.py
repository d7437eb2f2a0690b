"""Multi-turn question answering with a search tool: the rules, as a pure core."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from turntree.envs.core import Action, Finish, Pending, Step, TextTool, Tool, ToolCall, ToolResult, TurnCore
from turntree.envs.grammar import (
    Grammar,
    Observation,
    ParsedTurn,
    PlannerGrammar,
    TagGrammar,
    ToolGrammar,
    TurnRecord,
    reading_tools,
)
from turntree.envs.grammar.base import ObservationKind
from turntree.envs.grammar.planner import FINISH
from turntree.envs.limits import Limits
from turntree.envs.loading import reject_unknown
from turntree.envs.metrics import Normalizer
from turntree.envs.prompt import PromptTemplate
from turntree.envs.rewards import Outcome, Reward, evaluate_reward, load_reward, reward_name
from turntree.envs.snapshot import History, RandomStream
from turntree.envs.task import EMPTY, FrozenDict, Question, thaw
from turntree.envs.tools import SearchTool, tool_fingerprint, tool_spec
from turntree.envs.truncation import ObservationLimit, Tokenizer
from turntree.errors import ConfigError, DataError, SnapshotError, ToolError, TurnTreeError
from turntree.search_backend.passage import SearchBackend

__all__ = ["SearchQACore", "SearchQAState"]


@dataclass(frozen=True, slots=True)
class SearchQAState:
    """An episode between two turns.

    ``length_cuts`` counts the turns in a row that were cut at their length limit, ``calls`` the calls of tools other
    than the search, by name. ``memory`` is what tools with effects ``in_state`` remember, by name.
    """

    task: Question
    stream: RandomStream
    history: History[TurnRecord]
    searches: int = 0
    length_cuts: int = 0
    stop_reason: str = ""
    calls: FrozenDict = EMPTY
    memory: FrozenDict = EMPTY

    @property
    def turns(self) -> int:
        """Model turns so far."""
        return len(self.history)


class SearchQACore(TurnCore[SearchQAState]):
    """The rules. A turn searches, calls a tool, answers, or is corrected; before the last turn the agent is told so.

    A call in the last turn is not executed: the episode ends truncated, with an empty observation.

    ``tools`` are further tools by the name of their tag, which the grammar is taught; ``max_searches`` does not bound
    them. ``prompt`` replaces the grammar's instructions.

    Under a :class:`PlannerGrammar` no turn answers: the episode ends where the planner stops (``stop_reason`` is
    ``finish``) or at a limit, its reward is deferred (0 and ``info["reward_pending"]``, no ``em`` and ``f1``), and
    :meth:`judge` says what it is worth with the answer that somebody else wrote.

    ``info`` of every turn holds ``action``, ``turns``, ``searches``, ``overrun``, ``other_dialect``, and where they
    apply ``tool_calls`` (so far, by tool), ``argument`` (of the turn's call), or ``calls`` (``tool`` and ``argument``
    of each) and ``parallel_calls`` (their number) where it made several, ``invalid_reason``, ``retrieved``,
    ``observation_truncated``; at the end ``stop_reason``, ``answer``, ``em``, ``f1``, ``format_valid``,
    ``format_reason``.
    """

    metric = "em"

    def __init__(
        self,
        search: SearchBackend,
        *,
        limits: Limits | None = None,
        grammar: Grammar | None = None,
        reward: Reward | str = "em",
        normalizer: Normalizer = "squad",
        tokenizer: Tokenizer | None = None,
        tools: Mapping[str, TextTool] | None = None,
        prompt: PromptTemplate | None = None,
    ) -> None:
        own = dict(tools or {})
        self.limits = limits or Limits()
        self.grammar = reading_tools(grammar or TagGrammar(), [tool_spec(name, tool) for name, tool in own.items()])
        self.prompt = prompt
        self.reward = load_reward(reward)
        reject_unknown([normalizer], get_args(Normalizer), what="normalizer")
        self.normalizer: Normalizer = normalizer
        self.tools: Mapping[str, Tool] = {"search": SearchTool(search, k=self.limits.top_k), **own}
        self.deferred = isinstance(self.grammar, PlannerGrammar)
        self._limit = _observation_limit(self.limits.max_observation_tokens, tokenizer, self.grammar, tuple(own))
        self._fingerprint = self._hash(search)

    @property
    def stop(self) -> tuple[str, ...]:
        return tuple(self.grammar.stop)

    @property
    def fingerprint(self) -> str:
        """Hash of limits, grammar, prompt, reward, normaliser, token limit, search backend and tools."""
        return self._fingerprint

    def initial(self, task: Question, *, seed: int) -> tuple[SearchQAState, str]:
        """The state before the first turn, and the prompt.

        Raises ``DataError`` for a task without a question or without gold answers: the episode could not be judged.
        """
        if not isinstance(task, Question):
            raise DataError(f"expected a Question as task, found {type(task).__name__}")
        if not task.golden_answers:
            raise DataError(f"question {task.id!r}: expected at least one gold answer, found none")
        state = SearchQAState(task=task, stream=RandomStream(seed), history=History())
        try:
            prompt = (self.prompt.ask if self.prompt else self.grammar.prompt)(task.question)
        except DataError as error:
            raise DataError(f"question {task.id!r}: {error}") from error
        if self._only_answer(turns=0, searches=0):
            prompt = f"{prompt}\n\n{self.grammar.last_turn_notice().strip()}"
        return state, prompt

    def act(
        self, state: SearchQAState, text: str, *, finish: Finish = "stop"
    ) -> Step[SearchQAState] | Pending[SearchQAState]:
        """Read one turn. A turn cut at its length limit is never executed, well-formed or not."""
        self._require_open(state)
        parsed = self.grammar.parse(text)
        if finish == "length":
            return self._cut(state, text, parsed)
        if state.length_cuts:
            state = replace(state, length_cuts=0)
        action = parsed.action
        record = TurnRecord(text, action)
        if action.kind == "answer":
            return self._end(state, "answer", record=record, parsed=parsed, answer=action.argument)
        if action.kind == FINISH and self.deferred:
            return self._end(state, FINISH, record=record, parsed=parsed)
        if state.turns + 1 >= self.limits.max_turns:
            return self._end(state, "turns", record=record, parsed=parsed)
        if reason := self._refusal(state, parsed):
            return self._correct(state, text, parsed, reason=reason)
        calls = (ToolCall(a.kind, a.argument, state.memory.get(a.kind)) for a in parsed.actions)
        return Pending(text, action, tuple(calls), parsed)

    def _refusal(self, state: SearchQAState, parsed: ParsedTurn) -> str:
        """The reason code for not executing the turn's calls, of which one makes all void; empty for none."""
        kinds = [action.kind for action in parsed.actions]
        unknown = next((action for action in parsed.actions if action.kind not in self.tools), None)
        if unknown is not None:
            return unknown.argument if unknown.kind == "invalid" else "no_action"
        if "search" in kinds:
            left = self.limits.searches_left(turns=state.turns, searches=state.searches)
            if kinds.count("search") > left:
                return "no_searches_left"
        # The second of two calls would not see what the first one remembers.
        if any(kinds.count(kind) > 1 and self.tools[kind].effects == "in_state" for kind in kinds):
            return "repeated_call"
        return ""

    def resolve(
        self, state: SearchQAState, pending: Pending[SearchQAState], results: Sequence[ToolResult]
    ) -> Step[SearchQAState]:
        """Show what the searches found and what other tools returned, in call order."""
        shown: list[Observation] = []
        retrieved: list[dict[str, str]] = []
        after, searches = state, 0
        for call, result in zip(pending.calls, results, strict=True):
            if call.tool == "search":
                searches += 1
                shown.append(self.grammar.results(result.value))
                retrieved += [{"id": p.id, "title": p.title} for p in result.value]
            else:
                after = self._called(after, call.tool, result)
                shown.append(cast("ToolGrammar", self.grammar).tool_result(call.tool, result.value))
        found = {"retrieved": retrieved} if searches else {}
        return self._show(after, pending, shown, state.searches + searches, **_made(pending.calls), **found)

    def _called(self, state: SearchQAState, name: str, result: ToolResult) -> SearchQAState:
        """The state after a call of a tool other than the search."""
        if not isinstance(result.value, str):
            raise ToolError(f"the tool {name!r} must return texts, found {result.value!r:.200}; write it as a text")
        state = replace(state, calls=FrozenDict({**state.calls, name: state.calls.get(name, 0) + 1}))
        if self.tools[name].effects == "in_state":
            state = replace(state, memory=FrozenDict({**state.memory, name: result.memory}))
        return state

    def _show(
        self,
        state: SearchQAState,
        pending: Pending[SearchQAState],
        shown: Sequence[Observation],
        searches: int,
        **more: Any,
    ) -> Step[SearchQAState]:
        """The step that ends with ``shown``, one part a call, after ``searches``; ``state`` has counted other calls."""
        last = self._announced(shown[-1], turns=state.turns + 1, searches=searches)
        parts, cut = (*shown[:-1], last), False
        if self._limit is not None:
            parts, cut = self._limit.cut_all(parts)
        observation = "\n".join(part.text for part in parts)
        record = TurnRecord(pending.text, pending.action, observation, "results")
        after = replace(state, history=state.history.append(record), searches=searches, length_cuts=0)
        if len(parts) > 1:
            more["parallel_calls"] = len(parts)
        parsed = pending.reading or self.grammar.parse(pending.text)
        info = self._info(after, parsed) | more | {"observation_truncated": cut}
        return Step(after, observation, info=FrozenDict(info))

    def judge(self, state: SearchQAState, answer: str | None) -> tuple[float, dict[str, float]]:
        """The reward of an ended episode with an answer that was written afterwards, and its ``em`` and ``f1``."""
        outcome = self._outcome(state, answer)
        return evaluate_reward(self.reward, outcome), {"em": outcome.em, "f1": outcome.f1}

    def truncate(self, state: SearchQAState, reason: str) -> Step[SearchQAState]:
        """End the episode from outside; scored like any truncation. The step has no turn of its own."""
        self._require_open(state)
        return self._end(state, reason)

    def render(self, state: SearchQAState) -> str:
        """The question, then every turn and what was shown for it."""
        parts = [state.task.question, *(part for turn in state.history for part in (turn.text, turn.observation))]
        return "\n".join(part.strip() for part in parts if part.strip())

    def reseed(self, state: SearchQAState, seed: int) -> SearchQAState:
        return replace(state, stream=RandomStream(seed))

    def encode_state(self, state: SearchQAState) -> dict[str, Any]:
        """The state as JSON-able data."""
        return {
            "task": state.task.to_json(),
            "stream": state.stream.to_json(),
            "history": [
                [turn.text, turn.action.kind, turn.action.argument, turn.observation, turn.kind]
                for turn in state.history
            ],
            "searches": state.searches,
            "length_cuts": state.length_cuts,
            "stop_reason": state.stop_reason,
            "calls": thaw(state.calls),
            "memory": thaw(state.memory),
        }

    def decode_state(self, data: Mapping[str, Any]) -> SearchQAState:
        """The inverse of :meth:`encode_state`; raises ``SnapshotError`` on anything else."""
        try:
            turns = [_turn(*cells) for cells in data["history"]]
            return SearchQAState(
                task=Question.from_json(data["task"]),
                stream=RandomStream.from_json(data["stream"]),
                history=History(turns),
                searches=_count(data["searches"]),
                length_cuts=_count(data["length_cuts"]),
                stop_reason=_text(data["stop_reason"]),
                calls=FrozenDict(data["calls"]),
                memory=FrozenDict(data["memory"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise SnapshotError(
                f"expected the state of a SearchQA episode, found something else ({type(error).__name__}: {error})"
            ) from error

    # -- inside ----------------------------------------------------------------------------------------------

    def _require_open(self, state: SearchQAState) -> None:
        if state.stop_reason:
            raise TurnTreeError(
                f"the episode of question {state.task.id!r} is over ({state.stop_reason}); go on from an earlier state"
            )

    def _cut(self, state: SearchQAState, text: str, parsed: ParsedTurn) -> Step[SearchQAState]:
        """A turn that ran into its length limit."""
        invalid = replace(parsed, action=Action("invalid", "cut_at_length"), span=None)
        last = state.turns + 1 >= self.limits.max_turns
        if self.limits.on_length == "end" or state.length_cuts or last:
            return self._end(state, "length", record=TurnRecord(text, invalid.action), parsed=invalid)
        counted = replace(state, length_cuts=state.length_cuts + 1)
        return self._correct(counted, text, invalid, reason="cut_at_length")

    def _correct(self, state: SearchQAState, text: str, parsed: ParsedTurn, *, reason: str) -> Step[SearchQAState]:
        """A turn that is not executed: the agent is told why and may go on."""
        invalid = replace(parsed, action=Action("invalid", reason))
        hint = f" {parsed.hint}" if parsed.hint and reason == parsed.action.argument else ""
        spoken = Observation(self.grammar.correction(reason), hint, "")
        observation = self._announced(spoken, turns=state.turns + 1, searches=state.searches)
        if hint and self._limit is not None:
            observation, _ = self._limit.cut(observation)
        record = TurnRecord(text, invalid.action, observation.text, "correction")
        after = replace(state, history=state.history.append(record))
        return Step(after, observation.text, info=FrozenDict(self._info(after, invalid)))

    def _only_answer(self, *, turns: int, searches: int) -> bool:
        """Whether the next turn can call nothing."""
        if len(self.tools) > 1:
            return turns + 1 >= self.limits.max_turns
        return self.limits.searches_left(turns=turns, searches=searches) <= 0

    def _announced(self, observation: Observation, *, turns: int, searches: int) -> Observation:
        """The observation, with the notice when the next turn can call nothing."""
        if not self._only_answer(turns=turns, searches=searches):
            return observation
        return replace(observation, tail=observation.tail + self.grammar.last_turn_notice())

    def _end(
        self,
        state: SearchQAState,
        reason: str,
        *,
        record: TurnRecord | None = None,
        parsed: ParsedTurn | None = None,
        answer: str | None = None,
    ) -> Step[SearchQAState]:
        """The last step of an episode: terminated with an answer or a planner's stop, truncated otherwise."""
        history = state.history if record is None else state.history.append(record)
        after = replace(state, history=history, stop_reason=reason)
        outcome = self._outcome(after, answer)
        info = self._info(after, parsed) | {
            "stop_reason": reason,
            "answer": answer,
            "format_valid": outcome.format_valid,
            "format_reason": outcome.format_reason,
        }
        info |= {"reward_pending": True} if self.deferred else {"em": outcome.em, "f1": outcome.f1}
        complete = answer is not None or reason == FINISH
        return Step(
            after,
            "",
            reward=0.0 if self.deferred else evaluate_reward(self.reward, outcome),
            terminated=complete,
            truncated=not complete,
            info=FrozenDict(info),
        )

    def _outcome(self, state: SearchQAState, answer: str | None) -> Outcome:
        turns = tuple(state.history)
        validity, notice = self.grammar.validity(turns), self.grammar.last_turn_notice()
        return Outcome(
            answer=answer,
            golden_answers=state.task.golden_answers,
            format_valid=validity.valid,
            format_reason=validity.reason,
            observations=tuple(turn.observation.removesuffix(notice) for turn in turns if turn.kind == "results"),
            tools_used=frozenset(name for name, count in self._counts(state).items() if count),
            turns=len(turns),
            stop_reason=state.stop_reason,
            normalizer=self.normalizer,
        )

    def _counts(self, state: SearchQAState) -> dict[str, int]:
        """Calls so far, by tool."""
        return {name: state.searches if name == "search" else state.calls.get(name, 0) for name in self.tools}

    def _info(self, state: SearchQAState, parsed: ParsedTurn | None) -> dict[str, Any]:
        info: dict[str, Any] = {"turns": state.turns, "searches": state.searches}
        if len(self.tools) > 1:
            info["tool_calls"] = self._counts(state)
        if parsed is None:
            return info | {"action": "none"}
        info |= {
            "action": parsed.action.kind,
            "overrun": "overrun" in parsed.notes,
            "other_dialect": parsed.other_dialect,
        }
        if parsed.action.kind == "invalid":
            info["invalid_reason"] = parsed.action.argument
        return info

    def _hash(self, search: SearchBackend) -> str:
        parts = {
            "core": "SearchQA/1",
            "limits": dataclasses.asdict(self.limits),
            "grammar": self.grammar.fingerprint,
            "reward": reward_name(self.reward),
            "normalizer": self.normalizer,
            "tokens": self._limit.fingerprint if self._limit else None,
            "search": search.fingerprint,
            "prompt": self.prompt.fingerprint if self.prompt else None,
            "tools": {name: tool_fingerprint(tool) for name, tool in self.tools.items() if name != "search"},
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _turn(text: Any, kind: Any, argument: Any, seen: Any, shown: Any) -> TurnRecord:
    """A turn as it is stored. Raises ``ValueError``."""
    if shown not in get_args(ObservationKind):
        raise ValueError(f"expected one of {get_args(ObservationKind)}, found {shown!r:.80}")
    return TurnRecord(_text(text), Action(_text(kind), _text(argument)), _text(seen), shown)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found {value!r:.80}")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"expected a count, found {value!r:.80}")
    return value


def _observation_limit(
    max_tokens: int | None, tokenizer: Tokenizer | None, grammar: Grammar, tools: Sequence[str]
) -> ObservationLimit | None:
    """The limit, checked to leave room for everything that is not a document."""
    if max_tokens is None:
        return None
    if tokenizer is None:
        raise ConfigError(
            "max_observation_tokens is set, but there is no tokenizer to count with; pass tokenizer= (the policy's)"
        )
    limit = ObservationLimit(max_tokens, tokenizer)
    notice = grammar.last_turn_notice()
    calls = getattr(grammar, "max_calls", 1)
    empty = "\n".join([grammar.results([]).text] * calls)
    what = "an empty result" if calls == 1 else f"{calls} empty results (max_calls of the grammar)"
    limit.require(empty + notice, what=f"{what} with the notice of the last turn")
    limit.require(grammar.correction("no_action") + notice, what="a correction with the notice of the last turn")
    for name in tools:
        frame = cast("ToolGrammar", grammar).tool_result(name, "x")
        limit.require(frame.head + frame.tail + notice, what=f"an empty result of {name} with the notice")
    return limit


def _made(calls: Sequence[ToolCall]) -> dict[str, Any]:
    """What a turn executed, for ``info``; of a single call the tool is the turn's action."""
    if len(calls) == 1:
        return {"argument": calls[0].argument}  # the text itself is shared: nothing but a reference a turn
    return {"calls": [{"tool": call.tool, "argument": call.argument} for call in calls]}
