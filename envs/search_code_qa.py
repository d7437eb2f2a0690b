"""Multi-turn question answering with a search tool and a Python interpreter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from turntree.envs.loading import reject_unknown
from turntree.envs.sandbox.tool import PythonTool
from turntree.envs.search_qa import SearchQAEnv
from turntree.envs.task import Question
from turntree.envs.vector import vectorized
from turntree.errors import ConfigError
from turntree.search_backend.passage import SearchBackend

__all__ = ["SEARCH_CODE_QA", "SearchCodeQAEnv", "code_world", "make_search_code_qa", "python_tool"]


SEARCH_CODE_QA = "turntree/SearchCodeQA-v0"
"""The Gymnasium id of search and code."""


def python_tool(options: Mapping[str, Any] | PythonTool | None = None) -> PythonTool:
    """The code tool from its options (:class:`turntree.envs.sandbox.SandboxOptions`), or itself."""
    if isinstance(options, PythonTool):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"python: expected the options of the code tool by name, found {options!r:.200}")
    return PythonTool(**{str(name): value for name, value in (options or {}).items()})


class SearchCodeQAEnv(SearchQAEnv):
    """``turntree/SearchCodeQA-v0``: :class:`SearchQAEnv` with the tool ``python`` beside the search.

    Takes the options of ``SearchQAEnv``, and ``python``: the options of the code tool (limits, ``packages``,
    ``allow_unisolated``) or a :class:`PythonTool`. Without questions a world with code questions is used. Raises
    ``ConfigError`` where the machine cannot isolate code.
    """

    def __init__(self, *args: Any, python: Mapping[str, Any] | PythonTool | None = None, **options: Any) -> None:
        known = [name for name in inspect.signature(SearchQAEnv).parameters if name != "unknown"]
        reject_unknown(options, [*known, "python"], what="environment option")
        tools = dict(options.pop("tools", None) or {})
        if "python" in tools:
            raise ConfigError("tools.python: this environment has a tool of this name; give its options as python")
        if not args and options.get("questions") is None and not options.keys() & {"corpus", "search"}:
            options["questions"], options["search"] = code_world()
        super().__init__(*args, tools={"python": python_tool(python), **tools}, **options)


@functools.cache
def code_world() -> tuple[Sequence[Question], SearchBackend]:
    """A small world with code questions."""
    from turntree.envs.worlds import generate_world
    from turntree.search_backend.bm25 import BM25Backend

    world = generate_world("code", seed=0)
    return tuple(world.questions), BM25Backend.from_passages(world.passages)


make_search_code_qa = vectorized(SearchCodeQAEnv)
"""The ``vector_entry_point`` of ``turntree/SearchCodeQA-v0``."""
