"""Tools: the search, those that a user names, and the one function that executes calls.

A tool of a user's own is a :class:`TextTool`, a plain typed function, or a tool of an MCP server; :func:`load_tools`
takes all of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from turntree.envs.core import Effects, TextTool, Tool, ToolCall, ToolFailure, ToolResult, ToolSpec
from turntree.envs.functions import FunctionTool
from turntree.envs.functions import tool as tool_function
from turntree.envs.loading import check_arguments, construct, import_object
from turntree.envs.schemas import check_schema
from turntree.envs.task import freeze, thaw
from turntree.errors import ConfigError, ToolError
from turntree.search_backend.passage import Passage, SearchBackend

__all__ = [
    "CallCounter",
    "SearchTool",
    "check_tool",
    "execute",
    "load_tools",
    "repeatable",
    "tool_fingerprint",
    "tool_spec",
]

_Outcome = ToolResult | ToolFailure

_FUNCTION_OPTIONS = ("effects", "timeout_s", "process", "concurrency", "idempotent")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("think", "search", "information", "answer", "invalid", "none")


@dataclass
class CallCounter:
    """Exact counts over one or more :func:`execute` runs, by tool name.

    ``calls``: calls answered or given up; ``attempts``: executions sent to the tool, retries included;
    ``shared``: calls answered by an identical call of the same batch; ``failures``: calls that failed for good.
    """

    calls: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def add(self, table: str, tool: str, count: int) -> None:
        counts: dict[str, int] = getattr(self, table)
        counts[tool] = counts.get(tool, 0) + count


@dataclass(frozen=True)
class SearchTool:
    """A search backend as a tool. A call's argument is the query, its result a tuple of up to ``k`` passages."""

    backend: SearchBackend
    k: int = 3
    effects: Effects = "none"

    @property
    def in_flight(self) -> int:
        """Batches that may be searched at the same time, from several threads, as the backend declares; else 0."""
        return int(getattr(self.backend, "in_flight", 0))

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """One batched search. Raises ``RetrievalError`` when the backend fails or breaks its contract."""
        found = self.backend.search([call.argument for call in calls], k=self.k)
        return [_result(passages, self.k) for passages in found]


def _result(passages: object, k: int) -> _Outcome:
    if not isinstance(passages, (list, tuple)) or not all(isinstance(p, Passage) for p in passages):
        return ToolFailure("bad_result", f"expected a list of passages for each query, found {passages!r:.200}")
    return ToolResult(tuple(passages[:k]))


