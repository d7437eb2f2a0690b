"""The retriever of a run: by name or import path, with the store of searches in front of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from turntree.envs.loading import check_arguments, construct
from turntree.errors import ConfigError
from turntree.search_backend import BM25Backend, BM25Settings, SearchBackend
from turntree.trainers.config import SearchConfig
from turntree.trainers.plugins import load_backend

__all__ = ["REMOTE", "build_backend", "check_search_args"]

REMOTE = ("http", "web")
"""Backends that are somewhere else: no corpus is needed here, and a replay need not reach them."""


def build_backend(search: SearchConfig, corpus: Callable[[], Path]) -> SearchBackend:
    """The retriever over the file that ``corpus`` finds, which is not looked for where a server is searched.

    Raises ``ConfigError`` or ``DataError``, naming the option that is at fault.
    """
    if not search.store:
        return _backend(search, corpus)
    return _stored(search, corpus)


def check_search_args(search: SearchConfig) -> None:
    """Raise ``ConfigError`` for arguments of BM25 that it does not take; nothing is indexed."""
    if search.backend == "bm25" and not search.index:
        check_arguments(BM25Settings, search.args, what="search.args")


def _backend(search: SearchConfig, corpus: Callable[[], Path]) -> SearchBackend:
    if search.backend == "bm25":
        path = corpus()
        if path.is_dir():
            manifest = path / "manifest.json"
            modified = manifest.stat().st_mtime if manifest.is_file() else 0.0
            return _index(str(path.resolve()), modified, tuple(sorted(search.args.items())))
        check_arguments(BM25Settings, search.args, what="search.args")
        return _bm25(str(path.resolve()), path.stat().st_mtime, tuple(sorted(search.args.items())))
    if search.backend in REMOTE:
        return _remote(search.backend, search.args)
    return load_backend(search.backend, {"corpus": corpus(), **search.args})


@functools.lru_cache(maxsize=4)
def _bm25(corpus: str, modified: float, args: tuple[tuple[str, Any], ...]) -> BM25Backend:
    del modified  # part of the key: a rewritten corpus is indexed again
    return BM25Backend.from_corpus(Path(corpus), **dict(args))


@functools.lru_cache(maxsize=4)
def _index(folder: str, modified: float, args: tuple[tuple[str, Any], ...]) -> SearchBackend:
    """An index folder, with its options of searching."""
    del modified
    from turntree.search_backend.index import open_index

    return open_index(folder, **dict(args))


def _remote(name: str, args: Mapping[str, Any]) -> SearchBackend:
    from turntree.search_backend.client import RemoteBackend
    from turntree.search_backend.web import WebBackend

    if not args.get("url"):
        raise ConfigError(f"search.backend={name}: expected the address of the server in search.args.url")
    factory: Any = RemoteBackend if name == "http" else WebBackend
    check_arguments(factory, args, what="search.args")
    made: SearchBackend = construct(factory, args, what=f"search.backend={name}")
    return made


def _stored(search: SearchConfig, corpus: Callable[[], Path]) -> SearchBackend:
    """A replay asks nobody, so of a server or the web it makes nothing; a local index is made for its fingerprint."""
    from turntree.search_backend.replay import ReplayBackend

    name = "index" if search.index else search.backend
    source = f"{name}:{search.args.get('url', '')}".rstrip(":")
    mode: Any = search.store_mode
    offline = mode == "replay" and (search.backend in REMOTE or bool(search.store_fingerprint))
    if search.store_fingerprint and not offline:
        raise ConfigError("search.store_fingerprint is for search.store_mode=replay; elsewhere the backend has its own")
    backend = None if offline else _backend(search, corpus)
    fingerprint = search.store_fingerprint or (str(search.args.get("fingerprint", "")) if offline else "")
    return ReplayBackend(search.store, backend, mode=mode, fingerprint=fingerprint, source=source)
