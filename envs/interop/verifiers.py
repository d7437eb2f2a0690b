"""Tasks of ``verifiers`` 0.4 as tasks that branch.

What forks is the transcript and verifiers' ``State`` of the rollout, both as values: a fork costs nothing. Tools are
the methods of the task's toolsets, called in this process instead of through a server; what they change must be in
that ``State``. Scores are the task's own ``@reward`` and ``@metric`` functions and judges, over a ``Trace`` of the
transcript.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from turntree.envs.actions import ActionTags
from turntree.envs.agent_task import AgentTask, Rng
from turntree.envs.core import Action, Step
from turntree.envs.interop import library
from turntree.envs.snapshot import History
from turntree.envs.task import FrozenDict, thaw
from turntree.errors import ConfigError, ToolError

__all__ = ["Talk", "VerifiersTask"]

_ANSWER = "your last reply, which ends the task"


@dataclass(frozen=True, slots=True)
class Talk:
    """A rollout: which task, its messages after the prompt, and verifiers' own state."""

    index: int
    messages: History[FrozenDict]
    state: FrozenDict


class VerifiersTask(AgentTask[Talk]):
    """``taskset``: a verifiers ``Taskset``, or a sequence of its ``Task`` objects; an episode's task is an index.

    A turn writes a call as ``<tool_name>{"argument": value}</tool_name>``, its last reply as ``<answer>...</answer>``.
    ``toolsets``: objects to call instead of those that the task's class declares. ``most`` tasks of a taskset are read.

    Raises ``ConfigError`` for tasks that need a container, ``setup``, ``finalize`` or stop conditions, which belong to
    verifiers' own rollout, and for tools whose name cannot be a tag.
    """

    metric: ClassVar[str] = "reward"

    def __init__(
        self,
        taskset: Any,
        *,
        name: str = "",
        toolsets: Sequence[Any] | None = None,
        max_turns: int = 8,
        most: int = 1000,
    ) -> None:
        self._vf = library("verifiers.v1", install="verifiers==0.4.0")
        tasks: Iterable[Any] = taskset
        self._tasks = list(itertools.islice(tasks, most))
        if not self._tasks:
            raise ConfigError("expected a taskset with at least one task, found none")
        for hook in ("setup", "finalize"):
            _refuse(self._tasks[0], getattr(type(self._tasks[0]), hook) is not getattr(self._vf.Task, hook), hook)
        _refuse(self._tasks[0], self._tasks[0].NEEDS_CONTAINER, "a container")
        _refuse(self._tasks[0], bool(self._tasks[0].hooks("stop")), "stop conditions")
        own = type(self._tasks[0]).toolsets(self._tasks[0].config) if toolsets is None else toolsets
        self._tools = {tool: fn for toolset in own for tool, fn in _tools(toolset)}
        self._owners = {tool: toolset for toolset in own for tool, _ in _tools(toolset)}
        self._calls = threading.Lock()
        self._state_type = _state_type(self._vf, type(self._tasks[0]))
        self.name = name or type(taskset).__name__
        self.size = len(self._tasks)
        self.max_turns = max_turns
        self.grammar = ActionTags({**{tool: _describe(fn) for tool, fn in self._tools.items()}, "answer": _ANSWER})

    def initial_state(self, task: Any, rng: Rng) -> Talk:
        """The rollout before the first turn. Raises ``ConfigError`` for anything but an index of a task."""
        del rng
        if isinstance(task, bool) or not isinstance(task, int) or not 0 <= task < self.size:
            raise ConfigError(f"expected the index of one of {self.size} tasks, found {task!r:.100}")
        return Talk(task, History(), FrozenDict(self._state_type().model_dump(mode="json")))

    def prompt(self, state: Talk) -> str:
        data = self._tasks[state.index].data
        return "\n\n".join(part for part in (data.system_prompt, data.prompt_text) if part)

    def transition(self, state: Talk, action: Action, rng: Rng) -> Step[Talk]:
        """Call a tool, or end with a reply and be scored."""
        del rng
        if action.kind == "answer":
            after = _say(state, {"role": "assistant", "content": action.argument})
            trace = self._scored(after, stop="agent_completed")
            return Step(after, "", reward=trace.reward, terminated=True, info=FrozenDict(_scores(trace)))
        call = {"id": f"call_{len(state.messages)}", "name": action.kind, "arguments": action.argument}
        said = _say(state, {"role": "assistant", "content": None, "tool_calls": [call]})
        text, memory = self._call(action, state.state)
        shown = _say(said, {"role": "tool", "tool_call_id": call["id"], "content": text})
        return Step(replace(shown, state=memory), text)

    def truncated_reward(self, state: Talk) -> float:
        """What the task's own functions give for a rollout without a last reply."""
        return float(self._scored(state, stop="max_turns").reward)

    # -- verifiers -------------------------------------------------------------------------------------------

    def _call(self, action: Action, state: FrozenDict) -> tuple[str, FrozenDict]:
        """What a tool returned, and the state it left. What it raises the agent is told, as verifiers' servers do."""
        function, owner = self._tools[action.kind], self._owners[action.kind]
        try:
            arguments = json.loads(action.argument)
            bound = inspect.signature(function).bind(**arguments)
        except (ValueError, TypeError) as error:
            return f"Error: {error}", state
        with self._calls:  # a toolset has one state at a time
            owner._inert_state = owner._state_cls.model_validate(thaw(state))
            try:
                found = function(*bound.args, **bound.kwargs)
                text = str(_wait(found) if inspect.isawaitable(found) else found)
            except Exception as error:  # whatever the tool raises is its result
                return f"Error: {error}", state
            return text, FrozenDict(owner._inert_state.model_dump(mode="json"))

    def _scored(self, state: Talk, *, stop: str) -> Any:
        """A trace of the rollout with the task's scores. Raises ``ToolError`` when scoring fails: that is no reward."""
        vf, task = self._vf, self._tasks[state.index]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=_nodes(vf, task, state),
            state=self._state_type.model_validate(thaw(state.state)),
            stop_condition=stop,
            is_completed=True,
            ok=True,
        )
        try:
            _wait(task.score(trace))
        except Exception as error:  # anything a grader or judge raises
            raise ToolError(f"verifiers could not score task {state.index}: {type(error).__name__}: {error}") from error
        return trace


