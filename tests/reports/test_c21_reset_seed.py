"""C21: reset(seed) is reproducible, never out of range, and leaves the global generators alone."""

from __future__ import annotations

import random

import numpy as np

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend


def test_c21_seeds_are_reproducible_and_globals_untouched() -> None:
    questions = [Question(str(i), f"question {i}", ("x",)) for i in range(3)]
    env = SearchQAEnv(questions, search=BM25Backend.from_passages([Passage("1", "t", "text")]))
    before, before_numpy = random.getstate(), repr(np.random.get_state())  # noqa: NPY002 - must stay untouched
    first = [env.reset(seed=7), env.reset(), env.step("<search>t</search>")]
    second = [env.reset(seed=7), env.reset(), env.step("<search>t</search>")]
    assert first == second
    drawn = [env.reset()[1]["task_index"] for _ in range(10_000)]
    assert set(drawn) == {0, 1, 2}
    assert all(3000 < drawn.count(index) < 3700 for index in range(3))
    assert random.getstate() == before
    assert repr(np.random.get_state()) == before_numpy  # noqa: NPY002
