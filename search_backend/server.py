"""The search server: any :class:`SearchBackend` over HTTP, in the forms that published clients speak."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from turntree import __version__
from turntree.errors import ConfigError, MissingExtraError
from turntree.http import check_number, check_seconds, secret_from
from turntree.search_backend.client import FINGERPRINT_HEADER
from turntree.search_backend.passage import SearchBackend

if TYPE_CHECKING:
    from turntree.search_backend.rerank import Reranker

try:
    from fastapi import FastAPI, Request, Response

    from turntree.search_backend import forms
    from turntree.search_backend.batching import Closed, MicroBatcher, Overloaded
    from turntree.search_backend.guard import (
        Guard,
        GuardSettings,
        Refused,
        counted,
        error_body,
        error_headers,
        is_loopback,
    )
    from turntree.search_backend.observe import CONTENT_TYPE, ServerMetrics
except ImportError as error:  # pragma: no cover
    raise MissingExtraError(f"the search server needs the extra: pip install 'turntree[server]' ({error})") from error

__all__ = ["IGNORED_HEADER", "ServerSettings", "SearchServer", "create_app", "rank"]

IGNORED_HEADER = "turntree-ignored"
"""Header of an answer to a request with keys that had no effect: their names, percent-encoded."""

_log = logging.getLogger(__name__)
_KEYS = 20  # that one answer, and the log in all, name


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the server listens and what it takes.

    A ``host`` that other machines can reach needs a token (``token_env``: the *name* of the environment variable that
    holds it) or ``allow_unauthenticated``. ``max_queue`` bounds the queries that wait; past it, requests are answered
    503 at once. ``search_timeout_s`` bounds the time from a whole request to its result. ``graceful_s``: how long a
    server that was asked to stop finishes what it began. Raises ``ConfigError`` for values out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    workers: int = 1
    token_env: str = ""
    allow_unauthenticated: bool = False
    max_batch: int = 64
    max_wait_ms: float = 2.0
    max_queue: int = 8192
    max_body_bytes: int = 4 * 2**20
    max_queries: int = 4096
    max_k: int = 1000
    max_query_chars: int = 16384
    default_k: int = 3
    max_connections: int = 1024
    head_timeout_s: float = 10.0
    body_timeout_s: float = 10.0
    search_timeout_s: float = 30.0
    graceful_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s"):
                check_seconds(field.name, value)
            elif field.name.startswith("max_") or field.name in ("workers", "default_k"):
                wait = field.name == "max_wait_ms"
                check_number(field.name, value, minimum=0 if wait else 1, whole=not wait)
        check_number("port", self.port, minimum=0, whole=True)
        if self.port > 65535:
            raise ConfigError(f"port={self.port}: expected 0 (any free one) to 65535")
        if self.max_queue < self.max_queries:
            raise ConfigError(
                f"max_queue={self.max_queue} is smaller than max_queries={self.max_queries}: one request that is "
                "allowed would never be taken; raise the one or lower the other"
            )
        if not is_loopback(self.host) and not self.token_env and not self.allow_unauthenticated:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines: expected a token (token_env names its "
                "environment variable), or allow_unauthenticated where the network itself is trusted"
            )

    @property
    def request_limits(self) -> forms.RequestLimits:
        """What one request may hold."""
        return forms.RequestLimits(self.max_queries, self.max_k, self.max_query_chars, self.default_k)

    def token(self) -> str:
        """The bearer token, read now; '' without one."""
        token = secret_from(self.token_env, what="the token that requests must bring")
        if self.token_env and len(token) < 8:
            raise ConfigError(f"the token in {self.token_env} is too short: expected at least 8 characters")
        return token


_FORMS: dict[str, tuple[Callable[[bytes, forms.RequestLimits], forms.Ask], tuple[type[Any], ...], str]] = {
    "/retrieve": (
        forms.retrieve_form,
        (forms.Retrieve, forms.RetrieveOne, forms.RetrieveTexts, forms.RetrieveRerank),
        "Passages for queries, in the forms of Search-R1, SkyRL and ZeroSearch.",
    ),
    "/search": (forms.search_form, (forms.Search,), "Passages for one query, in the form of ReSearch."),
    "/batch_search": (forms.batch_search_form, (forms.BatchSearch,), "Passages for queries, in the form of ReSearch."),
    "/rerank": (forms.rerank_form, (forms.Rerank,), "Documents in a new order, in the form of Search-R1."),
}
_PATHS = frozenset({*_FORMS, "/healthz", "/metrics", "/info", "/openapi.json"})


class SearchServer:
    """One process's server: the backend, its batcher, its metrics, and ``app``, the ASGI application.

    ``close`` finishes what waits; the application's own shutdown does so too.
    """

    def __init__(
        self, backend: SearchBackend, settings: ServerSettings | None = None, *, reranker: Reranker | None = None
    ) -> None:
        self.settings = settings or ServerSettings()
        self.backend, self.reranker = backend, reranker
        self.fingerprint = backend.fingerprint
        self.metrics = ServerMetrics()
        self.batcher = MicroBatcher(
            backend,
            max_batch=self.settings.max_batch,
            max_wait_s=self.settings.max_wait_ms / 1000,
            max_queue=self.settings.max_queue,
            watch=self.metrics.watch,
        )
        self._ranking = asyncio.Semaphore(1)
        self._told: set[str] = set()
        token = self.settings.token()
        self.app: Any = Guard(
            self._application(),
            settings=GuardSettings(
                self.settings.max_body_bytes,
                self.settings.body_timeout_s,
                local=is_loopback(self.settings.host) and not token,
            ),
            metrics=self.metrics,
            token=token,
            paths=_PATHS,
            busy=self._busy,
        )

    def close(self) -> None:
        """Take no further searches, and end when those that wait are done."""
        self.batcher.close()

    def _busy(self) -> Exception | None:
        if not self.batcher.alive:
            return Closed("the server is shutting down")
        return Overloaded(f"{self.batcher.depth} queries wait already") if self.batcher.full else None

    def _application(self) -> FastAPI:
        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            await asyncio.to_thread(self.close)

        app = FastAPI(
            title="turntree search", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
            description="Finds passages. Speaks the forms of Search-R1, SkyRL, ZeroSearch and ReSearch.",
        )  # fmt: skip
        for status in (404, 405):
            app.add_exception_handler(status, self._http_error)
        for path, (form, models, summary) in _FORMS.items():
            # The first route answers: it reads the request itself and needs nothing of what the second one, which
            # is the schema's, does for each request (a third of the server's time).
            endpoint = self._endpoint(form)
            app.add_route(path, endpoint, methods=["POST"], include_in_schema=False)
            app.add_api_route(
                path, endpoint, methods=["POST"], summary=summary, response_model=None,
                responses=_RESPONSES, openapi_extra=_schema(models),
            )  # fmt: skip
        app.add_api_route("/healthz", self._healthz, methods=["GET"], summary="Whether searches are answered.")
        app.add_api_route("/info", self._info, methods=["GET"], summary="What is served, and the limits.")
        app.add_api_route(
            "/metrics", self._metrics, methods=["GET"], summary="Prometheus metrics.", response_model=None
        )
        return app

    def _endpoint(self, form: Callable[[bytes, forms.RequestLimits], forms.Ask]) -> Any:
        limits = self.settings.request_limits

        async def answer(request: Request) -> Response:
            try:
                ask = form(await request.body(), limits)
                body = forms.to_json(ask.write(await self._find(ask)))
            except Exception as error:
                refused = counted(error, self.metrics)
                return Response(error_body(refused), refused.status, error_headers(refused), "application/json")
            headers = {FINGERPRINT_HEADER: self.fingerprint}
            if ask.ignored:
                headers[IGNORED_HEADER] = self._ignored(ask.ignored)
            return Response(body, 200, headers, "application/json")

        return answer

    async def _find(self, ask: forms.Ask) -> forms.Found:
        if ask.rerank_k is not None and self.reranker is None:
            raise Refused(501, "no_reranker", "this server has no reranker; start it with --reranker MODEL")
        found = ask.documents
        if found is None:
            found = await self.batcher.search(ask.queries, k=ask.k, timeout_s=self.settings.search_timeout_s)
            self.metrics.queue.set(self.batcher.depth)
        if ask.rerank_k is None or not found:
            return found
        async with self._ranking:
            return await asyncio.to_thread(self._rank, ask.queries, found, ask.rerank_k)

    def _ignored(self, keys: Sequence[str]) -> str:
        """Say once for each key in the log, and in every answer, what had no effect. Keys are a stranger's text."""
        shown = [quote(key[:40].encode("utf-8", "backslashreplace"), safe="") for key in keys[:_KEYS]]
        new = [key for key in shown if key not in self._told][: max(0, _KEYS - len(self._told))]
        if new:
            self._told.update(new)
            _log.warning("requests bring keys that have no effect here: %s", ", ".join(new))
        self.metrics.ignored.inc()
        return ", ".join(shown)

    def _rank(self, queries: Sequence[str], found: forms.Found, k: int) -> forms.Found:
        assert self.reranker is not None
        return rank(self.reranker, queries, found, k)

    async def _http_error(self, _: Request, error: Exception) -> Response:
        """An address or a method that there is not; such errors are exceptions of FastAPI's with these attributes."""
        status, headers = getattr(error, "status_code", 404), getattr(error, "headers", None)
        known = ", ".join(f"POST {path}" for path in _FORMS)
        refused = Refused(status, "not_found" if status == 404 else "method_not_allowed", f"{error}; there are {known}")
        self.metrics.errors.labels(refused.kind).inc()
        return Response(error_body(refused), status, dict(headers or {}), "application/json")

    async def _healthz(self) -> Response:
        alive = self.batcher.alive
        body = b'{"status":"ok"}' if alive else b'{"status":"shutting down"}'
        return Response(body, 200 if alive else 503, media_type="application/json")

    async def _info(self) -> dict[str, Any]:
        size = getattr(self.backend, "__len__", None)
        return {
            "server": "turntree",
            "version": __version__,
            "fingerprint": self.fingerprint,
            "backend": type(self.backend).__name__,
            "passages": size() if size else None,
            "reranker": self.reranker is not None,
            "limits": {
                name: getattr(self.settings, name)
                for name in ("max_body_bytes", "max_queries", "max_k", "max_query_chars", "default_k", "max_queue")
            },
        }

    async def _metrics(self) -> Response:
        self.metrics.queue.set(self.batcher.depth)
        return Response(await asyncio.to_thread(self.metrics.render), media_type=CONTENT_TYPE)


