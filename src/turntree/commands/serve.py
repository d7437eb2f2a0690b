"""The search server as a command."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.commands.console import argument, say
from turntree.errors import ConfigError

if TYPE_CHECKING:
    from turntree.search_backend.passage import SearchBackend
    from turntree.search_backend.server import SearchServer, ServerSettings

__all__ = ["Served", "run_serve"]


@dataclass(frozen=True)
class Served:
    """What a server serves; each of its processes opens it for itself."""

    index: Path | None
    corpus: Path | None
    arguments: tuple[tuple[str, Any], ...] = ()
    reranker: str = ""

    def __post_init__(self) -> None:
        if (self.index is None) == (self.corpus is None):
            raise ConfigError("expected one of --index DIR and --corpus FILE")

    def backend(self) -> SearchBackend:
        """Open the index, or index the corpus in memory."""
        from turntree.envs.loading import check_arguments
        from turntree.search_backend import BM25Backend, BM25Settings

        options = dict(self.arguments)
        if self.index is not None:
            from turntree.search_backend.index import open_index

            return open_index(self.index, **options)
        assert self.corpus is not None
        check_arguments(BM25Settings, options, what="--arg")
        return BM25Backend.from_corpus(self.corpus, **options)

    def server(self, settings: ServerSettings) -> SearchServer:
        """The server over it."""
        from turntree.search_backend.server import SearchServer

        reranker = _reranker(self.reranker) if self.reranker else None
        return SearchServer(self.backend(), settings, reranker=reranker)


def run_serve(
    index: Path | None, corpus: Path | None, *, arguments: tuple[str, ...], reranker: str | None, **options: Any
) -> None:
    """``turntree serve``."""
    served = Served(index, corpus, tuple(map(argument, arguments)), reranker or "")
    from turntree.search_backend.server import ServerSettings
    from turntree.search_backend.serving import serve

    settings = ServerSettings(**{name: value for name, value in options.items() if value is not None})
    if settings.workers > 1 and corpus is not None:
        raise ConfigError(
            f"--workers {settings.workers} with --corpus: each process would hold a copy of the index in memory; build "
            "one that they can share (turntree index build) and give it as --index"
        )
    what = index or corpus
    if settings.allow_unauthenticated and not settings.token_env:
        say("warning: no token is asked for; whoever reaches this address can search")

    def ready(url: str) -> None:
        say(f"serving {what} at {url}/retrieve (Ctrl-C or SIGTERM stops)")

    serve(functools.partial(served.server, settings), settings, ready=ready)
    say("stopped")


def _reranker(model: str) -> Any:
    from turntree.search_backend.rerank import load_reranker

    return load_reranker(model)
