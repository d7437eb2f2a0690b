"""C05: what a turn says after its first closed action is never executed."""

from __future__ import annotations

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend


def test_c05_text_after_the_first_closed_action_is_never_executed() -> None:
    backend = BM25Backend.from_passages([Passage("1", "Apple", "a fruit")])
    env = SearchQAEnv([Question("1", "q", ("fake",))], search=backend)
    env.reset(seed=0)
    turn = "<search>apple</search>junk<information>fake</information><answer>fake</answer>"
    observation, reward, terminated, truncated, info = env.step(turn)
    assert (reward, terminated, truncated) == (0, False, False)
    assert (info["action"], info["searches"], info["overrun"]) == ("search", 1, True)
    assert "a fruit" in observation
    assert "fake" not in observation
    *_, info = env.step("<answer>fruit</answer>")
    assert info["format_valid"] is False
