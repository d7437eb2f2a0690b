"""C11: each result is shown once, for the first call of the turn only, in call order."""

from __future__ import annotations

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

BACKEND = BM25Backend.from_passages([Passage("a", "Apple", "red fruit"), Passage("b", "Banana", "yellow fruit")])


def test_c11_of_two_searches_in_a_turn_the_first_is_executed_once() -> None:
    env = SearchQAEnv([Question("1", "q", ("x",))], search=BACKEND, max_turns=5)
    env.reset(seed=0)
    observation, *_, info = env.step("<search>apple</search><search>banana</search>")
    assert observation.count("red fruit") == 1
    assert "yellow" not in observation
    assert (info["searches"], info["retrieved"]) == (1, [{"id": "a", "title": "Apple"}])
    second, *_ = env.step("<search>banana</search>")
    assert "red" not in second
    assert second.count("yellow fruit") == 1
    assert env.calls.attempts == {"search": 2}
