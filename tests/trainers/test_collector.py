"""Prompt streams, and what lies between a rollout and its first update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDictBase

from turntree.agents.engines.hf import HFEngine
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError
from turntree.trainers.build import Bench, build_bench, growth_plan, limits
from turntree.trainers.collector import Collected, PromptStream, TreeCollector, by_node
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import Advantages, grpo
from turntree.trainers.losses import Denominators
from turntree.trainers.metrics import rollout_metrics
from turntree.trainers.objectives import PolicyObjective, combine_metrics
from turntree.trainers.packing import column
from turntree.trainers.preparation import Preparation
from turntree.trainers.rollout import Prompt, Rollout, RolloutStats, grow
from turntree.trainers.task import Task, build_task, rollout_sampling
from turntree.trainers.tree import Group, Node, Status, Tree

MakeGroups = Callable[..., list[Group]]


def questions(count: int) -> list[Question]:
    """Every question has the same text: only instances tell them apart."""
    return [Question(f"q{i}", "Who?", ("yes",)) for i in range(count)]


# Prompts --------------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 12), per_step=st.integers(1, 30), seed=st.integers(0, 9), steps=st.integers(1, 6))
def test_every_epoch_shows_each_question_once(size: int, per_step: int, seed: int, steps: int) -> None:
    stream = PromptStream(questions(size), per_step, seed)
    prompts = [stream.step(step) for step in range(steps)]
    assert all(len({p.uid for p in step}) == per_step for step in prompts), "uids are unique within a step"
    shown = [p.task.id for step in prompts for p in step]
    for start in range(0, len(shown) - size + 1, size):
        assert sorted(shown[start : start + size]) == sorted(q.id for q in stream.questions)


def test_prompts_depend_on_the_seed_and_the_step_alone() -> None:
    stream, again, other = (PromptStream(questions(50), 8, seed) for seed in (1, 1, 2))
    assert [again.step(s) for s in (9, 3, 0)] == [stream.step(s) for s in (9, 3, 0)]
    assert stream.step(3) != other.step(3)
    epochs = [[p.task.id for s in range(50) for p in stream.step(s)][start : start + 50] for start in (0, 50, 100)]
    assert epochs[0] != epochs[1] != epochs[2], "each epoch has its own order"
    assert epochs[0] != [q.id for q in stream.questions]


# From a rollout to packs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(make_config: Callable[..., RunConfig]) -> Bench:
    return build_bench(make_config())


@pytest.fixture(scope="module")
def task(make_config: Callable[..., RunConfig], bench: Bench) -> Task:
    config = make_config()
    return build_task(config, bench.tokenizer)


def collector_of(config: RunConfig, bench: Bench, task: Task, **options: Any) -> TreeCollector:
    def rollout(prompts: Sequence[Prompt]) -> Rollout:
        return grow(
            prompts,
            core=task.core,
            engine=bench.engine,
            dialogue=bench.dialogue,
            plan=growth_plan(config.algorithm),
            sampling=rollout_sampling(config, task.core),
            limits=limits(config),
        )

    settings: dict[str, Any] = {
        "stream": PromptStream(task.questions, 4, 0),
        "rollout": rollout,
        "preparation": prepare_with(bench, temperature=config.sampling.temperature),
        "first_step": 0,
        "last_step": 3,
    }
    return TreeCollector(**{**settings, **options})


def prepare_with(bench: Bench, **options: Any) -> Preparation:
    settings: dict[str, Any] = {"credit": grpo, "groups_per_update": 4, "max_pack_tokens": 300}
    return Preparation(model=bench.model, **{**settings, **options})


def taken(batch: TensorDictBase) -> Collected:
    found = batch.get_non_tensor("collected")
    assert isinstance(found, Collected)
    return found


@pytest.fixture(scope="module")
def collected(make_config: Callable[..., RunConfig], bench: Bench, task: Task) -> Collected:
    batch = next(
        iter(
            collector_of(
                make_config(), bench, task, preparation=prepare_with(bench, reference=bench.model, groups_per_update=3)
            )
        )
    )
    found = taken(batch)
    assert int(batch["collector", "mask"].sum()) == found.rollout.stats.generated_tokens > 0
    return found


def test_engine_and_trainer_agree_in_float32(collected: Collected, bench: Bench) -> None:
    assert isinstance(bench.engine, HFEngine)
    assert 0 <= collected.metrics["mismatch/mean"] <= collected.metrics["mismatch/max"] < 1e-4


def test_temperature_reaches_engine_and_trainer_alike(
    make_config: Callable[..., RunConfig], bench: Bench, task: Task
) -> None:
    config = make_config("sampling.temperature=0.6")
    hot = taken(next(iter(collector_of(config, bench, task))))
    assert hot.metrics["mismatch/max"] < 1e-4
    cold = taken(next(iter(collector_of(config, bench, task, preparation=prepare_with(bench)))))
    assert cold.metrics["mismatch/max"] > 1e-2


@pytest.mark.parametrize("ratio", ["token", "turn", "sequence"])
def test_before_the_first_update_nothing_is_off_policy(collected: Collected, bench: Bench, ratio: Any) -> None:
    objective = PolicyObjective(bench.model, ratio=ratio, kl_coef=0.1)
    packs = collected.minibatches[0]
    with torch.no_grad():
        metrics = combine_metrics([objective(pack, Denominators.of(packs)) for pack in packs])
    assert metrics["ratio_mean_token"] == pytest.approx(1.0, abs=1e-6)
    for level in ("token", "turn", "sequence"):
        assert metrics[f"ess_{level}"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0


def test_mini_batches_are_whole_groups_with_their_own_advantages(collected: Collected) -> None:
    assert [len(g.scored_leaves()) for g in collected.groups] == [6] * 4
    assert len(collected.minibatches) == 2
    assert len(collected.minibatches[0]) > 1, "several packs"
    for first, packs in zip((0, 3), collected.minibatches):
        for pack in packs:
            groups, leaves = (column(pack, "rows", name).tolist() for name in ("group", "leaf"))
            leaf_of, turn = column(pack, "occurrences", "leaf").tolist(), column(pack, "occurrences", "turn_index")
            for occurrence, row in enumerate(leaf_of):
                values = collected.advantages.values[first + groups[row]][leaves[row]]
                written = float(column(pack, "occurrences", "advantage")[occurrence])
                assert written == pytest.approx(values[turn[occurrence]])
    seen = sum(len(column(pack, "rows", "leaf")) for packs in collected.minibatches for pack in packs)
    assert seen == 24


def test_the_collector_stops_where_it_is_told(make_config: Callable[..., RunConfig], bench: Bench, task: Task) -> None:
    config = make_config()
    steps = [taken(b).step for b in collector_of(config, bench, task, first_step=1, last_step=3)]
    assert steps == [1, 2]
    assert list(collector_of(config, bench, task, should_stop=lambda: True)) == []
    assert list(collector_of(config, bench, task, first_step=3)) == []
    closed = collector_of(config, bench, task)
    assert len(closed) == 3
    iterator = iter(closed)
    next(iterator)
    closed.shutdown()
    assert list(iterator) == []
    later = collector_of(config, bench, task)
    later.load_state_dict(closed.state_dict())
    assert later.next_step == 1


def test_small_groups_are_dropped_and_counted(random_groups: MakeGroups, tiny_llama: Any) -> None:
    groups = random_groups(0, groups=3)
    preparation = Preparation(
        credit=grpo, model=tiny_llama, groups_per_update=8, max_pack_tokens=200, min_scored_leaves=1000
    )
    result = preparation.prepare(Rollout(tuple(groups), RolloutStats(prompts=3)))
    assert result.rollout.groups == ()
    assert result.minibatches == []
    assert result.metrics["budget/dropped_groups"] == 3
    assert math.isnan(result.metrics["critic/rewards/mean"])
    assert math.isnan(result.metrics["mismatch/max"])


def test_dynamic_sampling_looks_for_groups_that_are_not_dropped_afterwards(tiny_llama: Any) -> None:
    def group(uid: str, *rewards: float | None) -> Group:
        root = Node(observation_ids=(1, 2))
        for ordinal, reward in enumerate(rewards):
            status: Status = "failed" if reward is None else "answered"
            root.add_child(Node(ordinal=ordinal, turn_ids=(3,), logprobs=(-1.0,), status=status, reward=reward))
        return Group(uid, [Tree(root, uid)])

    mixed = group("mixed", 1.0, 0.0)
    found = iter([group("failed", 1.0, None), mixed])
    collector = TreeCollector(
        stream=PromptStream(questions(2), 1, 0),
        rollout=lambda prompts: Rollout((next(found),), RolloutStats(prompts=len(prompts))),
        preparation=Preparation(credit=grpo, model=tiny_llama, groups_per_update=1, max_pack_tokens=50),
        first_step=0,
        last_step=1,
        dynamic_sampling=2,
    )
    result = taken(collector.collect(0))
    assert result.groups == (mixed,)
    assert (result.metrics["tree/sampling/batches"], result.metrics["tree/sampling/filtered_groups"]) == (2, 1)


# Reports --------------------------------------------------------------------------------------------------------------


def test_advantages_by_node_average_tokens_over_their_turn(random_groups: MakeGroups) -> None:
    groups = random_groups(5)
    per_token = Advantages(
        "token",
        tuple(
            tuple(np.arange(sum(len(n.turn_ids) for n in leaf.trajectory()), dtype=float) for leaf in g.scored_leaves())
            for g in groups
        ),
    )
    found = by_node(groups, per_token)
    for group in groups:
        for leaf in group.scored_leaves():
            start = 0
            for node in leaf.trajectory():
                end = start + len(node.turn_ids)
                if end > start:
                    assert found[leaf, node] == pytest.approx((start + end - 1) / 2)
                start = end


def test_mixed_groups_are_those_whose_rewards_differ(random_groups: MakeGroups) -> None:
    groups = random_groups(1, groups=4)
    for leaf in groups[0].scored_leaves():
        leaf.reward = 0.5
    mixed = sum(len({leaf.reward for leaf in g.scored_leaves()}) > 1 for g in groups)
    assert rollout_metrics(Rollout(tuple(groups), RolloutStats()))["tree/mixed_groups"] == mixed / 4 < 1


def test_c13_turns_in_another_dialect_are_counted_and_warned_about(
    make_config: Callable[..., RunConfig], bench: Bench, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    collector = collector_of(make_config(), bench, task)
    rollout = collector.rollout(collector.stream.step(0))
    assert collector.prepare(0, rollout).metrics["actions/unparsed_frac"] == 0
    assert not caplog.records
    turns = [n for group in rollout.groups for tree in group.trees for n in tree.nodes() if n.turn_ids]
    for node in turns[: len(turns) // 2]:
        node.info = FrozenDict({**node.info, "other_dialect": True})
    metrics = collector.prepare(1, rollout).metrics
    assert metrics["actions/unparsed_frac"] == len(turns) // 2 / len(turns)
    assert "another dialect" in caplog.text


def test_a_context_beyond_the_models_positions_is_refused(make_config: Callable[..., RunConfig]) -> None:
    with pytest.raises(ConfigError, match=r"max_context_tokens=2049.*has 2048 positions"):
        build_bench(make_config("sampling.max_context_tokens=2049"))
    build_bench(make_config("sampling.max_context_tokens=2048"))
