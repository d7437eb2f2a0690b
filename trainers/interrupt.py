"""Ctrl-C at a clean point: the first one asks for a stop, the second one stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["stop_on_interrupt"]

_log = logging.getLogger(__name__)


@contextmanager
def stop_on_interrupt(unit: str) -> Iterator[threading.Event]:
    """Inside the block the first Ctrl-C sets the event, the second one raises ``KeyboardInterrupt``.

    ``unit`` names what is finished before the stop ("training step"). Threads other than the main one cannot handle
    signals: there the event is never set and Ctrl-C stays what it was.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()
        _log.warning("Ctrl-C: stopping after this %s; press it again to stop at once", unit)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield requested
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if previous is None else previous)