def create_app(
    backend: SearchBackend, settings: ServerSettings | None = None, *, reranker: Reranker | None = None
) -> Any:
    """The ASGI application over ``backend``, for a server of one's own; see :class:`SearchServer`."""
    return SearchServer(backend, settings, reranker=reranker).app


_ERROR = {"application/json": {"example": {"error": {"type": "invalid_request", "message": "...", "param": "topk"}}}}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {"example": {"result": [[{"id": "1", "contents": '"Title"\ntext'}]]}}}},
    **{
        status: {"description": what, "content": _ERROR}
        for status, what in (
            (401, "no token, or a wrong one"),
            (408, "the body came too slowly"),
            (413, "the body is too large"),
            (415, "the body is not JSON"),
            (422, "the request cannot be answered; param is the key at fault"),
            (500, "the search failed"),
            (503, "too much waits, or the server stops; Retry-After says when to ask again"),
        )
    },
}


def _schema(models: Sequence[type[Any]]) -> dict[str, Any]:
    schemas = [model.model_json_schema() for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def rank(reranker: Reranker, queries: Sequence[str], found: forms.Found, k: int) -> forms.Found:
    """The ``k`` best passages of each query by the reranker's score; equal scores keep their order."""
    scores = reranker.score(queries, found)
    ranked = []
    for passages, numbers in zip(found, scores, strict=True):
        order = sorted(range(len(passages)), key=lambda i: -numbers[i])[:k]
        ranked.append([replace(passages[i], score=float(numbers[i])) for i in order])
    return ranked