def execute(
    tools: Mapping[str, Tool],
    calls: Sequence[ToolCall],
    *,
    retries: int = 2,
    backoff_s: float = 0.5,
    counter: CallCounter | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[_Outcome]:
    """Execute ``calls``, batched by tool; one outcome each, in the same order.

    A failed call is tried again up to ``retries`` times, after ``backoff_s``, then twice as long, and so on; calls
    that succeeded are never sent again, nor are those of a tool that is not :func:`repeatable`. Identical calls of a
    tool without effects are sent once and share the result. What is still failing then comes back as a
    :class:`ToolFailure`. Raises ``ToolError`` for a tool that does not exist or answers with the wrong number of
    outcomes.
    """
    counter = counter if counter is not None else CallCounter()
    outcomes: dict[int, _Outcome] = {}
    for name in dict.fromkeys(call.tool for call in calls):
        places = [i for i, call in enumerate(calls) if call.tool == name]
        mine = [calls[i] for i in places]
        answers = _execute_one(
            name, _find(tools, name), mine, retries=retries, backoff_s=backoff_s, counter=counter, sleep=sleep
        )
        outcomes.update(zip(places, answers, strict=True))
    return [outcomes[i] for i in range(len(calls))]


def _find(tools: Mapping[str, Tool], name: str) -> Tool:
    if name not in tools:
        raise ToolError(f"a turn calls the tool {name!r}, but the core has {sorted(tools)}; add it to core.tools")
    return tools[name]


def _execute_one(
    name: str,
    tool: Tool,
    calls: Sequence[ToolCall],
    *,
    retries: int,
    backoff_s: float,
    counter: CallCounter,
    sleep: Callable[[float], None],
) -> list[_Outcome]:
    """All calls of one tool, duplicates shared where nothing can depend on how often they are made."""
    unique = list(dict.fromkeys(calls)) if tool.effects == "none" else list(calls)
    answers: list[_Outcome] = [ToolFailure("not_run", "the call was not executed")] * len(unique)
    waiting = list(range(len(unique)))
    for attempt in range(retries + 1 if repeatable(tool) else 1):
        if attempt:
            sleep(backoff_s * 2 ** (attempt - 1))
        counter.add("attempts", name, len(waiting))
        for index, outcome in zip(waiting, _attempt(name, tool, [unique[i] for i in waiting]), strict=True):
            answers[index] = outcome
        waiting = [i for i in waiting if isinstance(answers[i], ToolFailure)]
        if not waiting:
            break
    if tool.effects == "none":
        places = {call: i for i, call in enumerate(unique)}
        answers = [answers[places[call]] for call in calls]
    counter.add("calls", name, len(calls))
    counter.add("shared", name, len(calls) - len(unique))
    counter.add("failures", name, sum(isinstance(a, ToolFailure) for a in answers))
    return answers


def _attempt(name: str, tool: Tool, calls: Sequence[ToolCall]) -> list[_Outcome]:
    """One batch. Infrastructure errors become failures of every call of the batch; bugs are raised."""
    try:
        outcomes: Any = tool.run(calls)
    except (ToolError, OSError, TimeoutError) as error:
        return [ToolFailure(type(error).__name__, str(error))] * len(calls)
    if not isinstance(outcomes, Sequence) or not all(isinstance(o, (ToolResult, ToolFailure)) for o in outcomes):
        raise ToolError(
            f"the tool {name!r} must answer with ToolResult or ToolFailure objects, found {outcomes!r:.200}"
        )
    if len(outcomes) != len(calls):
        raise ToolError(
            f"the tool {name!r} answered {len(outcomes)} outcomes to {len(calls)} calls; it must give exactly one "
            "for each call, in the same order"
        )
    return list(outcomes)


def repeatable(tool: Tool) -> bool:
    """Whether a call that failed may be made again: as ``idempotent`` says; else unless its effects are external."""
    told: bool | None = getattr(tool, "idempotent", None)
    return tool.effects != "external" if told is None else told


# -- tools of a user's own -----------------------------------------------------------------------------------


def tool_spec(name: str, tool: Any, *, what: str = "") -> ToolSpec:
    """What a grammar must know of ``tool``, after its shape was checked (it is not called).

    Raises ``ConfigError`` for a name that cannot be a tag, and for an object without ``run(calls)``, a known word in
    ``effects`` and one line of ``description``. ``what`` names the option that it was given by.
    """
    what = what or f"tool {name!r}"
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(
            f"{what}: expected a name of small letters, digits and underscores other than {', '.join(_TAKEN)}, found "
            f"{name!r}; the model calls the tool by this tag"
        )
    lacks = [part for part in ("run", "effects", "description") if not hasattr(tool, part)]
    if lacks or inspect.isclass(tool):
        kind = f"the class {tool.__qualname__}" if inspect.isclass(tool) else f"{tool!r:.100}"
        raise ConfigError(
            f"{what}: expected an object with run(calls), effects and description, found {kind}"
            + (f" without {', '.join(lacks)}" if lacks else "; give an instance")
        )
    if tool.effects not in get_args(Effects):
        words = ", ".join(map(repr, get_args(Effects)))
        raise ConfigError(f"{what}: expected effects to be one of {words}, found {tool.effects!r}")
    if not isinstance(tool.description, str) or len(tool.description.strip().splitlines()) != 1:
        raise ConfigError(f"{what}: expected one line of text as description, found {tool.description!r:.100}")
    try:
        inspect.signature(tool.run).bind([])
    except TypeError as error:
        raise ConfigError(f"{what}: expected run() to take one batch of calls: {error}") from None
    schema = getattr(tool, "schema", None)
    if schema is None:
        return ToolSpec(name, tool.description.strip())
    return ToolSpec(name, tool.description.strip(), check_schema(schema, what=f"{what}: schema"))


def load_tools(tools: Mapping[str, Any], *, what: str = "tools") -> dict[str, TextTool]:
    """Tools by name. Each is one of these, by itself or as ``{"path": import path, ...}``:

    - an object with ``run``, ``effects`` and ``description``;
    - a class or a factory of such objects, which is called with ``args``;
    - a plain typed function (:func:`turntree.envs.functions.tool`), which takes its options beside the path:
      ``effects``, ``timeout_s``, ``process``, ``concurrency``, ``idempotent``.

    ``{"mcp": {...}}`` is a server of which each tool is one here; the options are those of
    :func:`turntree.envs.mcp.mcp_tools`. Raises ``ConfigError`` with the option (``what`` and the name) for everything
    that is no tool, and for two tools of one name.
    """
    loaded: dict[str, TextTool] = {}
    for name, value in tools.items():
        option = f"{what}.{name}"
        found = _load_server(value, what=option) if _is_server(value) else {name: _load_tool(name, value, what=option)}
        for each, tool in found.items():
            if each in loaded:
                raise ConfigError(f"{option}: there is a tool {each!r} already; an mcp server's can be renamed: rename")
            loaded[each] = tool
    return loaded


def _is_server(value: Any) -> bool:
    return isinstance(value, Mapping) and "mcp" in value


def _load_server(value: Mapping[str, Any], *, what: str) -> dict[str, TextTool]:
    from turntree.envs.mcp import mcp_tools

    options = value["mcp"]
    if not isinstance(options, Mapping) or set(value) != {"mcp"}:
        raise ConfigError(f"{what}: expected mcp with its options (command or url, ...), found {dict(value)!r:.200}")
    check_arguments(mcp_tools, options, what=f"{what}.mcp")
    found: dict[str, TextTool] = construct(mcp_tools, options, what=f"{what}.mcp")
    for name, tool in found.items():
        tool_spec(name, tool, what=f"{what}.mcp: {name}")
    return found


def _load_tool(name: str, value: Any, *, what: str) -> TextTool:
    tool: Any = value
    path: Any = value if isinstance(value, str) else ""
    options: dict[str, Any] = {}
    if isinstance(value, Mapping):
        options = dict(value)
        path, arguments = options.pop("path", ""), options.get("args") or {}
        known = {"args", *_FUNCTION_OPTIONS}
        if not isinstance(path, str) or not path or not isinstance(arguments, Mapping) or set(options) - known:
            raise ConfigError(f"{what}: expected an import path, or path and args, found {dict(value)!r:.200}")
    if path:
        tool = import_object(path, what=what)
        what = f"{what}={path}"
        tool = _made(tool, options.pop("args", None) or {}, what=what)
    if inspect.isroutine(tool) or options:
        tool = _function(tool, options, what=what)
    tool_spec(name, tool, what=what)
    loaded: TextTool = tool
    return loaded


def _made(found: Any, arguments: Mapping[str, Any], *, what: str) -> Any:
    """What is at an import path, or what the class or factory there makes with ``arguments``."""
    if _is_factory(found, arguments):
        check_arguments(found, arguments, what=what)
        return construct(found, arguments, what=what)
    if arguments:
        raise ConfigError(f"{what}: expected a class or a factory for args={dict(arguments)}, found {found!r:.100}")
    return found


def _function(found: Any, options: Mapping[str, Any], *, what: str) -> Any:
    """A plain function as a tool with its options."""
    if not inspect.isroutine(found) and not isinstance(found, FunctionTool):
        raise ConfigError(f"{what}: {', '.join(options)} are for plain functions; this tool declares them itself")
    try:
        if isinstance(found, FunctionTool):
            return dataclasses.replace(found, **options)
        return tool_function(found, **options)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def _is_factory(found: Any, arguments: Mapping[str, Any]) -> bool:
    """A class, or a function for which ``arguments`` are enough: one that needs more is a tool by itself."""
    if inspect.isclass(found):
        return True
    if not inspect.isroutine(found):
        return not callable(found) and not hasattr(found, "run")  # refused with the reason by whoever calls it
    try:
        inspect.signature(found).bind(**arguments)
    except (TypeError, ValueError):
        return False
    return True


def tool_fingerprint(tool: Any) -> str:
    """The tool's own ``fingerprint``, else the name of its class; beside its description and effects."""
    own = getattr(tool, "fingerprint", f"{type(tool).__module__}:{type(tool).__qualname__}")
    return f"{own}/{tool.effects}/{tool.description}"


def check_tool(tool: TextTool, *arguments: str) -> list[str]:
    """Call a tool and check what a rollout relies on; the texts that it returned. Made for the tests of a tool.

    One outcome for each call, in order; texts as results; the same calls give the same results (unless ``effects`` is
    ``external``); what an ``in_state`` tool remembers is JSON-able, and other tools remember nothing.

    Raises ``ToolError`` with the law that is broken, and for a call that fails.
    """
    tool_spec("tool", tool)
    calls = [ToolCall("tool", argument) for argument in arguments]
    results = [_require_text(outcome) for outcome in _attempt("tool", tool, calls)]
    if tool.effects != "external" and results != _attempt("tool", tool, calls):
        raise ToolError("the same calls gave other results the second time; declare effects='external'")
    for result in results:
        if tool.effects != "in_state" and result.memory is not None:
            raise ToolError(f"a tool that remembers must declare effects='in_state', found {tool.effects!r}")
        try:
            restored = freeze(json.loads(json.dumps(thaw(result.memory))))
        except (TypeError, ValueError) as error:
            raise ToolError(f"expected JSON-able memory, found {result.memory!r:.100}: {error}") from error
        if restored != freeze(result.memory):
            raise ToolError(f"memory must survive JSON: {result.memory!r:.100} became {restored!r:.100}")
    return [result.value for result in results]


def _require_text(outcome: _Outcome) -> ToolResult:
    if isinstance(outcome, ToolFailure) or not isinstance(outcome.value, str):
        raise ToolError(f"expected a text as the result of a call, found {outcome!r:.200}")
    return outcome
