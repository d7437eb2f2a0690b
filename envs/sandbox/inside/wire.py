"""Messages between the two sides: JSON objects over sequenced packets, file descriptors beside them."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["LARGEST", "Closed", "pair", "receive", "send"]

LARGEST = 128 * 1024
"""Bytes of a message; larger ones are refused by both sides."""

_MOST_FDS = 4
_CREDENTIALS = struct.calcsize("3i")


class Closed(OSError):
    """The other side is gone, or wrote what is no message."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; the first one learns from the kernel who wrote to it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return mine, theirs


def send(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Write one message. Raises :class:`Closed` where nobody reads any more, ``ValueError`` where it is too large."""
    data = json.dumps(message).encode()
    if len(data) > LARGEST:
        raise ValueError(f"expected a message of at most {LARGEST} bytes, found {len(data)}")
    try:
        if fds:
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            channel.sendmsg([data], beside, socket.MSG_NOSIGNAL)
        else:  # the filter of system calls leaves only this
            channel.send(data, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise Closed(f"the other side is gone: {error}") from error


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int], int]:
    """The next message, the descriptors beside it, and the writer's process id (0 where the kernel does not say).

    Raises :class:`Closed` at the end, and for anything that is no message.
    """
    room = socket.CMSG_SPACE(_MOST_FDS * 4) + socket.CMSG_SPACE(_CREDENTIALS)
    try:
        data, beside, flags, _ = channel.recvmsg(LARGEST, room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        raise
    except OSError as error:
        raise Closed(f"the other side is gone: {error}") from error
    fds, writer = _beside(beside)
    try:
        message = json.loads(data) if not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) else None
    except (ValueError, RecursionError):
        message = None
    if not data or not isinstance(message, dict):
        for fd in fds:
            os.close(fd)
        raise Closed("the other side wrote what is no message" if data else "the other side is gone")
    return message, fds, writer


def _beside(parts: Sequence[tuple[int, int, bytes]]) -> tuple[list[int], int]:
    fds: list[int] = []
    writer = 0
    for level, kind, data in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found = array.array("i")
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
            fds += found
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            writer = struct.unpack("3i", data[:_CREDENTIALS])[0]
    return fds, writer


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
