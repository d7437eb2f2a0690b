"""Tools of a Model Context Protocol server, started by a command (stdio) or reached at a URL (streamable HTTP).

Nothing but the command or URL is contacted, and no proxy is used for this machine. A server is connected once and
again when the connection is lost; calls of a batch run at the same time, each within its limit. What a tool says,
errors of its own too, is a text; a lost connection, a timeout or a broken reply is a :class:`ToolFailure`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO, get_args
from urllib.parse import urlsplit, urlunsplit

from turntree.envs.core import Effects, TextTool, ToolCall, ToolFailure, ToolResult, ToolSpec
from turntree.envs.loading import reject_unknown
from turntree.envs.schemas import check_schema, decode_arguments
from turntree.envs.task import FrozenDict
from turntree.errors import ConfigError, ToolError
from turntree.http import secret_from

__all__ = ["McpServer", "McpTool", "mcp_tools"]

_AT_ONCE = 16
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# JSON-RPC codes that say that the model called a tool in a wrong way, not that the server is ill.
_ASKED_WRONGLY = (-32602, -32601)


@dataclass
class McpServer:
    """One server with its connection, which is opened by the first use and never part of a copy or pickle.

    ``command``: program and arguments; ``env``: variables that it is given beside ``PATH`` and a few others of that
    kind; ``pass_env``: names of variables of this process that it is given too (a key); ``cwd``: where it runs. Or
    ``url`` with ``headers``; ``header_env``: further headers by the name of the environment variable that holds the
    value (a key). ``timeout_s``: limit of a call; ``start_timeout_s``: of connecting. Variables are read when the
    connection is made, and are in no field.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 30.0
    start_timeout_s: float = 30.0
    pass_env: tuple[str, ...] = ()
    header_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_package()
        if bool(self.command) == bool(self.url):
            raise ConfigError(f"expected command (a list of words) or url, found {'both' if self.url else 'neither'}")
        if self.url and urlsplit(self.url).scheme not in ("http", "https"):
            raise ConfigError(f"expected url to begin with http:// or https://, found {self.url!r}")
        if not 0 < self.timeout_s < float("inf") or not 0 < self.start_timeout_s < float("inf"):
            raise ConfigError(f"expected limits above 0 s, found {self.timeout_s} and {self.start_timeout_s}")
        if (self.pass_env and self.url) or (self.header_env and self.command):
            raise ConfigError("pass_env goes with command, header_env with url")
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def secret_headers(self) -> dict[str, str]:
        """Those of ``header_env``, read now. Raises ``ConfigError`` for a variable that is not set."""
        return {h: secret_from(v, what=f"the header {h} of {self.name}") for h, v in self.header_env.items()}

    def secret_env(self) -> dict[str, str]:
        """Those of ``pass_env``, read now. Raises ``ConfigError`` for a variable that is not set."""
        missing = [name for name in self.pass_env if name not in os.environ]
        if missing:
            raise ConfigError(
                f"the environment variable {missing[0]} is not set; expected it, since pass_env hands it to {self.name}"
            )
        return {name: os.environ[name] for name in self.pass_env}

    @property
    def name(self) -> str:
        """The command, or the URL without user, query and fragment."""
        if self.command:
            return " ".join(self.command)
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    def list_tools(self) -> list[Any]:
        """The server's tools, all pages. Raises ``ToolError`` when it cannot be reached."""
        return self._connected().ask(_listed, within=self.start_timeout_s)  # type: ignore[no-any-return]

    def call(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[ToolResult | ToolFailure]:
        """The outcomes of calls, each a remote name with arguments, in order."""
        try:
            link = self._connected()
        except ToolError as error:
            return [ToolFailure("connection", str(error))] * len(requests)
        rounds = -(-len(requests) // _AT_ONCE)
        try:
            outcomes: list[_Reply] = link.ask(
                lambda client: _called(client, requests, self.timeout_s), within=rounds * self.timeout_s + 10
            )
        except ToolError as error:
            self._drop(link)
            return [ToolFailure("connection", str(error))] * len(requests)
        if any(reply.lost for reply in outcomes):
            self._drop(link)
        return [reply.outcome for reply in outcomes]

    def close(self) -> None:
        """End the connection, and the server that was started by the command."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.close()

    def _connected(self) -> _Link:
        with self._lock:
            if self._link is None or not self._link.alive:
                self._link = _Link(self)
            return self._link

    def _drop(self, link: _Link) -> None:
        """Give a connection up that is no good; the next use makes another."""
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_lock", "_link")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock, self._link = threading.Lock(), None

    def __deepcopy__(self, memo: dict[int, Any]) -> McpServer:
        return self  # a server is a thing of the world: copies of an environment share it


@dataclass(frozen=True)
class McpTool:
    """One tool of a server as a :class:`turntree.envs.TextTool`; see :func:`mcp_tools`."""

    server: McpServer
    remote: str
    description: str
    schema: FrozenDict
    effects: Effects = "external"
    idempotent: bool | None = None
    max_chars: int = 50_000

    @property
    def fingerprint(self) -> str:
        """The server's command or URL, the tool's name and schema."""
        return f"mcp/{self.server.name}/{self.remote}/{self.schema!r}/{self.max_chars}"

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """One outcome a call, in order; the calls run at the same time."""
        outcomes: dict[int, ToolResult | ToolFailure] = {}
        requests: list[tuple[str, dict[str, Any]]] = []
        places: list[int] = []
        for i, call in enumerate(calls):
            try:
                requests.append((self.remote, decode_arguments(ToolSpec(call.tool, "", self.schema), call.argument)))
                places.append(i)
            except ValueError as error:
                outcomes[i] = ToolResult(f"error: {error}")
        answers = self.server.call(requests) if requests else []
        outcomes.update(zip(places, (self._cut(answer) for answer in answers), strict=True))
        return [outcomes[i] for i in range(len(calls))]

    def _cut(self, outcome: ToolResult | ToolFailure) -> ToolResult | ToolFailure:
        if isinstance(outcome, ToolFailure) or len(outcome.value) <= self.max_chars:
            return outcome
        left = len(outcome.value) - self.max_chars
        return ToolResult(f"{outcome.value[: self.max_chars]}\n[{left} more characters were left out]")


def mcp_tools(
    *,
    command: Sequence[str] = (),
    url: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 30.0,
    start_timeout_s: float = 30.0,
    effects: Effects | Mapping[str, Effects] = "external",
    idempotent: bool | Mapping[str, bool] | None = None,
    only: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_chars: int = 50_000,
    pass_env: Sequence[str] = (),
    header_env: Mapping[str, str] | None = None,
) -> dict[str, TextTool]:
    """The tools of a server by name, for ``tools=`` of an environment. It is connected to, to ask what it has.

    ``effects`` and ``idempotent`` are one value for all tools or one for each remote name (the others: ``external``
    and None). A server's own hints are not trusted. A failed call is made again only where it is ``idempotent`` or its
    effects are not external. ``only``: the remote names to take. ``rename``: remote name to name here; by default the
    remote one in small letters, other signs as ``_``. ``max_chars``: longer results are cut, and say so. The rest are
    the options of :class:`McpServer`.

    Raises ``ConfigError`` for options that do not fit the server's tools, ``ToolError`` when it cannot be reached.
    """
    if isinstance(command, str):
        raise ConfigError(f"expected command as a list of words, found the text {command!r}")
    if isinstance(pass_env, str):
        raise ConfigError(f"expected pass_env as a list of names, found the text {pass_env!r}")
    server = McpServer(
        tuple(map(str, command)), url, dict(env or {}), cwd, dict(headers or {}), timeout_s, start_timeout_s,
        tuple(pass_env), dict(header_env or {}),
    )  # fmt: skip
    server.secret_headers()
    server.secret_env()
    try:
        return _chosen(
            server, effects=effects, idempotent=idempotent, only=only, rename=rename or {}, max_chars=max_chars
        )
    except BaseException:
        server.close()
        raise


def _chosen(
    server: McpServer,
    *,
    effects: Effects | Mapping[str, Effects],
    idempotent: bool | Mapping[str, bool] | None,
    only: Sequence[str] | None,
    rename: Mapping[str, str],
    max_chars: int,
) -> dict[str, TextTool]:
    remote = {tool.name: tool for tool in server.list_tools()}
    each = [*(only or ()), *rename, *_keys(effects), *_keys(idempotent)]
    reject_unknown(each, remote, what=f"tool of {server.name}")
    found: dict[str, TextTool] = {}
    for name in remote if only is None else only:
        kind = effects.get(name, "external") if isinstance(effects, Mapping) else effects
        reject_unknown([kind], set(get_args(Effects)) - {"in_state"}, what="effects of an MCP tool")
        here = rename.get(name) or re.sub(r"\W|^(?=\d)", "_", name.lower(), flags=re.ASCII).lstrip("_")
        if here in found:
            raise ConfigError(f"two tools of {server.name} would be called {here!r}; give rename={{{name}: another}}")
        found[here] = McpTool(
            server,
            name,
            " ".join((remote[name].description or name).split()),
            check_schema(remote[name].input_schema, what=f"{server.name}: {name}"),
            kind,
            idempotent.get(name) if isinstance(idempotent, Mapping) else idempotent,
            max_chars,
        )
    return found


def _keys(value: Any) -> list[str]:
    return list(value) if isinstance(value, Mapping) else []


def _require_package() -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise ConfigError("tools of MCP servers need the package mcp: pip install 'turntree[mcp]'") from error


# -- the connection ----------------------------------------------------------------------------------------------------


class _Link:
    """An open connection in a thread with an event loop of its own."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._client: Future[Any] = Future()
        self._serving = self._loop.create_task(self._serve())
        self._thread = threading.Thread(target=self._run, daemon=True, name="turntree-mcp")
        self._thread.start()
        try:
            self._client.result(server.start_timeout_s)
        except FutureTimeout:
            self.close()
            raise ToolError(f"{server.name} did not answer within {server.start_timeout_s:g} s") from None
        except Exception as error:
            raise ToolError(f"cannot connect to {server.name}: {_reason(error)}") from error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def ask(self, question: Any, *, within: float) -> Any:
        """What the coroutine ``question(client)`` gives. Raises ``ToolError`` when it fails or takes too long."""
        client = self._client.result()
        coroutine = question(client)
        try:
            waiting = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as error:  # the loop ended in between
            coroutine.close()
            raise ToolError(f"the connection to {self.server.name} is lost") from error
        try:
            return waiting.result(within)
        except FutureTimeout:
            waiting.cancel()
            raise ToolError(f"{self.server.name} did not answer within {within:g} s") from None
        except Exception as error:
            raise ToolError(f"{self.server.name}: {_reason(error)}") from error

    def close(self) -> None:
        """Ask the connection to end, and wait a little for it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set if self._client.done() else self._serving.cancel)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except BaseException as error:
            if not self._client.done():
                self._client.set_exception(error if isinstance(error, Exception) else ToolError(repr(error)))
        finally:
            with contextlib.suppress(Exception):
                self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _serve(self) -> None:
        from mcp import Client

        opening = asyncio.ensure_future(self._stop.wait())
        try:
            async with Client(_transport(self.server)) as client:
                self._client.set_result(client)
                await opening
        finally:
            opening.cancel()


def _transport(server: McpServer) -> Any:
    from mcp.client.stdio import StdioServerParameters, stdio_client

    if server.url:
        return _http(server)
    program, *arguments = server.command
    told = StdioServerParameters(
        command=program, args=arguments, env={**server.env, **server.secret_env()}, cwd=server.cwd
    )
    errors: TextIO = sys.__stderr__ or sys.stderr
    return stdio_client(told, errlog=errors)


@asynccontextmanager
async def _http(server: McpServer) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    here = urlsplit(server.url).hostname in _LOOPBACK
    limits = httpx2.Timeout(server.start_timeout_s, read=max(server.timeout_s, server.start_timeout_s) + 5)
    headers = {**server.headers, **server.secret_headers()}
    async with httpx2.AsyncClient(headers=headers, timeout=limits, trust_env=not here) as client:
        async with streamable_http_client(server.url, http_client=client) as streams:
            yield streams


async def _listed(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor: str | None = None
    for _ in range(100):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


@dataclass(frozen=True, slots=True)
class _Reply:
    """The outcome of a call; ``lost``: the connection cannot be trusted any more."""

    outcome: ToolResult | ToolFailure
    lost: bool = False


async def _called(client: Any, requests: Sequence[tuple[str, dict[str, Any]]], timeout_s: float) -> list[_Reply]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(name: str, arguments: dict[str, Any]) -> _Reply:
        async with gate:
            return await _call(client, name, arguments, timeout_s)

    return list(await asyncio.gather(*(one(name, arguments) for name, arguments in requests)))


async def _call(client: Any, name: str, arguments: dict[str, Any], timeout_s: float) -> _Reply:
    from mcp.shared.exceptions import MCPError
    from mcp.types import REQUEST_TIMEOUT

    try:
        async with asyncio.timeout(timeout_s + 5):  # the package's own limit comes first
            result = await client.call_tool(name, arguments, read_timeout_seconds=timeout_s)
    except TimeoutError:
        return _Reply(ToolFailure("timeout", f"no result within {timeout_s:g} s"), lost=True)
    except MCPError as error:
        if error.code in _ASKED_WRONGLY:
            return _Reply(ToolResult(f"error: {error.message}"))
        late = error.code == REQUEST_TIMEOUT
        message = f"no result within {timeout_s:g} s" if late else error.message
        return _Reply(ToolFailure("timeout" if late else "mcp", message), lost=True)
    except Exception as error:  # whatever a transport raises when its other end is gone
        return _Reply(ToolFailure("connection", _reason(error)), lost=True)
    text = _text(result)
    return _Reply(ToolResult(f"error: {text}" if result.is_error and not text.startswith("error") else text))


def _text(result: Any) -> str:
    """The texts of a result; other kinds of content are named, structured content stands in where there is no text."""
    parts = [block.text if block.type == "text" else f"[{block.type} content left out]" for block in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _reason(error: BaseException) -> str:
    """The innermost error of a group, as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
