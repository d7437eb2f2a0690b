"""LoRA adapters: nothing at first, frozen weights, merged exports that PEFT and transformers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from turntree.agents.engines import HFEngine, Prefix, Request, SamplingParams
from turntree.agents.lora import add_adapter, has_adapter, merged_state, trained_part, without_adapter
from turntree.agents.models import load_model, save_model, save_weights
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.errors import ConfigError

pytest.importorskip("peft")

IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(["the", "a", "of"], ["mar"])


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return build_tiny_model(tokenizer, hidden=32, layers=2, heads=4, seed=3)


def moved(model: Any) -> Any:
    """An adapter that does something."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def test_a_new_adapter_changes_nothing_and_is_all_that_trains(model: Any) -> None:
    before, names = logits(model), set(model.state_dict())
    add_adapter(model, rank=4, seed=1)
    assert torch.equal(logits(model), before)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in n for n in trained)
    assert not any("lm_head" in n or "embed" in n for n in trained)
    assert set(merged_state(model)) == names
    with pytest.raises(ConfigError, match="has an adapter already"):
        add_adapter(model, rank=4)


def test_equal_seeds_draw_equal_adapters_and_no_global_number(tokenizer: Any) -> None:
    state = torch.get_rng_state()
    drawn = []
    for seed in (1, 1, 2):
        model = build_tiny_model(tokenizer, hidden=32, layers=1, heads=4, seed=3)
        add_adapter(model, rank=2, seed=seed)
        drawn.append(torch.cat([p.flatten() for p in trained_part(model).parameters()]))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_adapter_can_be_switched_off(model: Any) -> None:
    before = logits(model)
    add_adapter(model, rank=4)
    after = logits(moved(model))
    assert not torch.allclose(after, before, atol=1e-3)
    with without_adapter(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)
    assert any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("untie", [False, True])
def test_exports_are_merged(model: Any, tokenizer: Any, tmp_path: Path, untie: bool) -> None:
    add_adapter(model, rank=4, targets="q_proj, down_proj")
    expected = logits(moved(model))
    save_weights(model, tmp_path, untie=untie)
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path)
    assert not has_adapter(loaded)
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(model), expected)  # the model itself keeps its adapter apart


def test_the_saved_adapter_is_pefts_own_format(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    save_model(model, tokenizer, tmp_path / "base")
    add_adapter(model, rank=4, alpha=3.0)
    expected = logits(moved(model))
    folder = save_model(model, tokenizer, tmp_path / "trained")
    torch.testing.assert_close(logits(load_model(folder)[0]), expected, rtol=0, atol=1e-5)
    base, _ = load_model(tmp_path / "base")
    again: Any = PeftModel.from_pretrained(base, str(folder / "adapter"))
    torch.testing.assert_close(logits(again.eval()), expected, rtol=0, atol=1e-5)


def test_a_checkpoint_holds_the_adapter_alone(model: Any, tokenizer: Any) -> None:
    assert trained_part(model) is model
    add_adapter(model, rank=4)
    state = {k: v.clone() for k, v in trained_part(moved(model)).state_dict().items()}
    expected = logits(model)
    fresh = build_tiny_model(tokenizer, hidden=32, layers=2, heads=4, seed=3)
    add_adapter(fresh, rank=4, seed=9)
    trained_part(fresh).load_state_dict(state)
    assert torch.equal(logits(fresh), expected)
    assert sum(v.numel() for v in state.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_hf_engine_samples_from_the_adapted_model(model: Any, tokenizer: Any) -> None:
    add_adapter(model, rank=4)
    moved(model)
    [got] = HFEngine(model, tokenizer).generate([Request(Prefix([5, 6, 7]), SamplingParams(5), seed=0)])
    rows = torch.tensor([[5, 6, 7, *got.ids]])
    with torch.no_grad():
        own = model(rows).logits[0, 2:-1].log_softmax(-1)
    found = own.gather(1, torch.tensor(got.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got.logprobs), found, rtol=0, atol=2e-5)


def test_adapters_in_bfloat16_keep_float32(model: Any) -> None:
    add_adapter(model.to(torch.bfloat16), rank=4)
    assert {p.dtype for p in trained_part(model).parameters()} == {torch.float32}
    assert logits(moved(model)).dtype == torch.bfloat16
    assert merged_state(model)["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("targets", "message"),
    [("nowhere", "model.lora_targets='nowhere' does not fit"), ("lm_head", "names the embedding or the output layer")],
)
def test_layers_that_cannot_take_one_are_refused(model: Any, targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_adapter(model, rank=4, targets=targets)
