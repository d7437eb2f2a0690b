"""Fork here: a replayed node is the node of the rollout."""

from __future__ import annotations

import copy
import runpy
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.models import load_tokenizer
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.core import ToolCall, ToolFailure, ToolResult
from turntree.errors import DataError, ToolError
from turntree.trainers.compose import compose
from turntree.trainers.expansion import random_nodes
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import StoredTree, TreeStore
from turntree.trainers.studio.data import node_name
from turntree.trainers.studio.fork import ForkDesk, _Setting
from turntree.trainers.task import build_task

PLAN = GrowthPlan(trees=1, chains=3, rounds=2, expansions=3, rule=random_nodes)
GuessCore = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "custom_task.py"), run_name="task")["GuessCore"]
LIMITS = Limits(max_turn_tokens=40, max_context_tokens=400)


def speak(context: str, seed: int) -> str:
    draw = zlib.crc32(f"{context[-40:]} {seed}".encode()) % 10
    if draw < 6:
        return f"<think>turn {draw}</think><search>the ruler {draw}</search>"
    return "no action at all" if draw == 6 else f"<answer>number {draw}</answer>"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bed: Any) -> Path:
    """A stored rollout of the search environment, as a run with seed 3 would write it."""
    config = compose([*bed.args, "env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "reward.name=em", "seed=3"])
    tokenizer = load_tokenizer(bed.model)
    task = build_task(config, tokenizer)
    rollout = grow(
        [Prompt(f"0/{i}", task.questions[i]) for i in range(2)],
        core=task.core,
        engine=ScriptedEngine(speak, tokenizer),
        dialogue=Dialogue(tokenizer),
        plan=PLAN,
        sampling=SamplingParams(40, 1.0, stop=tuple(task.core.stop)),
        limits=LIMITS,
        run_seed=3,
    )
    folder = RunFolder.create(tmp_path_factory.mktemp("fork") / "run", config)
    TreeStore(folder.trees).write(1, rollout.groups)
    return folder.path


@pytest.fixture(scope="module")
def desk(run: Path) -> ForkDesk:
    return ForkDesk(RunFolder.open(run))


@pytest.fixture(scope="module")
def stored(run: Path) -> StoredTree:
    return next(TreeStore(run / "trees").read(1))


def open_nodes(stored: StoredTree) -> list[Any]:
    return [node for node in stored.tree.root.walk() if not node.is_leaf]


def test_every_turn_of_the_tree_gets_its_observation_again(desk: ForkDesk, stored: StoredTree) -> None:
    played = 0
    for node in open_nodes(stored):
        for child in node.children:
            answer = desk.play(stored, node_name(node.path), [], child.text)
            assert answer["differs"] is None
            assert answer["observation"] == child.observation
            assert answer["status"] == child.status
            assert answer["kind"] == child.action
            played += 1
    assert played == len(stored.tree.nodes()) - 1 > 8


def test_turns_follow_turns_and_the_end_is_final(desk: ForkDesk, stored: StoredTree) -> None:
    first = desk.play(stored, "root", [], "<search>who rules</search> and more that is never read")
    assert first["status"] == "open"
    assert first["observation"]
    standing = desk.prompt(stored, "root", ["<search>who rules</search>"])
    assert standing["context"] > desk.prompt(stored, "root", [])["context"]
    assert "</search>" in standing["stop"]
    gold = stored.tree.task.golden_answers[0] if stored.tree.task else ""
    last = desk.play(stored, "root", ["<search>who rules</search>"], f"<answer>{gold}</answer>")
    assert (last["status"], last["reward"]) == ("answered", 1.0)
    with pytest.raises(DataError, match="ended"):
        desk.play(stored, "root", ["<search>who rules</search>", f"<answer>{gold}</answer>"], "<search>more</search>")


def test_what_cannot_be_resumed_says_why(desk: ForkDesk, stored: StoredTree) -> None:
    leaf = stored.tree.leaves()[0]
    with pytest.raises(DataError, match="ended its episode"):
        desk.play(stored, node_name(leaf.path), [], "x")
    with pytest.raises(DataError, match=r"no node '7\.7'"):
        desk.play(stored, "7.7", [], "x")
    with pytest.raises(DataError, match="empty text"):
        desk.play(stored, "root", [], "  ")
    with pytest.raises(DataError, match="at most 64"):
        desk.play(stored, "root", ["x"] * 65, "x")


def test_a_changed_corpus_is_noticed(run: Path, stored: StoredTree) -> None:
    node = next(node for node in open_nodes(stored) if node.depth == 1)
    observation, node.observation = node.observation, "what another corpus said"
    try:
        answer = ForkDesk(RunFolder.open(run)).play(stored, node_name(node.path), [], "<search>a</search>")
    finally:
        node.observation = observation
    assert answer["differs"] == node_name(node.path)


def test_paths_with_effects_outside_are_not_played_again(desk: ForkDesk, stored: StoredTree) -> None:
    node = next(node for node in open_nodes(stored) if node.depth == 1)
    node.branchable = False
    try:
        with pytest.raises(DataError, match="outside the episode"):
            ForkDesk(desk.folder).prompt(stored, node_name(node.path), [])
    finally:
        node.branchable = True


class Tool:
    def __init__(self, effects: str, outcome: Any) -> None:
        self.effects, self.outcome = effects, outcome

    def run(self, calls: list[ToolCall]) -> list[Any]:
        return [self.outcome for _ in calls]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (Tool("external", ToolResult(())), "does not call it"),
        (Tool("none", ToolFailure("timeout", "too slow")), r"failed \(timeout\): too slow"),
    ],
)
def test_tools_that_fail_or_reach_outside_play_nothing(
    desk: ForkDesk, stored: StoredTree, tool: Tool, message: str
) -> None:
    setting = desk._ready()
    config = replace(setting.config, env=replace(setting.config.env, tool_retries=0))
    core = _with_tool(setting.core, tool)
    standing = desk._stand(stored, "root", [])
    with pytest.raises(ToolError, match=message):
        replace(setting, core=core, config=config).turn(standing, "<search>a</search>")


