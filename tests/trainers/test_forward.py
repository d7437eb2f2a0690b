"""The packed forward pass against one plain forward pass per trajectory (law 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turntree.errors import ConfigError
from turntree.trainers import forward, tree_attention, tree_cover
from turntree.trainers.forward import (
    check_packed,
    packed_logprobs,
    recompute_activations,
    row_logprobs,
    score_packs,
)
from turntree.trainers.packing import Pack, column, pack_groups, row_tokens, table
from turntree.trainers.tree import Group
from turntree.trainers.value_head import ValueHead

Groups = Callable[..., list[Group]]
seeds = st.integers(0, 10_000)


def gradients(model: PreTrainedModel, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def coefficients(pack: Pack, seed: int) -> Tensor:
    return torch.randn(len(table(pack, "occurrences")), generator=torch.Generator().manual_seed(seed))


def compare(model: PreTrainedModel, packs: list[Pack], seed: int, *, tolerance: float, temperature: float) -> None:
    for pack in packs:
        if not len(table(pack, "occurrences")):
            continue
        weight = coefficients(pack, seed)
        packed = packed_logprobs(model, pack, temperature=temperature).logp[column(pack, "occurrences", "token")]
        rows = torch.cat(row_logprobs(model, pack, temperature=temperature))
        torch.testing.assert_close(packed, rows, rtol=0, atol=tolerance)
        ours, theirs = gradients(model, (packed * weight).sum()), gradients(model, (rows * weight).sum())
        assert float((ours - theirs).abs().max()) <= tolerance * max(1.0, float(theirs.abs().max()))


@settings(max_examples=15, deadline=None)
@given(
    seed=seeds,
    budget=st.sampled_from([1, 40, 10_000]),
    temperature=st.sampled_from([1.0, 0.7, 0.0]),
    one_prompt=st.booleans(),
)
def test_packed_equals_rows_in_float32(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, seed: int, budget: int, temperature: float, one_prompt: bool
) -> None:
    groups = random_groups(seed)
    if one_prompt:  # whose tokens then stand once for all trees of a group
        for group in groups:
            for tree in group.trees:
                tree.root.observation_ids = group.trees[0].root.observation_ids
    packs = pack_groups(groups, max_pack_tokens=budget)
    compare(tiny_llama, packs, seed, tolerance=1e-5, temperature=temperature)


@settings(max_examples=8, deadline=None)
@given(seed=seeds)
def test_packed_equals_rows_in_pieces_and_float64(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, seed: int
) -> None:
    model = copy.deepcopy(tiny_llama).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_KEPT_PAIRS", 200)
        patch.setattr(tree_cover, "_MAX_QUERIES", 7)
        compare(model, pack_groups(random_groups(seed), max_pack_tokens=500), seed, tolerance=1e-6, temperature=1.0)


SMALL: dict[str, Any] = {
    "vocab_size": 23,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
HEADS: dict[str, Any] = {**SMALL, "head_dim": 16}
WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**HEADS)),
    "gemma": (GemmaForCausalLM, GemmaConfig(**HEADS)),
    "tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "qwen2, one layer sliding": (Qwen2ForCausalLM, Qwen2Config(**SMALL, **WINDOW, use_sliding_window=True)),
    "mistral, sliding": (MistralForCausalLM, MistralConfig(**SMALL, sliding_window=4)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**HEADS, **WINDOW, query_pre_attn_scalar=16)),
    "gemma2, tight caps": (
        Gemma2ForCausalLM,
        Gemma2Config(**HEADS, **WINDOW, attn_logit_softcapping=0.5, final_logit_softcapping=1.0),
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**HEADS, **WINDOW)),
    "mixture of experts": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=3, sliding_window=None)),
}
ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
}


def made(kind: Any, config: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind(config)
    model.eval()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_exact(random_groups: Groups, family: str) -> None:
    model = made(*FAMILIES[family])
    compare(model, pack_groups(random_groups(5, depth=4), max_pack_tokens=300), 5, tolerance=1e-5, temperature=1.0)


@pytest.mark.parametrize("family", ["qwen2, one layer sliding", "mistral, sliding", "gemma2", "gemma3"])
def test_windows_and_caps_are_those_of_the_model_by_itself(random_groups: Groups, family: str) -> None:
    """The rows above run through turntree's attention too; here they run through transformers' eager attention."""
    kind, config = FAMILIES[family]
    model = made(kind, config)
    (pack,) = pack_groups(random_groups(5, depth=4), max_pack_tokens=10_000)
    packed = packed_logprobs(model, pack).logp[column(pack, "occurrences", "token")]
    model.config._attn_implementation = "eager"
    torch.testing.assert_close(packed, torch.cat(row_logprobs(model, pack)), rtol=0, atol=1e-5)
    assert max(len(path) for path in row_tokens(pack)) > 2 * config.sliding_window


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_scaled_rotations_are_exact(random_groups: Groups, rotation: str) -> None:
    config = LlamaConfig(
        **SMALL, max_position_embeddings=32, rope_parameters={**ROTATIONS[rotation], "rope_theta": 1e3}
    )
    compare(
        made(LlamaForCausalLM, config), pack_groups(random_groups(5), max_pack_tokens=300), 5, tolerance=1e-5,
        temperature=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_depend_on_the_length_are_refused_past_their_bound(random_groups: Groups, kind: str) -> None:
    more: dict[str, Any] = {"factor": 2.0}
    if kind == "longrope":
        more |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    rotation = {"rope_type": kind, "rope_theta": 1e3, **more}
    positions = 32 if kind == "dynamic" else 64
    config = LlamaConfig(**SMALL, max_position_embeddings=positions, rope_parameters=rotation)
    model = made(LlamaForCausalLM, config)
    groups = random_groups(5)
    compare(model, pack_groups(groups, max_pack_tokens=300), 5, tolerance=1e-5, temperature=1.0)
    node = groups[0].trees[0].root
    node.observation_ids = (1,) * 40
    with pytest.raises(ConfigError, match=r"past 32 the rotation of LlamaForCausalLM depends on the length"):
        packed_logprobs(model, pack_groups(groups, max_pack_tokens=10_000)[0])


@pytest.mark.parametrize("training", [False, True])
def test_activation_checkpointing_changes_nothing(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, training: bool
) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    model = copy.deepcopy(tiny_llama).double().train(training)
    plain = gradients(model, packed_logprobs(model, pack).logp.sum())
    layer: Any = model.model.layers[0]
    calls: list[bool] = []
    layer.mlp.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    recompute_activations(model)
    torch.testing.assert_close(gradients(model, packed_logprobs(model, pack).logp.sum()), plain)
    assert calls == [training, training]  # once, and again in the backward pass; what a layer holds keeps its mode
    assert layer.training is training


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_of_the_vocabulary_projection_change_nothing(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, chunk: int
) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    model = copy.deepcopy(tiny_llama).double()  # in float32 the order of sums shows, by processor
    whole = packed_logprobs(model, pack, entropy=True)
    parts = packed_logprobs(model, pack, entropy=True, chunk=chunk)
    assert whole.entropy is not None
    assert parts.entropy is not None
    torch.testing.assert_close(parts.logp, whole.logp)
    torch.testing.assert_close(parts.entropy, whole.entropy)
    torch.testing.assert_close(
        gradients(model, (parts.logp + parts.entropy).sum()),
        gradients(model, (whole.logp + whole.entropy).sum()),
        rtol=1e-9,
        atol=1e-10,
    )


def test_entropy_is_that_of_the_distribution_drawn_from(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    output = packed_logprobs(tiny_llama, pack, temperature=0.5, entropy=True)
    assert output.entropy is not None
    mask = column(pack, "tokens", "loss_mask")
    assert (output.entropy[~mask] == 0).all()
    assert (output.logp[~mask] == 0).all()
    ids = column(pack, "tokens", "ids")
    first = int(mask.nonzero()[0])
    logits = tiny_llama(ids[None, :first]).logits[0, -1] / 0.5
    torch.testing.assert_close(output.entropy[first], torch.distributions.Categorical(logits=logits).entropy())


def test_score_pass_writes_in_place_without_a_graph(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    packs = pack_groups(random_groups(4), max_pack_tokens=50)
    model = copy.deepcopy(tiny_llama).train()
    score_packs(model, packs)
    score_packs(model, packs, key="ref_logp", temperature=0.5)
    assert model.training
    for pack in packs:
        old, ref = column(pack, "tokens", "old_logp"), column(pack, "tokens", "ref_logp")
        assert not old.requires_grad
        torch.testing.assert_close(old, packed_logprobs(model, pack).logp.detach(), rtol=0, atol=0)
        assert not torch.equal(old, ref)


def test_the_check_of_the_first_batch_passes_and_catches(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    assert check_packed(tiny_llama, pack) < 1e-5
    assert check_packed(copy.deepcopy(tiny_llama).bfloat16(), pack) < 1.0

    def causal(subtree_end: Tensor, predecessor: Tensor) -> tree_attention.AttentionPlan:
        n = len(predecessor)
        return tree_attention.plan_attention(torch.full((n,), n), torch.arange(-1, n - 1))

    broken = copy.deepcopy(tiny_llama)
    broken.lm_head.weight.data[0] = float("nan")
    assert check_packed(broken, pack) == 0.0  # neither way gives a number
    monkeypatch.setattr(forward, "plan_attention", causal)
    with pytest.raises(ConfigError, match="differ from one row per trajectory"):
        check_packed(tiny_llama, pack)


def test_the_check_widens_the_logits_of_sampled_tokens_alone(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    seen: list[int] = []

    def watched(logits: Tensor) -> Tensor:
        seen.append(len(logits))
        return logits.float()

    monkeypatch.setattr(forward, "widen", watched)
    rows = row_logprobs(tiny_llama, pack)
    assert seen == [len(row) for row in rows]
    assert sum(seen) == len(table(pack, "occurrences"))


def test_a_model_that_does_not_hand_the_plan_on_is_refused(random_groups: Groups) -> None:
    """Without the plan every token would see every other one."""
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    model = made(NemotronForCausalLM, NemotronConfig(**SMALL))
    with pytest.raises(ConfigError, match=r"Nemotron.* is not given the keyword arguments.* needs a model"):
        packed_logprobs(model, pack)


def test_models_that_change_their_logits_are_refused(random_groups: Groups, tiny_llama: LlamaForCausalLM) -> None:
    (pack,) = pack_groups(random_groups(2), max_pack_tokens=10_000)
    model = copy.deepcopy(tiny_llama)
    model.config.logits_scaling = 30.0
    with pytest.raises(ConfigError, match="logits_scaling=30"):
        packed_logprobs(model, pack)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, budget=st.sampled_from([1, 40, 10_000]))
def test_values_are_read_before_each_sampled_token(
    random_groups: Groups, tiny_llama: LlamaForCausalLM, seed: int, budget: int
) -> None:
    # In double precision: the terms of a value are larger than the value, and so are their errors in single precision.
    model = copy.deepcopy(tiny_llama).double()
    head = ValueHead.of(model).double()
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(0))
        head.bias.fill_(0.3)
    for pack in pack_groups(random_groups(seed), max_pack_tokens=budget):
        score_packs(model, [pack], value_head=head, entropy=True)
        assert (column(pack, "tokens", "old_entropy") >= 0).all()
        for path in row_tokens(pack):
            ids, mask = column(pack, "tokens", "ids")[path], column(pack, "tokens", "loss_mask")[path]
            states = model.get_decoder()(input_ids=ids[None]).last_hidden_state[0]
            expected = torch.where(mask[1:], head(states[:-1]), 0.0)
            torch.testing.assert_close(column(pack, "tokens", "value")[path][1:], expected, rtol=0, atol=1e-5)


def test_a_new_value_head_gives_zero(tiny_llama: LlamaForCausalLM, random_groups: Groups) -> None:
    (pack, *_) = pack_groups(random_groups(3), max_pack_tokens=10_000)
    output = packed_logprobs(tiny_llama, pack, value_head=ValueHead.of(tiny_llama))
    assert output.value is not None
    assert output.value.requires_grad
    assert (output.value == 0).all()
