"""The process that makes sandboxes: it has everything imported and runs nobody's code, so a sandbox is a fork of it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from turntree.envs.sandbox.inside import box, cells, frozen, kernel, wire

__all__ = ["alone", "serve"]

_SUBREAPER = 36


def serve(plan: Mapping[str, Any]) -> None:
    """Make a sandbox for every request until the supervisor is gone."""
    control = socket.socket(fileno=int(sys.argv[2]))
    _quiet()
    kernel._prctl(_SUBREAPER, 1, what="subreaper")
    gc.freeze()
    wire.send(control, {"did": "start"})
    while True:
        try:
            message, fds, _ = wire.receive(control)
        except wire.Closed:
            return
        try:
            _open({**plan, "home": message["home"]}, control, fds)
        except OSError as error:
            with contextlib.suppress(wire.Closed):
                wire.send(control, {"failed": str(error)})
        wire.close_all(fds)


def alone(plan: Mapping[str, Any]) -> None:
    """Be one sandbox: what a program that has built the walls starts."""
    _quiet()
    gc.freeze()
    _keep(plan, [int(fd) for fd in sys.argv[2].split(",")])


def _quiet() -> None:
    """Nothing is waited for, and a key pressed in the terminal is meant for the supervisor."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _open(plan: Mapping[str, Any], control: socket.socket, fds: Sequence[int]) -> None:
    """Fork a process into namespaces of its own, give it its ids, and tell the supervisor."""
    asking, asked = os.pipe()
    answered, answering = os.pipe()
    child = os.fork()
    if not child:
        try:
            control.close()
            os.close(asking)
            os.close(answering)
            _leave(plan, fds, asked, answered)
        except BaseException as error:
            with contextlib.suppress(OSError):
                wire.send(socket.socket(fileno=os.dup(fds[0])), {"failed": str(error)})
        finally:
            os._exit(1)
    for fd in (asked, answered):
        os.close(fd)
    try:
        if plan["namespaces"] and os.read(asking, 1):
            _map_ids(child, plan["user"], plan["group"])
            os.write(answering, b"x")
    finally:
        os.close(asking)
        os.close(answering)
    wire.send(control, {"did": "open"})


def _map_ids(child: int, user: int, group: int) -> None:
    """Say who the only user and group of the new namespace are outside."""
    if user == os.geteuid():
        with contextlib.suppress(OSError), open(f"/proc/{child}/setgroups", "w", encoding="ascii") as file:
            file.write("deny")
    for name, ours in (("uid_map", user), ("gid_map", group)):
        with open(f"/proc/{child}/{name}", "w", encoding="ascii") as file:
            file.write(f"{box._USER} {ours} 1")


def _leave(plan: Mapping[str, Any], fds: Sequence[int], asked: int, answered: int) -> NoReturn:
    """Go into new namespaces; the first process in them is the keeper."""
    os.setsid()
    if plan["namespaces"]:
        kernel.unshare(*plan["namespaces"])
        os.write(asked, b"x")
        if not os.read(answered, 1):
            raise OSError("the user of the namespace could not be set")
    os.close(asked)
    os.close(answered)
    if os.fork():
        os._exit(0)
    if plan["namespaces"]:
        box.build_root(plan)
        box.move_library(plan["library"], plan["library_inside"])
    _keep(plan, fds)
    os._exit(0)


def _keep(plan: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Start the first interpreter, then wait for the supervisor to go: when this process ends, all others do."""
    keeper, channel, out = fds
    home = plan["home"]
    os.chdir(home)
    os.environ.clear()
    os.environ.update(HOME=home, TMPDIR=home, TZ="UTC", LANG="C.UTF-8", PATH="/nowhere")
    control = socket.socket(fileno=keeper)
    if not os.fork():
        control.close()
        _interpret(plan, channel, out, home)
    os.close(channel)
    os.close(out)
    wire.send(control, {"did": "keep"})
    watched = select.poll()
    watched.register(control, select.POLLIN | select.POLLHUP)
    while not watched.poll():
        continue


def _interpret(plan: Mapping[str, Any], channel: int, out: int, home: str) -> NoReturn:
    """Lock the door, then execute what comes."""
    own, out = _only(channel, out)
    try:
        frozen.freeze()
        listener, layers = box.enter(plan, home)
        wire.send(own, {"did": "lock", "layers": layers}, [] if listener is None else [listener])
        if listener is not None:
            os.close(listener)
        box.seal(plan)
        cells.serve(own, out)
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            wire.send(own, {"failed": f"{type(error).__name__}: {error}"})
    os._exit(1)


def _only(channel: int, out: int) -> tuple[socket.socket, int]:
    """Keep two descriptors, at fixed numbers, and an empty input; close whatever else was inherited."""
    nothing = os.open("/dev/null", os.O_RDWR)
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (nothing, nothing, nothing, channel, out)]
    for number, fd in enumerate(kept):
        os.dup2(fd, number)
    os.closerange(len(kept), 1 << 16)
    return socket.socket(fileno=3), 4


def main() -> None:
    """``plan`` as JSON and descriptors are the arguments; see :mod:`turntree.envs.sandbox.layout`."""
    plan = json.loads(sys.argv[1])
    (serve if plan["zygote"] else alone)(plan)
