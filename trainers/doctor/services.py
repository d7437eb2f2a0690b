"""What a run talks to: model server, retriever, store of searches; and the ports that turntree's own servers take."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turntree.agents.engines.choose import Machine
from turntree.envs.loading import check_arguments
from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.config import RunConfig, SearchConfig
from turntree.trainers.doctor.check import Check, Level

__all__ = ["PORTS", "ports", "retriever", "search_store", "server"]

PORTS = {"turntree view": 8320, "turntree serve": 8000}
"""The ports that the studio and the search server take unless they are told another one."""

_PATIENCE_S = 10.0
_SLOW_S = 2.0
_QUERY = "Who wrote Hamlet?"


def server(config: RunConfig, machine: Machine, *, wanted: bool) -> Check:
    """What answers at ``engine.base_url``."""
    level: Level = "fail" if wanted else "note"
    url = config.engine.base_url
    if machine.server == "unreachable":
        return Check("server", level, url, "nothing answers there", "start it, or correct engine.base_url")
    if not machine.server:
        do = "set engine.base_url" if wanted else ""
        return Check("server", "fail" if wanted else "ok", "no engine.base_url", "no server is used", do)
    if config.engine.name == "openai":
        from turntree.trainers.remote import endpoint

        try:
            endpoint(config).api_key()
        except ConfigError as error:
            return Check("server", "fail", url, str(error), "set what is missing")
    if wanted and config.engine.name == "vllm_server" and machine.server != "vllm":
        return Check("server", "fail", url, "answers, but is not vLLM", "use engine=openai to evaluate")
    return Check("server", "ok", url, "vLLM answers" if machine.server == "vllm" else "answers")


# -- the retriever ----------------------------------------------------------------------------------------------------


def retriever(config: RunConfig) -> Iterator[Check]:
    """Ask a search server one question, once; a paid search API is not asked, but its key is looked for."""
    search = config.search
    if search.backend not in ("http", "web"):
        return
    url = str(search.args.get("url", ""))
    if not url:
        yield Check("retriever", "fail", f"search.backend={search.backend}", "no address", "set search.args.url")
        return
    if search.store and search.store_mode == "replay":
        yield Check("retriever", "ok", url, "not asked: search.store_mode=replay answers from search.store")
        return
    try:
        yield _web(url, search.args) if search.backend == "web" else _http(url, search, _question(config))
    except TurnTreeError as error:
        yield Check("retriever", "fail", url, _without(str(error), url), _cure(str(error)))


def _web(url: str, args: dict[str, Any]) -> Check:
    from turntree.envs.loading import construct
    from turntree.search_backend.web import WebBackend

    check_arguments(WebBackend, args, what="search.args")
    construct(WebBackend, args, what="search.backend=web").close()
    return Check("retriever", "ok", url, "options and key are there; it is not asked, since searches may cost")


def _question(config: RunConfig) -> str:
    """The first question of the run, which its retriever should know something of."""
    from turntree.envs.datasets import load_questions
    from turntree.trainers.task import questions_file

    name = config.env.questions or config.env.test_questions or config.env.dev_questions
    try:
        return load_questions(questions_file(name), limit=1)[0].question if name else _QUERY
    except (TurnTreeError, OSError, IndexError):  # another line says so
        return _QUERY


def _http(url: str, search: SearchConfig, question: str) -> Check:
    from turntree.search_backend.client import RemoteBackend

    check_arguments(RemoteBackend, search.args, what="search.args")
    limit = float(search.args.get("timeout_s") or _PATIENCE_S)
    once: dict[str, Any] = {**search.args, "retries": 0, "timeout_s": min(limit, _PATIENCE_S)}
    with RemoteBackend(**once) as backend:
        start = time.monotonic()
        (found,) = backend.search([question], k=search.top_k)
        seconds = time.monotonic() - start
        fingerprint = backend.fingerprint
    what = f"{len(found)} passages for {question!r:.60} in {seconds:.2g} s"
    if not found:
        do = "check what it searches, and search.args.dialect"
        return Check("retriever", "note", url, f"answers, but finds nothing for {question!r:.60}", do)
    if seconds > _SLOW_S:
        do = "see what it waits for; search.args.timeout_s must leave it the time"
        return Check("retriever", "note", url, f"slow: {what}", do)
    unsure = "; it does not say which index it searches" if fingerprint.startswith("unverified:") else ""
    return Check("retriever", "ok", url, f"{what}{unsure}")


def _without(message: str, url: str) -> str:
    return message.removeprefix(f"the search server at {url}").lstrip(": ,") or message


def _cure(message: str) -> str:
    """What to do, by what the client says."""
    if "environment variable" in message:
        return "export the variable that search.args.token_env names"
    if "timeout_s=" in message:
        return "see what it waits for; search.args.timeout_s must leave it the time to answer"
    if any(word in message for word in ("401", "403")):
        return "check the token that search.args.token_env names"
    if any(word in message for word in ("status 4", "status 5", "JSON", "expected a list", "answered", "result")):
        return "check that search.args.url is the address of its search, and search.args.dialect what it speaks"
    if "expected the index" in message:
        return "start it with that index, or correct search.args.fingerprint"
    return "start it (turntree serve), or correct search.args.url; `curl` there says whether it listens"


def search_store(search: SearchConfig) -> Iterator[Check]:
    """The file in which answers are kept: that it is one, and that it can be written."""
    if not search.store:
        return
    path = Path(search.store)
    if not path.exists():
        if search.store_mode == "replay":
            do = "record one first: search.store_mode=readthrough, or correct search.store"
            yield Check("search store", "fail", str(path), "no such file, and a replay asks nobody", do)
        else:
            yield Check("search store", "ok", str(path), "is made when the first answer is kept")
        return
    from turntree.search_backend.replay import SearchStore

    try:
        store = SearchStore(path, create=False)
        try:
            count = len(store)
        finally:
            store.close()
    except TurnTreeError as error:
        do = "name another file, or delete this one"
        yield Check("search store", "fail", str(path), str(error).removeprefix(f"{path}: "), do)
        return
    if search.store_mode != "replay" and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        do = "mend its permissions, or set search.store_mode=replay"
        yield Check("search store", "fail", str(path), "cannot be written, and its folder must be too", do)
        return
    level: Level = "fail" if search.store_mode == "replay" and not count else "ok"
    do = "" if level == "ok" else "record one first: search.store_mode=readthrough"
    yield Check("search store", level, f"{path}: {count} answers", "are not asked again", do)


# -- ports ------------------------------------------------------------------------------------------------------------


def ports(config: RunConfig) -> Iterator[Check]:
    """Whether the ports of the studio and the search server are free, and who has them."""
    used = _own_addresses(config)
    for command, port in PORTS.items():
        name = f"port {port}"
        problem = _taken(port)
        if not problem:
            yield Check(name, "ok", "free", f"{command} takes it")
        elif port in used:
            yield Check(name, "ok", _listener(port), f"in use, as {used[port]} says")
        elif problem == "taken":
            do = f"{command} --port N"
            means = "the studio then takes a free one" if port == PORTS["turntree view"] else f"{command} is refused"
            yield Check(name, "note", f"taken by {_listener(port)}", f"{means} unless it is told another", do)
        else:
            yield Check(name, "note", problem, f"{command} cannot listen there", f"{command} --port N")


def _own_addresses(config: RunConfig) -> dict[int, str]:
    """Ports of this machine that the run itself asks."""
    given = {"engine.base_url": config.engine.base_url, "search.args.url": str(config.search.args.get("url", ""))}
    found: dict[int, str] = {}
    for option, url in given.items():
        try:
            parts = urlsplit(url)
            if parts.hostname in ("127.0.0.1", "localhost", "::1") and parts.port:
                found[parts.port] = option
        except ValueError:  # another line says that it is no address
            continue
    return found


def _taken(port: int) -> str:
    """``taken``, or why else nobody can listen on a port of the loopback address; '' where one can."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return "taken" if error.errno == errno.EADDRINUSE else str(error.strerror)
    return ""


def _listener(port: int) -> str:
    """The program that listens on a port; only its name, since arguments may hold secrets."""
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        try:
            if any(os.readlink(fd) in sockets for fd in (process / "fd").iterdir()):
                return f"{_program(process)} (process {process.name})"
        except OSError:  # of another user, or gone
            continue
    return "a program of another user" if sockets else "another program"


def _inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                yield cells[9]


def _program(process: Path) -> str:
    words = (process / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    own = next((i for i, word in enumerate(words) if Path(word).name == "turntree" or word == "turntree.cli"), None)
    if own is not None:
        return " ".join(["turntree", *(words[own + 1 : own + 2])])
    return (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
