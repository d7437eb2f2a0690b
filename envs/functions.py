"""Plain typed functions as tools: name, description and JSON schema come from the signature and the docstring.

    @tool(effects="none")
    def convert(amount: float, currency: Literal["EUR", "USD"] = "EUR") -> float:
        \"""Converts an amount to yuan.\"""

What the model gets wrong (arguments of another type, an exception that the function raises) is a text. What lies
outside the episode (a time limit, a connection, an operating system error) is a :class:`ToolFailure`, never a reward.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
import threading
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, get_args

from turntree.envs.core import Effects, ToolCall, ToolFailure, ToolResult, ToolSpec
from turntree.envs.loading import reject_unknown
from turntree.envs.schemas import check_schema, decode_arguments
from turntree.envs.task import FrozenDict
from turntree.envs.worker import Worker
from turntree.errors import ConfigError, ToolError

__all__ = ["FunctionTool", "tool"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Errors of the file system that a function may well be asked for by the model.
_FILES = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_ARGS_SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\s*$(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARG_LINE = re.compile(r"^\s+(\w+)(?:\s*\([^)]*\))?:\s*(.+?)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class FunctionTool(Generic[P, R]):
    """A function as a :class:`turntree.envs.TextTool`; it can still be called as the function that it is.

    ``effects``: what a call leaves behind. A function that does not say is taken for ``external``: the tree never
    branches after a call of it, which is always right and seldom needed; a warning says so. With ``in_state`` the
    function takes a keyword ``memory`` (what its last call of the episode left, None before) and returns
    ``ToolResult(value, memory=...)``.

    ``timeout_s``: limit of a call. A function that runs past it is a failure; in this process it cannot be stopped and
    goes on in its thread. ``process=True`` runs it in another process, which is killed at the limit: for code that
    computes or never ends. The function must then be importable by name.

    ``concurrency``: calls of a batch that run at the same time; above 1 the function must be safe for threads.
    ``idempotent``: whether a call that failed may be made again (None: all but ``external`` ones may).

    Raises ``ConfigError`` for a function without types or description, or with ``*args``; see :func:`tool`.
    """

    function: Callable[P, R]
    effects: Effects = "external"
    timeout_s: float | None = 30.0
    process: bool = False
    concurrency: int = 1
    idempotent: bool | None = None
    name: str = ""
    description: str = ""
    schema: FrozenDict = field(init=False)

    def __post_init__(self) -> None:
        what = f"the tool function {_called(self.function)}"
        reject_unknown([self.effects], get_args(Effects), what=f"effects of {what}")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"{what}: expected a timeout_s above 0, or None, found {self.timeout_s}")
        if self.concurrency < 1:
            raise ConfigError(f"{what}: expected concurrency of at least 1, found {self.concurrency}")
        schema = _schema(self.function, takes_memory=self.effects == "in_state", what=what)
        described = self.description or (inspect.getdoc(self.function) or "").strip().partition("\n")[0].strip()
        if not described:
            raise ConfigError(f"{what}: expected a docstring whose first line tells the model what the tool does")
        settled = {
            "name": self.name or self.function.__name__,
            "description": described,
            "schema": schema,
        }
        for key, value in settled.items():
            object.__setattr__(self, key, value)
        if self.process:
            object.__setattr__(self, "_worker", Worker.of(self.function))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def fingerprint(self) -> str:
        """Changes with the function's source, as far as it can be read, and with the schema."""
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            source = ""
        return f"{_called(self.function)}/{self.schema!r}/{source}"

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """One outcome a call, in order."""
        if self.concurrency == 1 or len(calls) == 1:
            return [self._answer(call) for call in calls]
        with ThreadPoolExecutor(min(self.concurrency, len(calls))) as pool:
            return list(pool.map(self._answer, calls))

    def _answer(self, call: ToolCall) -> ToolResult | ToolFailure:
        try:
            given = decode_arguments(ToolSpec(self.name, self.description, self.schema), call.argument)
        except ValueError as error:
            return ToolResult(f"error: {error}", memory=call.memory)
        arguments, wrong = _validated(self.function, given, takes_memory=self.effects == "in_state")
        if wrong:
            return ToolResult(f"error: {wrong}", memory=call.memory)
        if self.process:
            return self._in_process(given, call)
        if self.effects == "in_state":
            arguments["memory"] = call.memory
        outcome = _limited(functools.partial(_outcome, self.function, arguments), self.timeout_s)
        return self._settled(outcome, call)

    def _in_process(self, given: dict[str, Any], call: ToolCall) -> ToolResult | ToolFailure:
        """The same in the other process, which validates the arguments again, for they may be objects."""
        worker: Worker = typing.cast("Any", self)._worker
        memory = {"memory": call.memory} if self.effects == "in_state" else {}
        return self._settled(worker.ask({"arguments": given, **memory}, self.timeout_s), call)

    def _settled(self, outcome: ToolResult | ToolFailure, call: ToolCall) -> ToolResult | ToolFailure:
        """``outcome`` with the memory that the next call is given: what a function that raised had before."""
        if isinstance(outcome, ToolFailure) or self.effects != "in_state":
            return outcome
        kept = call.memory if outcome.memory is None else outcome.memory
        return ToolResult(outcome.value, memory=kept)


