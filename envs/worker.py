"""A function in a process of its own, asked over pipes, killed when it takes too long."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO, Any

from turntree.envs.core import ToolFailure, ToolResult
from turntree.errors import ConfigError

__all__ = ["Worker"]

_STARTS_WITHIN_S = 60.0
"""Seconds that the process may take to import the function's module, beside the limit of the call."""


class Worker:
    """One process that answers one question at a time; it is started when it is needed, and again after a kill.

    Questions and answers are lines of JSON. What the function prints goes to the standard error of this process.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._end: Callable[[], Any] = _nothing

    @staticmethod
    def of(function: Callable[..., Any]) -> Worker:
        """A worker for a function that can be imported by name. Raises ``ConfigError`` for any other."""
        path = f"{function.__module__}:{function.__qualname__}"
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise ConfigError(f"process=True: expected a function that can be imported by name, found {path}")
        return Worker(path)

    def ask(self, question: dict[str, Any], timeout_s: float | None) -> ToolResult | ToolFailure:
        """The function's outcome; a failure when it takes longer or the process dies."""
        with self._lock:
            try:
                process = self._running()
                assert process.stdin is not None
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = self._lines.get(timeout=timeout_s)
            except queue.Empty:
                self.close()
                return ToolFailure("timeout", f"no result within {timeout_s:g} s; its process was killed")
            except OSError as error:
                self.close()
                return ToolFailure("process", f"its process is gone: {error}")
            if not line:
                self.close()
                return ToolFailure("process", "its process ended without an answer")
        return _read(line)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            paths = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from turntree.envs.worker import serve; serve()", self.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                env={**os.environ, "PYTHONPATH": paths},
            )
            self._lines = queue.Queue()
            assert self._process.stdout is not None
            reader = threading.Thread(target=_pump, args=(self._process.stdout, self._lines), daemon=True)
            reader.start()
            self._end = weakref.finalize(self, _end, self._process, reader)
            self._greeted()
        return self._process

    def _greeted(self) -> None:
        """Wait until the module is imported, so that this does not count against the first call."""
        try:
            line = self._lines.get(timeout=_STARTS_WITHIN_S)
        except queue.Empty:
            line = ""
        if line.strip() != "ready":
            raise OSError(f"{self.path} could not be imported in another process")

    def close(self) -> None:
        """Kill the process, if there is one; so does the end of this object and of the program."""
        if self._process is not None:
            self._end()
            self._process = None


def _nothing() -> None: ...


def _end(process: subprocess.Popen[str], reader: threading.Thread) -> None:
    process.kill()
    process.wait()
    reader.join()  # a pipe must not be closed while somebody reads it
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _pump(stream: IO[str], lines: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put("")


def _read(line: str) -> ToolResult | ToolFailure:
    answer = json.loads(line)
    if "bug" in answer:
        raise TypeError(answer["bug"])
    if "failure" in answer:
        return ToolFailure(*answer["failure"])
    return ToolResult(answer["value"], memory=answer["memory"])


def serve() -> None:
    """Answer questions from standard input until it is closed: what the process does."""
    from turntree.envs.functions import FunctionTool, answer

    out, sys.stdout = sys.stdout, sys.stderr
    module, _, name = sys.argv[1].partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    function = function.function if isinstance(function, FunctionTool) else function
    out.write("ready\n")
    out.flush()
    for line in sys.stdin:
        question = json.loads(line)
        arguments = question.pop("arguments")
        try:
            outcome = answer(function, arguments, question)
        except TypeError as error:
            told: dict[str, Any] = {"bug": str(error)}
        else:
            told = _told(outcome)
        out.write(json.dumps(told) + "\n")
        out.flush()


def _told(outcome: ToolResult | ToolFailure) -> dict[str, Any]:
    if isinstance(outcome, ToolFailure):
        return {"failure": [outcome.kind, outcome.message]}
    return {"value": outcome.value, "memory": outcome.memory}
