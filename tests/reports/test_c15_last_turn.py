"""C15: the last turn is announced; a search in it is not run, and no empty result is faked."""

from __future__ import annotations

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend


def test_c15_a_search_in_the_last_turn_ends_the_episode_truncated() -> None:
    backend = BM25Backend.from_passages([Passage("a", "Apple", "red fruit")])
    env = SearchQAEnv([Question("1", "q", ("x",))], search=backend, max_turns=2)
    prompt, _ = env.reset(seed=0)
    assert "No searches are left" not in prompt
    observation, *_ = env.step("<search>apple</search>")
    assert "red fruit" in observation
    assert observation.rstrip().endswith(
        "No searches are left. Give the final answer now between <answer> and </answer>."
    )
    observation, reward, terminated, truncated, info = env.step("<search>apple</search>")
    assert (observation, reward, terminated, truncated) == ("", 0, False, True)
    assert (info["stop_reason"], info["searches"]) == ("turns", 1)
    assert env.calls.calls == {"search": 1}
