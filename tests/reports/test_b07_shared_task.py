"""B07: samples of one prompt share its task; nobody can write into it."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.envs import FrozenDict, Question, SearchQAEnv
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend


def test_b07_what_one_sample_writes_no_other_sees() -> None:
    source: dict[str, Any] = {"evidence": ["d1"], "deep": {"list": [1]}}
    question = Question("1", "q", ("x",), FrozenDict(source))
    source["evidence"].append("written after")
    env = SearchQAEnv([question], search=BM25Backend.from_passages([Passage("1", "Apple", "fruit")]))
    env.reset(seed=0)
    group = [env.fork() for _ in range(4)]
    task: Any = group[0].snapshot().state.task
    for write in (
        lambda: task.metadata.__setitem__("evidence", []),
        lambda: task.metadata["evidence"].append("d2"),
        lambda: task.metadata["deep"].__setitem__("list", []),
        lambda: setattr(task, "question", "other"),
        lambda: setattr(task.metadata, "_data", {}),
    ):
        with pytest.raises((TypeError, AttributeError)):
            write()
    info = group[0].step("<search>apple</search>")[4]
    info["retrieved"].clear()
    infos = [fork.step("<search>apple</search>")[4] for fork in group[1:]]
    assert all(found["retrieved"] == [{"id": "1", "title": "Apple"}] for found in infos)
    assert all(fork.snapshot().state.task.metadata["evidence"] == ("d1",) for fork in group)
