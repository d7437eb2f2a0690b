"""The pure core of a turn environment: values in, values out, with a seam for batching tool calls.

A core never mutates anything. ``act`` reads one model turn and gives either the finished :class:`Step` or a
:class:`Pending` list of tool calls; whoever drives the core (``TurnEnv.step``, a vector environment, a tree
rollout) executes the calls, batched over many episodes if it likes, and hands the results to ``resolve``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from turntree.envs.task import EMPTY, FrozenDict
from turntree.errors import ConfigError

__all__ = [
    "Action",
    "Effects",
    "Finish",
    "Pending",
    "Step",
    "TextTool",
    "Tool",
    "ToolCall",
    "ToolFailure",
    "ToolResult",
    "ToolSpec",
    "TurnCore",
]

S = TypeVar("S")

Effects = Literal["none", "in_state", "external"]
"""What a tool call leaves behind: nothing, something inside the episode's state, or something outside of it."""

Finish = Literal["stop", "length"]
"""How a turn ended: by itself (stop string or end-of-text), or cut at its length limit."""


@dataclass(frozen=True, slots=True)
class Action:
    """What a turn asks for. ``kind`` is ``search``, ``answer``, the name of another tool, or ``invalid``.

    For ``invalid`` the argument is a short reason code (``no_action``, ``empty_query``, ``inside_think``, ...).
    """

    kind: str
    argument: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of one tool, as data.

    ``memory`` is what the tool's last call in this episode left (None before the first), for tools whose effects are
    ``in_state``.
    """

    tool: str
    argument: str
    memory: Any = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returned, as JSON-able data (a search: a tuple of :class:`Passage`; a :class:`TextTool`: a text).

    ``memory``: what the tool's next call in this episode is given, JSON-able, for tools whose effects are
    ``in_state``. It is part of the episode's state, so forks and siblings never see each other's.
    """

    value: Any
    memory: Any = None


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """A call that could not be executed for reasons outside the episode (timeout, refused, bad JSON)."""

    kind: str
    message: str


class Tool(Protocol):
    """A batched tool; its name is the one that a core knows it by.

    What the model did wrong (code that raises, an expression that cannot be read) is a result. What lies outside the
    episode (timeout, refused, bad JSON) is a :class:`ToolFailure`, or an ``OSError`` or ``ToolError`` for the whole
    batch: it is retried, and never becomes a text or a reward. Any other exception is a bug and stops the run.
    """

    @property
    def effects(self) -> Effects: ...

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """Execute the calls; one outcome each, in the same order."""
        ...


class TextTool(Tool, Protocol):
    """A tool that a turn calls by its name: the argument is a text, each result a text.

    Optional attributes: ``fingerprint`` must change with everything that changes results. ``schema`` is the JSON schema
    of an object of arguments; the argument of a call is then such an object as JSON text (the text itself where the
    schema knows one string only). ``idempotent`` says whether a call that failed may be made again; without it, all
    but ``external`` ones may.
    """

    @property
    def description(self) -> str:
        """One line on what the tool does and what to write between its tags, for the prompt."""
        ...


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A text tool as a grammar sees it: the name that turns call it by, its description, the schema of its arguments.

    ``schema``: JSON schema of an object, or None for a tool that takes one text; see :mod:`turntree.envs.schemas`.
    """

    name: str
    description: str
    schema: FrozenDict | None = None


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """The outcome of one turn.

    ``info`` holds plain JSON-able data. Keys that the library reads: ``action`` (kind), ``stop_reason`` (once done:
    ``answer``, ``turns``, ``length``, ``context``), ``invalid_reason``, ``retrieved`` (tuple of ``{"id","title"}``),
    ``observation_truncated``, ``format_valid``, ``success``, ``em``, ``f1``.
    """

    state: S
    observation: str
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: FrozenDict = EMPTY

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class Pending(Generic[S]):
    """A turn that waits for tools. ``text`` is the turn as it was parsed; ``calls`` are in call order.

    ``reading``: all that ``act`` read in the text, for ``resolve`` of the same core; None where that reads it again.
    """

    text: str
    action: Action
    calls: tuple[ToolCall, ...]
    reading: Any = field(default=None, compare=False, repr=False)


class TurnCore(ABC, Generic[S]):
    """The rules of a task as pure functions of an immutable state.

    Subclasses implement ``initial`` and either ``transition`` (no tools) or ``act`` and ``resolve``.
    """

    #: Tools by name; empty for a task without tools.
    tools: Mapping[str, Tool] = {}
    #: The number that runs are judged by: ``reward``, ``success``, ``em``, or another number in the last turn's info.
    metric: str = "reward"

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn besides the end of the text; they belong to it."""
        return ()

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A short stable hash of everything that changes the meaning of a state (limits, grammar, corpus, ...)."""

    @abstractmethod
    def initial(self, task: Any, *, seed: int) -> tuple[S, str]:
        """The first state of an episode and its first observation (the prompt's text)."""

    def transition(self, state: S, text: str) -> Step[S]:
        """One whole turn of a task without tools."""
        raise NotImplementedError(f"{type(self).__name__} must implement transition(), or act() and resolve()")

    def act(self, state: S, text: str, *, finish: Finish = "stop") -> Step[S] | Pending[S]:
        """Read one model turn. ``finish="length"``: the text was cut at the turn's length limit."""
        del finish
        return self.transition(state, text)

    def resolve(self, state: S, pending: Pending[S], results: Sequence[ToolResult]) -> Step[S]:
        """Finish a turn with the results of its calls, in call order. ``state`` is the one given to ``act``."""
        raise NotImplementedError(f"{type(self).__name__} returned Pending but does not implement resolve()")

    @abstractmethod
    def truncate(self, state: S, reason: str) -> Step[S]:
        """End the episode from outside (``reason="context"``: no room for another turn). Scored like any truncation."""

    def limited(self, max_observation_tokens: int, tokenizer: Any) -> TurnCore[S]:
        """The same rules with observations cut to so many tokens. Raises ``ConfigError`` where they cannot be."""
        del max_observation_tokens, tokenizer
        raise ConfigError(f"{type(self).__name__} has no limit in tokens for its observations; set none")

    def render(self, state: S) -> str:
        """The episode so far as a text for people: prompt, turns and observations; empty where a core cannot say."""
        del state
        return ""

    @abstractmethod
    def reseed(self, state: S, seed: int) -> S:
        """The same state with its random stream re-derived from ``seed`` (siblings of a tree get different ones)."""

    @abstractmethod
    def encode_state(self, state: S) -> dict[str, Any]:
        """The state as JSON-able data."""

    @abstractmethod
    def decode_state(self, data: Mapping[str, Any]) -> S:
        """The inverse of :meth:`encode_state`; raises ``SnapshotError`` on anything else."""
