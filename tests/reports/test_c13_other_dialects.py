"""C13: an unknown grammar is refused with the valid names; calls in another dialect raise a flag."""

from __future__ import annotations

import pytest

from turntree.envs import Question, SearchQAEnv
from turntree.errors import ConfigError
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

BACKEND = BM25Backend.from_passages([Passage("a", "Apple", "red fruit")])
QUESTIONS = [Question("1", "q", ("x",))]


@pytest.mark.parametrize("name", ["hermez", "qwen", "tag"])
def test_c13_an_unknown_grammar_is_refused_with_the_valid_names(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown grammar '{name}'.*valid: atpo, hermes, tags, or an import path"):
        SearchQAEnv(QUESTIONS, search=BACKEND, grammar=name)


def test_c13_a_call_in_another_dialect_is_not_silent() -> None:
    env = SearchQAEnv(QUESTIONS, search=BACKEND)
    env.reset(seed=0)
    *_, info = env.step('<tool_call>\n{"name": "search", "arguments": {"query": "apple"}}\n</tool_call>')
    assert (info["action"], info["other_dialect"], info["searches"]) == ("invalid", True, 0)
    *_, info = env.step("<search>apple</search>")
    assert info["other_dialect"] is False
