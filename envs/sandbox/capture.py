"""The text of a result: the beginning and the end of what a cell wrote, however much that was."""

from __future__ import annotations

import codecs
import re

__all__ = ["Capture"]

# Addresses of objects say nothing, and are the only part of a plain result that differs between two processes.
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")


class Capture:
    """Takes bytes as they come; holds at most ``limit`` characters of them, and half as many again of the end."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._head = ""
        self._tail = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, *, final: bool = False) -> None:
        text = self._decoder.decode(data, final)
        self.total += len(text)
        room = self.limit - len(self._head)
        self._head += text[:room]
        if len(text) > room:
            self._tail = (self._tail + text[room:])[-(self.limit // 2) :]

    def text(self) -> str:
        """Everything, or beginning and end with a line between them that says how much is missing."""
        self.feed(b"", final=True)
        if self.total <= self.limit:
            return _ADDRESS.sub("at 0x...", self._head)
        half = self.limit // 2
        end = (self._head + self._tail)[-half:]
        kept = self._head[: self.limit - half]
        cut = self.total - len(kept) - len(end)
        return _ADDRESS.sub("at 0x...", f"{kept}\n... [{cut} characters left out] ...\n{end}")
