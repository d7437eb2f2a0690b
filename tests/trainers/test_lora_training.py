"""Training a LoRA adapter: packed gradients, runs, checkpoints, exports, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from turntree.agents.lora import add_adapter
from turntree.agents.models import load_model
from turntree.errors import ConfigError
from turntree.trainers.build import build_bench
from turntree.trainers.checkpoint import latest_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.forward import check_packed, packed_logprobs, recompute_activations, row_logprobs
from turntree.trainers.learner import train
from turntree.trainers.packing import column, pack_groups, table
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.tree import Group

pytest.importorskip("peft")

MakeConfig = Callable[..., RunConfig]
Groups = Callable[..., list[Group]]


@pytest.mark.parametrize("recomputed", [False, True])
def test_packed_gradients_of_an_adapter_equal_those_of_rows(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, recomputed: bool
) -> None:
    model = copy.deepcopy(tiny_llama)
    add_adapter(model, rank=3)
    generator = torch.Generator().manual_seed(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    if recomputed:
        recompute_activations(model)
    (pack,) = pack_groups(random_groups(5), max_pack_tokens=10_000)
    assert check_packed(model, pack) < 1e-5
    weight = torch.randn(len(table(pack, "occurrences")), generator=generator)
    packed = packed_logprobs(model, pack).logp[column(pack, "occurrences", "token")]
    rows = torch.cat(row_logprobs(model, pack))
    torch.testing.assert_close(packed, rows, rtol=0, atol=1e-5)
    ours = torch.autograd.grad((packed * weight).sum(), trained)
    theirs = torch.autograd.grad((rows * weight).sum(), trained)
    largest = max(float(g.abs().max()) for g in theirs)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) <= 1e-5 * max(1.0, largest)


def test_a_run_trains_saves_and_resumes_the_adapter(bed: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    options = ("model.lora_rank=4", "algorithm.kl_coef=0.05", "trainer.learning_rate=1e-2", "trainer.save_every=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make_config(*options, "trainer.steps=2", f"out={whole}"))
    train(make_config(*options, "trainer.steps=1", f"out={parts}"))
    train(make_config(*options, "trainer.steps=2", "resume=true", f"out={parts}"))
    first, second = read_metrics(whole / "metrics.jsonl")
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9)  # the reference is the model without its adapter
    assert second["actor/kl_loss"] > 0
    ours, resumed = (load_file(run / "model" / "model.safetensors") for run in (whole, parts))
    assert ours.keys() == resumed.keys()
    assert all(torch.equal(ours[name], resumed[name]) for name in ours)
    before = load_model(bed.model)[0].state_dict()
    changed = {name for name in ours if not torch.equal(ours[name], before[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    assert (whole / "model" / "adapter" / "adapter_config.json").is_file()
    newest = latest_checkpoint(whole / "checkpoints")
    assert newest is not None
    assert all("lora_" in name for name in load_file(newest / "model.safetensors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("engine=vllm", "engine.sync=ipc"), "needs them merged; use engine.sync=folder"),
        (("model.lora_targets=nowhere",), "model.lora_targets='nowhere' does not fit"),
    ],
)
def test_what_does_not_go_with_an_adapter_is_refused(
    make_config: MakeConfig, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_bench(make_config("model.lora_rank=4", *options))
