"""The code tool: Python for an episode, isolated, remembering its variables, forkable."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turntree.envs.core import Effects, ToolCall, ToolFailure, ToolResult
from turntree.envs.history import History
from turntree.envs.loading import reject_unknown
from turntree.envs.sandbox.options import SandboxOptions
from turntree.envs.sandbox.pool import Cell, Pool, pool_of
from turntree.envs.sandbox.sandbox import CellResult
from turntree.envs.sandbox.walls import choose_walls
from turntree.envs.schemas import text_schema
from turntree.envs.task import FrozenDict
from turntree.errors import ReplayError, ToolError

__all__ = ["PythonTool"]

_SIBLINGS = 32  # threads that wait for interpreters; the pool bounds how many cells run


class PythonTool:
    """Executes Python. A call's argument is a cell; its result is what a prompt would show for it.

    Variables stay from cell to cell of an episode. What the tool remembers is the list of cells and their results,
    shared between an episode and its forks; a fork goes on from a live interpreter, or from a fresh one that executed
    the cells again. ``options`` are those of :class:`SandboxOptions`, by name or as one object.

    Raises ``ConfigError`` for unknown options, and where the machine cannot isolate code.
    """

    effects: Effects = "in_state"
    schema = text_schema("code", "Python code. What it prints and the value of its last line are shown.")

    def __init__(self, options: SandboxOptions | None = None, **named: Any) -> None:
        reject_unknown(named, [f.name for f in dataclasses.fields(SandboxOptions)], what="option of the code tool")
        self.options = dataclasses.replace(options or SandboxOptions(), **named)
        choose_walls(self.options)

    @property
    def description(self) -> str:
        """One line on what the tool does, with the packages it has."""
        more = f" and {', '.join(self.options.packages)}" if self.options.packages else ""
        return f"runs Python with the standard library{more}; variables stay, output and the last value are shown"

    @property
    def fingerprint(self) -> str:
        """Changes with limits, packages and the version of Python: with others, cells may give other results."""
        version = ".".join(map(str, sys.version_info[:3]))
        return f"python/1/{version}/{_versions(self.options.packages)}/{self.options.fingerprint}"

    @property
    def pool(self) -> Pool:
        """The interpreters of this process."""
        return pool_of(self.options)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        """Execute the cells, as many at a time as there are cores; one outcome each, in the same order."""
        pool = self.pool
        if len(calls) < 2:
            return [self._one(pool, call) for call in calls]
        with ThreadPoolExecutor(min(len(calls), _SIBLINGS), "turntree-cell") as threads:
            return list(threads.map(functools.partial(self._one, pool), calls))

    def _one(self, pool: Pool, call: ToolCall) -> ToolResult | ToolFailure:
        """One cell. Whatever the code did is a result; that there was nothing to run it in is a failure."""
        if len(call.argument) > self.options.code_chars:
            told = f"error: expected at most {self.options.code_chars} characters of code, found {len(call.argument)}"
            return ToolResult(told, memory=call.memory)
        code = call.argument.encode("utf-8", "replace").decode()
        cells = _cells(call.memory)
        try:
            result = pool.run(tuple(cells), code)
        except ReplayError as error:
            return ToolFailure("ReplayError", str(error))
        except (ToolError, OSError) as error:
            return ToolFailure("sandbox", str(error))
        if result.ending != "done":
            return ToolResult(self._stopped(result), memory=None)
        return ToolResult(result.text.rstrip("\n"), memory=FrozenDict({"cells": cells.append((code, result.text))}))

    def _stopped(self, result: CellResult) -> str:
        """What is said of a cell that took its interpreter with it; not what it wrote, which may differ each time."""
        why = {
            "cpu": f"the code used more than {self.options.cpu_s:g} seconds of processor time and was stopped",
            "wall": f"the code took longer than {self.options.wall_s:g} seconds and was stopped",
        }.get(result.ending, "the interpreter ended before the code did")
        return f"error: {why}. A new interpreter was started: all variables are gone."


def _cells(memory: Any) -> History[Cell]:
    """The cells so far, from what the last call left."""
    if memory is None:
        return History()
    found = memory.get("cells") if isinstance(memory, Mapping) else None
    if not isinstance(found, History) or not all(map(_is_cell, found)):
        raise ToolError(f"expected the memory of the code tool (cells and their results), found {memory!r:.200}")
    return found


def _is_cell(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


@functools.cache
def _versions(packages: tuple[str, ...]) -> str:
    from importlib.metadata import PackageNotFoundError, packages_distributions, version

    names = packages_distributions() if packages else {}
    found = []
    for package in packages:
        try:
            found.append(f"{package}={version(names.get(package, [package])[0])}")
        except PackageNotFoundError:
            found.append(package)
    return ",".join(found)