def _with_tool(core: Any, tool: Tool) -> Any:
    changed = copy.copy(core)
    changed.tools = {"search": tool}
    return changed


def test_random_streams_are_those_of_the_rollout() -> None:
    """An environment whose hints are wrong at random: only the same streams give the same ones."""
    core = GuessCore(wrong_hints=0.5)
    tokenizer = ByteTokenizer()
    rollout = grow(
        [Prompt("4/1", 1000)],
        core=core,
        engine=ScriptedEngine(lambda context, seed: str(500 + seed % 3), tokenizer),
        dialogue=Dialogue(tokenizer),
        plan=PLAN,
        sampling=SamplingParams(8, 1.0),
        limits=Limits(max_turn_tokens=8, max_context_tokens=2000),
        run_seed=11,
    )
    tree = rollout.groups[0].trees[0]
    stored = StoredTree(1, tree, {})
    config = compose(["seed=11", "model.path=none"])
    setting = _Setting(config, core, [10, 1000], Dialogue(tokenizer), tokenizer)
    assert len({node.observation for node in tree.root.walk()}) > 2
    for node in open_nodes(stored):
        assert setting.replay(stored, node).differs is None
    other = replace(setting, config=compose(["seed=12", "model.path=none"]))
    deep = [node for node in open_nodes(stored) if node.depth >= 6]
    assert any(other.replay(stored, node).differs for node in deep)


def test_the_model_at_hand_writes_turns(desk: ForkDesk, stored: StoredTree) -> None:
    about = desk.describe()
    assert about["model_source"] == "the model that the run began with"
    turn = desk.sample(stored, "root", [], seed=5, temperature=1.0)
    assert turn["text"]
    assert len(turn["ids"]) == len(turn["columns"]["logprob"]) == sum(count for count, _ in turn["pieces"])
    assert desk.sample(stored, "root", [], seed=5, temperature=1.0) == turn
    assert desk.sample(stored, "root", [], seed=6, temperature=1.0) != turn
    with pytest.raises(DataError, match="temperature"):
        desk.sample(stored, "root", [], seed=5, temperature=9.0)


def test_a_turn_is_played_over_http(run: Path, stored: StoredTree, open_studio: Callable[..., Any]) -> None:
    client = open_studio(run)
    place = {"run": "run", "step": 1, "index": 0, "node": "root", "turns": []}
    assert client.ask("/api/fork/resume", body=place).json["done"] is False
    child = stored.tree.root.children[0]
    answer = client.ask("/api/fork/play", body={**place, "text": child.text}).json
    assert (answer["observation"], answer["kind"]) == (child.observation, child.action)
    refused = client.ask("/api/fork/play", body={**place, "node": "9", "text": "x"})
    assert (refused.status, "no node" in refused.json["message"]) == (404, True)
