"""The interpreter: executes cells one after the other in one namespace, and forks itself when it is asked to."""

from __future__ import annotations

import ast
import builtins
import gc
import io
import linecache
import os
import signal
import socket
import sys
import textwrap
import traceback
import types
from typing import Any, NoReturn

from turntree.envs.sandbox.inside import frozen, wire

__all__ = ["serve"]

# Names of the functions below are looked up here, so that code that breaks the builtins breaks only itself.
globals()["__builtins__"] = dict(vars(builtins))

_LONGEST_VALUE = 100_000
_FRAMES, _DEEPEST = 20, 200
# What is used after a cell is kept here: the code inside may replace it everywhere else.
_fork, _write, _dup2, _exit, _close = os.fork, os.write, os.dup2, os._exit, os.close
_setitimer, _signal, _send, _receive, _format = (
    signal.setitimer, signal.signal, wire.send, wire.receive, traceback.TracebackException
)  # fmt: skip
_collect = gc.collect
_get_state, _set_state = frozen.random_state, frozen.set_random_state
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
# Come when twins are made and end, which the code must not notice.
_OURS = ((signal.SIGCONT, signal.SIG_DFL), (signal.SIGCHLD, signal.SIG_IGN))


class _Streams:
    """Standard output and error of the code, both the pipe to the supervisor."""

    def __init__(self, out: int) -> None:
        self.out = out
        self.use(out)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
        sys.stdout, sys.stderr = _text(1), _text(2)
        self.opened = sys.stdout, sys.stderr

    def use(self, out: int) -> None:
        """Write to another pipe from now on."""
        _dup2(out, 1)
        _dup2(out, 2)
        self.out = out

    def flush(self) -> None:
        for stream in (*self.opened, sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BaseException:  # noqa: S112  # there is nobody to tell
                continue

    def write(self, text: str) -> None:
        """After what the code wrote itself."""
        self.flush()
        data = text.encode("utf-8", "replace")
        while data:
            data = data[_write(self.out, data) :]


def _text(fd: int) -> io.TextIOWrapper:
    raw = open(fd, "wb", buffering=65536, closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", newline="\n", write_through=False)


def serve(channel: socket.socket, out: int) -> NoReturn:
    """Answer until the channel is closed: ``run`` a cell, ``fork`` into a twin with a channel and a pipe of its own."""
    streams = _Streams(out)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__.update(exit=_stop, quit=_stop)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # twins that ended are not waited for
    _answer(channel, {"did": "ready"})
    while True:
        try:
            message, fds, _ = _receive(channel)
        except BaseException:
            _exit(0)
        if message.get("do") == "run":
            _run(str(message["code"]), int(message["number"]), module, streams)
            _answer(channel, {"did": "run"})
        elif message.get("do") == "fork" and len(fds) == 2:
            channel = _twin(channel, streams, fds)


def _stop(code: object = None) -> NoReturn:
    raise SystemExit(code)


def _answer(channel: socket.socket, message: dict[str, Any]) -> None:
    try:
        _send(channel, message)
    except BaseException:
        _exit(0)


def _twin(channel: socket.socket, streams: _Streams, fds: list[int]) -> socket.socket:
    """Fork; the channel that this process goes on with. The twin draws the same random numbers as this one would."""
    state = _get_state()
    try:
        child = _fork()
    except OSError:
        child = -1
    if child:
        for fd in fds:
            _close(fd)
        if child < 0:
            _answer(channel, {"did": "refused"})
        return channel
    _set_state(state)
    old = channel.detach()
    _dup2(fds[0], old, True)
    _close(fds[0])
    own = socket.socket(fileno=old)
    pipe = streams.out
    _dup2(fds[1], pipe, True)
    _close(fds[1])
    streams.use(pipe)
    _answer(own, {"did": "fork"})
    return own


def _run(code: str, number: int, module: types.ModuleType, streams: _Streams) -> None:
    """Execute one cell and write what a prompt would show: its output, the last value, the exception."""
    name = f"<cell {number}>"
    _collect()  # cycles are collected at the same places in every run of the same cells
    try:
        code = _unindented(code)
        lines = [line + "\n" for line in code.split("\n")]
        linecache.cache[name] = (len(code), None, lines, name)
        value = _execute(ast.parse(code, name), name, module)
        if value is not None:
            module.__dict__["_"] = value
            text = repr(value)
            if len(text) > _LONGEST_VALUE:
                text = f"{text[:_LONGEST_VALUE]}... [{len(text) - _LONGEST_VALUE} more characters]"
            streams.write(text + "\n")
    except BaseException as error:
        _show(error, streams)
    _collect()
    streams.flush()
    for timer in _TIMERS:  # a timer would not be there in a twin
        _setitimer(timer, 0)
    for number, handler in _OURS:
        _signal(number, handler)


def _execute(tree: ast.Module, name: str, module: types.ModuleType) -> object:
    """Run the statements; the value of the last one where it is an expression."""
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), module.__dict__)  # noqa: S102  # what a sandbox is for
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)  # noqa: S307


def _unindented(code: str) -> str:
    """The code without a Markdown fence around it and without an indentation that all lines share."""
    code = textwrap.dedent(code.expandtabs(4) if code[:1] == "\t" else code).strip("\n")
    lines = code.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        code = textwrap.dedent("\n".join(lines[1:-1]))
    return code


def _show(error: BaseException, streams: _Streams) -> None:
    try:
        told = _format(type(error), error, error.__traceback__, limit=-_DEEPEST)
        _cut(told, set())
        text = "".join(told.format())
    except BaseException:
        text = f"{type(error).__name__}\n"
    try:
        streams.write(text)
    except BaseException:
        return


def _cut(told: traceback.TracebackException, seen: set[int]) -> None:
    """Leave frames of cells only: the others are no business of whoever wrote the cells, and name folders."""
    if id(told) in seen:
        return
    seen.add(id(told))
    own = [frame for frame in told.stack if frame.filename.startswith("<cell ")]
    told.stack = traceback.StackSummary.from_list(own[-_FRAMES:])
    more: list[traceback.TracebackException | None] = [told.__cause__, told.__context__]
    more += getattr(told, "exceptions", None) or []
    for inner in more:
        if inner is not None:
            _cut(inner, seen)