def _refuse(task: Any, needs: bool, what: str) -> None:
    if needs:
        raise ConfigError(f"{type(task).__name__} needs {what}, which only verifiers' own rollout has; run it there")


def _tools(toolset: Any) -> list[tuple[str, Any]]:
    """The tools of a toolset, by the name that verifiers' servers give them."""
    methods = [getattr(toolset, n) for n in dir(type(toolset)) if hasattr(getattr(type(toolset), n), "tool")]
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    return [(prefix + (getattr(method, "tool_name", None) or method.__name__), method) for method in methods]


def _describe(function: Any) -> str:
    """One line: what a tool does, and the JSON that it is given."""
    fields = ", ".join(f'"{name}": ...' for name in inspect.signature(function).parameters)
    return f"{' '.join((function.__doc__ or '').split())} Write JSON: {{{fields}}}".strip()


def _state_type(vf: Any, task: type) -> Any:
    """The ``State`` that a task's class declares."""
    generic = (origin for base in task.__mro__ for origin in getattr(base, "__orig_bases__", ()))
    found = (argument for origin in generic for argument in getattr(origin, "__args__", ()))
    return next((kind for kind in found if isinstance(kind, type) and issubclass(kind, vf.State)), vf.State)


def _say(state: Talk, message: dict[str, Any]) -> Talk:
    return replace(state, messages=state.messages.append(FrozenDict(message)))


def _nodes(vf: Any, task: Any, state: Talk) -> list[Any]:
    """The transcript as verifiers' graph: a chain."""
    prompt = [{"role": "user", "content": task.data.prompt_text}]
    if task.data.system_prompt:
        prompt.insert(0, {"role": "system", "content": task.data.system_prompt})
    messages = [*prompt, *map(thaw, state.messages)]
    rows = [
        {"parent": i - 1 if i else None, "message": message, "sampled": message["role"] == "assistant"}
        for i, message in enumerate(messages)
    ]
    return [vf.MessageNode.model_validate(row) for row in rows]


def _scores(trace: Any) -> dict[str, Any]:
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return {"rewards": rewards, "metrics": {k: v for k, v in trace.metrics.items() if v is not None}}


def _wait(awaitable: Any) -> Any:
    """The result of a coroutine, whether or not the caller is in an event loop."""

    async def result() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(result())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, result()).result()