@typing.overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...


@typing.overload
def tool(
    *,
    effects: Effects | None = None,
    timeout_s: float | None = 30.0,
    process: bool = False,
    concurrency: int = 1,
    idempotent: bool | None = None,
    name: str = "",
    description: str = "",
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...


def tool(function: Any = None, /, *, effects: Effects | None = None, **options: Any) -> Any:
    """Make a plain typed function a tool, as a decorator or by a call; the options are those of :class:`FunctionTool`.

    Arguments are checked by pydantic against the annotations: simple types, ``Literal``, ``Optional``, lists, dicts,
    data classes, ``TypedDict``, models. The docstring's first line is the description; a section ``Args:`` or
    ``Annotated[..., "text"]`` describes arguments. A result that is no text is written as JSON.
    """
    if function is None:
        return functools.partial(tool, effects=effects, **options)
    if effects is None:
        logger.warning(
            "the tool %s does not say what its calls leave behind, so it counts as effects='external' and no tree "
            "branches after a call of it; declare effects='none' (or 'in_state') if that is so",
            _called(function),
        )
    return FunctionTool(function, effects or "external", **options)


# -- calling -----------------------------------------------------------------------------------------------------------


def answer(function: Callable[..., Any], given: dict[str, Any], memory: dict[str, Any]) -> ToolResult | ToolFailure:
    """Validate and call: what the other process does. ``memory`` is empty or holds the keyword of that name."""
    arguments, wrong = _validated(function, given, takes_memory=bool(memory))
    return ToolResult(f"error: {wrong}") if wrong else _outcome(function, {**arguments, **memory})


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> ToolResult | ToolFailure:
    """The call's result as a text, its own errors too; failures of the world as failures."""
    try:
        value = function(**arguments)
    except _FILES as error:
        return ToolResult(_told(error))
    except (ToolError, OSError, MemoryError) as error:
        return ToolFailure(type(error).__name__, str(error) or type(error).__name__)
    except (Exception, SystemExit) as error:
        return ToolResult(_told(error))
    memory = None
    if isinstance(value, ToolResult):
        value, memory = value.value, value.memory
    return ToolResult(_text(value, function), memory=memory)


def _told(error: BaseException) -> str:
    message = " ".join(str(error).split())
    return f"error: {type(error).__name__}: {message}" if message else f"error: {type(error).__name__}"


def _text(value: Any, function: Callable[..., Any]) -> str:
    from pydantic import ConfigDict, TypeAdapter

    if value is None or isinstance(value, str):
        return value or ""
    try:
        return TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings")).dump_json(value).decode()
    except ValueError as error:
        raise TypeError(
            f"the tool function {_called(function)} returned {value!r:.100}, which is neither a text nor JSON: {error}"
        ) from error


def _limited(call: Callable[[], ToolResult | ToolFailure], timeout_s: float | None) -> ToolResult | ToolFailure:
    """The outcome, or a failure at the time limit; the thread cannot be stopped and ends when the function does."""
    if timeout_s is None:
        return call()
    found: list[ToolResult | ToolFailure] = []
    bugs: list[BaseException] = []

    def work() -> None:
        try:
            found.append(call())
        except BaseException as error:
            bugs.append(error)

    thread = threading.Thread(target=work, daemon=True, name="turntree-tool")
    thread.start()
    thread.join(timeout_s)
    if bugs:
        raise bugs[0]
    return found[0] if found else ToolFailure("timeout", f"no result within {timeout_s:g} s")


# -- signatures --------------------------------------------------------------------------------------------------------


def _called(function: Any) -> str:
    return f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"


def _parameters(function: Any, *, takes_memory: bool, what: str) -> dict[str, tuple[Any, Any]]:
    """Annotation and default of each argument that the model gives."""
    if not inspect.isroutine(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"{what}: expected a plain function (not async, no class), found {function!r:.100}")
    signature, hints = inspect.signature(function), _hints(function, what)
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{what}: the argument {name!r} cannot be given by name; write plain arguments")
        if name == "memory" and takes_memory:
            continue
        if name not in hints:
            raise ConfigError(f"{what}: the argument {name!r} has no type; annotate it, the model is told the types")
        found[name] = (hints[name], parameter.default)
    if takes_memory and "memory" not in signature.parameters:
        raise ConfigError(f"{what}: with effects='in_state' it must take memory and return a ToolResult that has it")
    return found


def _hints(function: Any, what: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are code: a name that does not exist, a module that is missing
        raise ConfigError(f"{what}: its annotations cannot be read: {error}") from error


def _told_arguments(function: Any) -> dict[str, str]:
    """What a Google-style docstring says of each argument."""
    section = _ARGS_SECTION.search(inspect.getdoc(function) or "")
    return dict(_ARG_LINE.findall(section[1])) if section else {}


@functools.lru_cache(maxsize=256)
def _model(function: Any, takes_memory: bool) -> Any:
    """A pydantic model of the arguments. Fields have names of their own, for arguments may be called ``json``."""
    from pydantic import ConfigDict, Field, create_model

    told = _told_arguments(function)
    fields: dict[str, Any] = {}
    parameters = _parameters(function, takes_memory=takes_memory, what=f"the tool function {_called(function)}")
    for i, (name, (hint, default)) in enumerate(parameters.items()):
        text = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, str)), told.get(name))
        given = ... if default is inspect.Parameter.empty else default
        fields[f"field_{i}"] = (hint, Field(given, alias=name, description=text))
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)


def _schema(function: Any, *, takes_memory: bool, what: str) -> FrozenDict:
    try:
        schema = _model(function, takes_memory).model_json_schema(by_alias=True)
    except ConfigError:
        raise
    except Exception as error:  # pydantic raises several kinds for types that JSON cannot hold
        raise ConfigError(f"{what}: its types have no JSON schema: {type(error).__name__}: {error}") from error
    return check_schema(_without_titles(schema), what=what)


def _without_titles(schema: Any) -> Any:
    """The schema without pydantic's titles, which repeat the names; a property may be called ``title``."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _without_titles(value) for key, value in kept.items()}


def _validated(function: Any, given: dict[str, Any], *, takes_memory: bool) -> tuple[dict[str, Any], str]:
    """The arguments as the annotations want them, or what is wrong with them. Those not given are left out."""
    from pydantic import ValidationError

    model = _model(function, takes_memory)
    try:
        made = model.model_validate(given)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        return {}, "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults[:5])
    return {model.model_fields[key].alias: getattr(made, key) for key in made.model_fields_set}, ""
