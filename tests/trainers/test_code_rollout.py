"""Trees of episodes with code: siblings go on from one interpreter, failures are leaves, batches run together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.core import ToolFailure
from turntree.envs.limits import Limits as EnvLimits
from turntree.envs.sandbox import PythonTool, probe
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.envs.worlds import generate_world
from turntree.search_backend import BM25Backend, Passage
from turntree.trainers.compose import compose
from turntree.trainers.expansion import random_nodes
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, Rollout, grow
from turntree.trainers.task import build_task

pytestmark = pytest.mark.skipif(bool(probe().missing), reason=f"no isolation here: {probe().missing}")

TOKENS = ByteTokenizer()
PLAN = GrowthPlan(trees=2, chains=1, rounds=2, expansions=3, rule=random_nodes)


def speak(context: str, seed: int) -> str:
    """A cell that shows what earlier cells of this very episode left, then an answer."""
    cells = context.count("<python>")
    if cells >= 4:
        return f"<answer>{seed % 3}</answer>"
    return f"<python>seen = globals().get('seen', []) + [{seed % 7}]\nlen(seen), seen</python>"


def tool(**options: Any) -> PythonTool:
    return PythonTool(wall_s=60, **options)


def play(python: PythonTool, engine: Callable[[str, int], str] = speak) -> Rollout:
    core = SearchQACore(
        BM25Backend.from_passages([Passage("p", "t", "x")]), limits=EnvLimits(max_turns=6), tools={"python": python}
    )
    prompts = [Prompt(f"p{i}", Question(f"q{i}", "Which?", ("1",))) for i in range(2)]
    return grow(
        prompts,
        core=core,
        engine=ScriptedEngine(engine, TOKENS),
        dialogue=Dialogue(TOKENS),
        plan=PLAN,
        sampling=SamplingParams(max_tokens=1, stop=("</python>", "</answer>")),
        limits=Limits(max_turn_tokens=200, max_context_tokens=9000, tool_backoff_s=0.0),
    )


def observations(rollout: Rollout) -> list[list[list[str]]]:
    return [
        [[node.observation for node in leaf.trajectory()] for leaf in tree.leaves()]
        for group in rollout.groups
        for tree in group.trees
    ]


def test_each_leaf_saw_its_own_variables_only() -> None:
    python = tool()
    rollout = play(python)
    assert not rollout.stats.errors
    found = observations(rollout)
    assert sum(len(leaves) for leaves in found) > 8
    for path in (path for leaves in found for path in leaves):
        lengths = [text.split("(")[1].split(",")[0] for text in path if "(" in text]
        assert lengths == [str(i + 1) for i in range(len(lengths))]
    assert python.pool.counts.forked > 0
    assert found == observations(play(tool(live=0)))
    python.pool.close()


def test_no_interpreter_makes_failed_leaves_not_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonTool, "_one", lambda self, pool, call: ToolFailure("ReplayError", "not the same"))
    rollout = play(tool())
    leaves = [leaf for group in rollout.groups for tree in group.trees for leaf in tree.leaves()]
    assert {leaf.status for leaf in leaves} == {"failed"}
    assert all(leaf.reward is None for leaf in leaves)


def test_a_run_is_configured_by_the_options_of_question_answering(tmp_path: Path) -> None:
    generate_world("code", seed=0, questions=20).save(tmp_path)
    options = ["env.id=turntree/SearchCodeQA-v0", f"env.questions={tmp_path}", "env.max_turns=5"]
    made = build_task(compose([*options, "env.args.python.wall_s=60", "search.top_k=1"]), TOKENS)
    core: Any = made.core
    assert set(core.tools) == {"search", "python"}
    assert core.tools["python"].options.wall_s == 60
    assert (core.limits.max_turns, core.limits.top_k) == (5, 1)
    plain = [*options, "env.id=turntree/SearchQA-v0", "env.tools.python.path=turntree.envs.sandbox:PythonTool"]
    named = build_task(compose([*plain, "env.tools.python.args.wall_s=60", "search.top_k=1"]), TOKENS)
    assert named.core.fingerprint == core.fingerprint
    assert json.loads(json.dumps(made.arguments)) == {"python": {"wall_s": 60}}
