"""Supervised training: what the loss sees, its denominator, resuming, and demonstrations that do not fit."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from turntree.agents.dialogue import Dialogue
from turntree.agents.models import load_tokenizer
from turntree.agents.teacher import Demonstration, DemonstrationTurn
from turntree.errors import CheckpointError, ConfigError, DataError, DivergenceError
from turntree.trainers.checkpoint import latest_checkpoint
from turntree.trainers.config import SftConfig
from turntree.trainers.packing import column, pack_groups, table
from turntree.trainers.sft import batch_order, demonstration_group, learning_rate_factor, nll, train_sft
from turntree.trainers.tree import Group, Node, Tree
from turntree.trainers.tree_attention import AttentionPlan, plan_attention

SMALL = SftConfig(steps=8, batch_size=3, learning_rate=3e-3, warmup_steps=2, save_every=3)


def row(prompt: int, *turns: tuple[int, int], start: int = 1) -> Group:
    """One trajectory; each turn is (sampled tokens, observation tokens)."""
    ids = iter(range(start, 10_000))

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(ids) % 23 for _ in range(count))

    root = node = Node(observation_ids=take(prompt))
    for sampled, observed in turns:
        node = node.add_child(Node(turn_ids=take(sampled), logprobs=(0.0,) * sampled, observation_ids=take(observed)))
    node.status, node.reward = "answered", 1.0
    return Group(f"r{start}", [Tree(root, f"r{start}")])


GROUPS = [row(3, (4, 2), (2, 0)), row(5, (3, 0), start=7), row(2, (1, 6), (5, 0), start=13), row(4, (2, 0), start=3)]


def fresh(tiny_llama: Any) -> Any:
    return copy.deepcopy(tiny_llama)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# The loss -------------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_model_tokens(tiny_llama: Any) -> None:
    """By a plain forward pass: no packing, no tables."""
    values: list[float] = []
    for group in GROUPS:
        ids: list[int] = []
        sampled: list[bool] = []
        for node in group.trees[0].nodes():
            ids += [*node.turn_ids, *node.observation_ids]
            sampled += [True] * len(node.turn_ids) + [False] * len(node.observation_ids)
        with torch.no_grad():
            logp = torch.log_softmax(tiny_llama(torch.tensor([ids])).logits[0], dim=-1)
        values += [-float(logp[i - 1, ids[i]]) for i in range(len(ids)) if sampled[i]]
    assert len(values) == 4 + 2 + 3 + 1 + 5 + 2
    assert nll(tiny_llama, pack_groups(GROUPS, max_pack_tokens=1000)) == pytest.approx(np.mean(values), abs=1e-5)


def test_splitting_into_packs_changes_nothing(tiny_llama: Any) -> None:
    one, many = (pack_groups(GROUPS, max_pack_tokens=size) for size in (1000, 9))
    assert (len(one), len(many) > 2) == (1, True)
    results = []
    for packs in (one, many):
        model = fresh(tiny_llama)
        results.append((nll(model, packs, backward=True), gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-6, rtol=1e-4)


def test_observations_are_context_and_never_targets(tiny_llama: Any) -> None:
    """What comes after the last turn is no one's context and no one's target; what comes before one is context."""
    base = row(3, (2, 3))
    for changed in (0, -1):
        other = copy.deepcopy(base)
        node = other.trees[0].leaves()[0]
        ids = list(node.observation_ids)
        ids[changed] = (ids[changed] + 5) % 23
        node.observation_ids = tuple(ids)
        models = [fresh(tiny_llama), fresh(tiny_llama)]
        losses = [nll(m, pack_groups([g], max_pack_tokens=99), backward=True) for m, g in zip(models, (base, other))]
        assert losses[0] == losses[1]
        assert all(torch.equal(a, b) for a, b in zip(gradients(models[0]).values(), gradients(models[1]).values()))
    inner = row(3, (2, 3), (2, 0))
    other = copy.deepcopy(inner)
    middle = other.trees[0].nodes()[1]
    middle.observation_ids = tuple((i + 5) % 23 for i in middle.observation_ids)
    values = [nll(tiny_llama, pack_groups([g], max_pack_tokens=99)) for g in (inner, other)]
    assert values[0] != values[1], "what the model read before a turn does matter to it"


def test_a_pack_without_model_tokens_adds_nothing(tiny_llama: Any) -> None:
    packs = pack_groups(GROUPS, max_pack_tokens=1000)
    silent = copy.deepcopy(packs[0])
    table(silent, "tokens").set("loss_mask", torch.zeros_like(column(silent, "tokens", "loss_mask")))
    assert nll(tiny_llama, [silent, *packs]) == nll(tiny_llama, packs)
    assert nll(tiny_llama, [silent], backward=True) == 0.0


# Demonstrations -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dialogue(bed: Any) -> Dialogue:
    return Dialogue(load_tokenizer(bed.model))


DEMO = Demonstration(
    "q7",
    "Who is the ally of Pabi?",
    (DemonstrationTurn("<search> Pabi ally </search>", " 结果 👍 <information> Rofu </information>"),
     DemonstrationTurn("<answer> Rofu </answer>", "")),
    reward=1.0,
    em=1.0,
)  # fmt: skip


def test_a_demonstration_is_masked_by_provenance(dialogue: Dialogue) -> None:
    (pack,) = pack_groups([demonstration_group(DEMO, dialogue, uid="u", max_tokens=500)], max_pack_tokens=500)
    ids, mask = column(pack, "tokens", "ids"), column(pack, "tokens", "loss_mask")
    tokenizer: Any = dialogue.tokenizer
    assert tokenizer.decode(ids[mask].tolist()) == DEMO.turns[0].text + DEMO.turns[1].text
    assert DEMO.turns[0].observation in tokenizer.decode(ids[~mask].tolist())


def test_a_demonstration_that_does_not_fit_is_refused(dialogue: Dialogue) -> None:
    group = demonstration_group(DEMO, dialogue, uid="q7", max_tokens=500)
    length = sum(len(n.turn_ids) + len(n.observation_ids) for n in group.trees[0].nodes())
    demonstration_group(DEMO, dialogue, uid="q7", max_tokens=length)
    with pytest.raises(DataError, match=rf"q7 has {length} tokens.*sampling\.max_context_tokens={length - 1}"):
        demonstration_group(DEMO, dialogue, uid="q7", max_tokens=length - 1)
    with pytest.raises(DataError, match="at least one turn"):
        demonstration_group(dataclasses.replace(DEMO, turns=()), dialogue, uid="q7", max_tokens=500)


# Training -------------------------------------------------------------------------------------------------------------


def run(model: Any, folder: Path | None = None, *, config: SftConfig = SMALL, **options: Any) -> Any:
    return train_sft(model, GROUPS, config=config, seed=1, max_pack_tokens=30, checkpoints=folder, **options)


def test_training_learns_the_demonstrations(tiny_llama: Any) -> None:
    model = fresh(tiny_llama)
    result = run(model, config=dataclasses.replace(SMALL, steps=150, learning_rate=1e-2))
    assert (result.steps, result.skipped, len(result.losses)) == (150, 0, 150)
    assert result.losses[-1] < 0.2 * result.losses[0]
    assert not model.training


def test_stopped_and_resumed_is_never_stopped(tiny_llama: Any, tmp_path: Path) -> None:
    straight = fresh(tiny_llama)
    whole = run(straight)
    model = fresh(tiny_llama)
    seen: list[int] = []
    part = run(model, tmp_path, on_step=lambda step, loss: seen.append(step), should_stop=lambda: len(seen) == 4)
    assert (part.steps, seen) == (4, [1, 2, 3, 4])
    again = fresh(tiny_llama)
    rest = run(again, tmp_path, resume=True, on_step=lambda step, loss: seen.append(step))
    assert seen == list(range(1, 9))
    assert rest.losses == whole.losses
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), straight.parameters()))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000008"], "one checkpoint, written once"
    assert run(fresh(tiny_llama), tmp_path, resume=True).losses == whole.losses


def test_resume_with_another_fingerprint_is_refused(tiny_llama: Any, tmp_path: Path) -> None:
    run(fresh(tiny_llama), tmp_path, fingerprint={"sft.learning_rate": 1.0, "seed": 1})
    with pytest.raises(CheckpointError, match=r"sft\.learning_rate"):
        run(fresh(tiny_llama), tmp_path, resume=True, fingerprint={"sft.learning_rate": 2.0, "seed": 1})


def test_seconds_bound_the_training(tiny_llama: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, steps=100_000, max_seconds=0.2)
    result = run(fresh(tiny_llama), tmp_path, config=config)
    assert 0 < result.steps < 100_000
    assert result.seconds >= 0.2
    assert latest_checkpoint(tmp_path) is not None
    assert run(fresh(tiny_llama), tmp_path, config=config, resume=True).steps == result.steps


def test_a_gradient_that_is_not_finite_is_skipped(tiny_llama: Any) -> None:
    model = fresh(tiny_llama)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = copy.deepcopy(model.state_dict())
    result = run(model, config=dataclasses.replace(SMALL, max_skipped_updates=None))
    assert result.skipped == result.steps == 8
    assert math.isnan(result.losses[0])
    assert all(torch.equal(a.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, a in model.state_dict().items())


def test_after_the_limit_training_stops_with_the_batch_and_a_resumed_one_goes_on_counting(
    tiny_llama: Any, tmp_path: Path
) -> None:
    model, checkpoints = fresh(tiny_llama), tmp_path / "checkpoints"
    limited = dataclasses.replace(SMALL, max_skipped_updates=3, save_every=1)

    def spoil(step: int, loss: float) -> None:
        if step == 4:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")

    with pytest.raises(DivergenceError, match=r"3 updates in a row \(step 7; sft\.max_skipped_updates=3\)") as caught:
        run(model, checkpoints, config=limited, on_step=spoil)
    assert "step-00000006" in str(caught.value), "the newest checkpoint is named"
    found = json.loads((tmp_path / "diagnosis" / "step-000007" / "diagnosis.json").read_text())
    assert found["weights"] == ["model.norm.weight"]
    assert all(report == {"nll": "nan"} for report in found["reports"])
    batch = load_file(tmp_path / "diagnosis" / "step-000007" / "batch.safetensors")
    assert len(batch["0/tokens/ids"]) == found["packs"][0]["tokens"]
    with pytest.raises(DivergenceError, match="3 updates in a row"):
        run(fresh(tiny_llama), checkpoints, config=limited, resume=True)  # two before the checkpoint, one more here
    with pytest.raises(DivergenceError, match="not kept, for want of a run folder"):
        run(model, config=limited)
    assert not (Path.cwd() / "diagnosis").exists()


def test_the_limit_of_skipped_steps_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"sft\.max_skipped_updates"):
        dataclasses.replace(SMALL, max_skipped_updates=0)


def test_a_model_that_is_not_exact_on_packs_learns_nothing(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def causal(subtree_end: torch.Tensor, predecessor: torch.Tensor) -> AttentionPlan:
        n = len(predecessor)
        return plan_attention(torch.full((n,), n), torch.arange(-1, n - 1))

    monkeypatch.setattr("turntree.trainers.forward.plan_attention", causal)
    model = fresh(tiny_llama)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="differ from one row per trajectory"):
        train_sft(model, GROUPS, config=SMALL, seed=1, max_pack_tokens=1000)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert train_sft(model, GROUPS, config=SMALL, seed=1, max_pack_tokens=1000, check=False).steps == SMALL.steps


def test_no_demonstrations_are_an_error(tiny_llama: Any) -> None:
    with pytest.raises(DataError, match="at least one demonstration"):
        train_sft(tiny_llama, [], config=SMALL, seed=0, max_pack_tokens=10)


@given(size=st.integers(1, 20), batch=st.integers(1, 12), seed=st.integers(0, 5))
def test_batches_go_through_shuffled_epochs(size: int, batch: int, seed: int) -> None:
    rows = np.concatenate([batch_order(size, batch, seed=seed, step=step) for step in range(12)]).tolist()
    for start in range(0, len(rows) - size + 1, size):
        assert sorted(rows[start : start + size]) == list(range(size))


def test_learning_rate_warms_up_and_decays_to_a_tenth() -> None:
    factors = [learning_rate_factor(step, warmup=4, steps=20) for step in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert all(a > b for a, b in itertools.pairwise(factors[4:]))
    assert factors[20] == pytest.approx(0.1)
    assert learning_rate_factor(0, warmup=0, steps=1) == 1.0
