"""Packed attention against one dense mask, and what it refuses."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from turntree.errors import ConfigError
from turntree.trainers import tree_attention, tree_cover, tree_runs
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.tree import Group
from turntree.trainers.tree_attention import (
    ATTENTION,
    AttentionPlan,
    check_supported,
    enable_packed_attention,
    plan_attention,
    tree_mask_mod,
)

Groups = Callable[..., list[Group]]
SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


WINDOWS = [None, 1, 4, 9]


def depths(predecessor: Tensor) -> Tensor:
    """Position of each token on its path."""
    found: list[int] = []
    for before in predecessor.tolist():
        found.append(found[before] + 1 if before >= 0 else 0)
    return torch.tensor(found, dtype=torch.int64)


def dense_rule(subtree_end: Tensor, predecessor: Tensor, window: int | None = None) -> Tensor:
    """Which keys each query sees: walks every path, independently of subtree_end's rule."""
    seen = torch.zeros(len(subtree_end), len(subtree_end), dtype=torch.bool)
    for query in range(len(subtree_end)):
        key, steps = query, 0
        while key >= 0 and (window is None or steps < window):
            seen[query, key] = True
            key, steps = int(predecessor[key]), steps + 1
    return seen


def columns(groups: list[Group]) -> tuple[Tensor, Tensor]:
    (pack,) = pack_groups(groups, max_pack_tokens=10**6)
    return column(pack, "tokens", "subtree_end"), column(pack, "tokens", "predecessor")


def covered(plan: AttentionPlan, n: int, window: int | None) -> Tensor:
    """How often each (query, key) pair is attended, [N, N]; padded queries are told apart by ``order``."""
    counts = torch.zeros(n, n, dtype=torch.int64)
    cover = plan.cover(window)
    slot_of = {slot: token for token, slot in enumerate(cover.order.tolist())}
    offset = 0
    for call in cover.calls:
        mask = tree_attention._mask(call.queries, call.keys, plan, cover.window)[:, 0] == 0
        if call.mask is not None:
            assert torch.equal(call.mask[:, 0] == 0, mask)
        batch, length = call.queries.shape
        for b in range(batch):
            for i in range(length):
                token = slot_of.get(offset + b * length + i)
                if token is not None:
                    assert int(call.queries[b, i]) == token
                    counts[token].index_add_(0, call.keys[b][mask[b, i]], torch.ones(int(mask[b, i].sum())).long())
        offset += batch * length
    return counts


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    limit=st.sampled_from([3, 16, 512]),
    cost=st.sampled_from([0, 64, 2048]),
    window=st.sampled_from(WINDOWS),
)
def test_the_plan_attends_every_visible_pair_exactly_once(
    random_groups: Groups, seed: int, limit: int, cost: int, window: int | None
) -> None:
    groups = random_groups(seed)
    if not any(g.scored_leaves() for g in groups):
        return
    end, before = columns(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_cover, "_MAX_QUERIES", limit)
        patch.setattr(tree_cover, "_BLOCK_COST", cost)
        plan = plan_attention(end, before)
        found = covered(plan, len(end), window)
    assert torch.equal(found, dense_rule(end, before, window).long())
    assert torch.equal(plan.position, depths(before))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), window=st.sampled_from(WINDOWS))
def test_the_mask_mod_is_the_same_rule(random_groups: Groups, seed: int, window: int | None) -> None:
    groups = random_groups(seed)
    if not any(g.scored_leaves() for g in groups):
        return
    end, before = columns(groups)
    mask_mod = tree_mask_mod(end, depths(before), window=window)
    index = torch.arange(len(end))
    zero = torch.zeros((), dtype=torch.int64)
    assert torch.equal(mask_mod(zero, zero, index[:, None], index[None, :]), dense_rule(end, before, window))


def test_a_narrow_window_costs_less() -> None:
    end, before = long_tree(8, 2_000, 300)
    plan = plan_attention(end, before)
    assert plan.cover(64).pairs < plan.cover().pairs / 3
    assert plan.cover(2_300) is plan.cover()  # no query is further from its first key


@pytest.mark.parametrize("kept_pairs", [0, 1 << 24])
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from(WINDOWS),
    softcap=st.sampled_from([None, 1.5]),
    kernel=st.sampled_from(["blocks", "runs"]),
    piece=st.sampled_from([1, 3, 128]),
)
def test_outputs_and_gradients_equal_dense_attention(
    random_groups: Groups,
    kept_pairs: int,
    seed: int,
    groups: int,
    window: int | None,
    softcap: float | None,
    kernel: Any,
    piece: int,
) -> None:
    made = random_groups(seed)
    if not any(g.scored_leaves() for g in made):
        return
    end, before = columns(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_KEPT_PAIRS", kept_pairs)
        patch.setattr(tree_runs, "_PIECE", piece)
        plan = plan_attention(end, before, kernel=kernel)
        plan.cover(window)
    generator = torch.Generator().manual_seed(seed)

    def heads(count: int) -> Tensor:
        x = torch.randn(1, count, len(end), 8, generator=generator, dtype=torch.float64)
        return x.requires_grad_()

    q, k, v = heads(4), heads(4 // groups), heads(4 // groups)
    out, _ = tree_attention._attention_forward(
        nn.Identity(), q, k, v, None, scaling=0.7, softcap=softcap, sliding_window=window, tree_plan=plan
    )
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~dense_rule(end, before, window), float("-inf"))
    expected = (scores.softmax(-1) @ v.repeat_interleave(groups, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * upstream).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * upstream).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_columns_that_are_no_tree_are_refused() -> None:
    with pytest.raises(ValueError, match="token 1"):
        plan_attention(torch.tensor([2, 1]), torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="branches inside"):
        plan_attention(torch.tensor([4, 4, 4, 4]), torch.tensor([-1, 0, 1, 0]))


def test_nothing_packs_to_an_empty_plan() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    plan = plan_attention(nothing, nothing)
    assert plan.cover().calls == ()
    assert plan.cover(8).order.numel() == 0


def test_models_of_the_llama_family_are_supported() -> None:
    check_supported(LlamaForCausalLM(LlamaConfig(**SMALL)))
    check_supported(Qwen2ForCausalLM(Qwen2Config(**SMALL)))
    check_supported(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None)))


def test_attention_that_is_not_causal_on_the_path_is_refused() -> None:
    check_supported(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4096)))
    check_supported(Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8)))
    chunked = Qwen2Config(**SMALL, layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(ConfigError, match="chunked_attention layers; packed trees need full attention or a sliding"):
        check_supported(Qwen2ForCausalLM(chunked))
    with pytest.raises(ConfigError, match="attention sinks"):
        check_supported(GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=2, head_dim=8)))
    with pytest.raises(ConfigError, match="bidirectional"):
        check_supported(Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, use_bidirectional_attention=True)))
    with pytest.raises(ConfigError, match="not a transformers causal language model"):
        check_supported(nn.Linear(2, 2))


def test_forward_passes_without_a_plan_stay_as_they_were() -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    ids, mask = torch.tensor([[0, 0, 3, 4], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model(ids, attention_mask=mask).logits
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    enable_packed_attention(model)
    assert model.config._attn_implementation == ATTENTION
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False), generated)
    enable_packed_attention(model)


def test_another_attention_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="'flex_attention'; packed training needs 'sdpa'"):
        enable_packed_attention(model)


def test_dropout_and_wrong_plans_are_refused() -> None:
    plan = plan_attention(torch.tensor([2, 2]), torch.tensor([-1, 0]))
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1)).train()
    enable_packed_attention(model)
    with pytest.raises(ConfigError, match="dropout"):
        model.model(torch.tensor([[1, 2]]), use_cache=False, tree_plan=plan)
    model.eval()
    with pytest.raises(ConfigError, match=r"the plan is for \[1, 2\] tokens, found \(1, 3\)"):
        model.model(torch.tensor([[1, 2, 3]]), use_cache=False, tree_plan=plan)


def long_tree(leaves: int, prompt: int, turn: int) -> tuple[Tensor, Tensor]:
    """A prompt with ``leaves`` chains of ``turn`` tokens, as columns."""
    total = prompt + leaves * turn
    end, before = torch.full((total,), total), torch.arange(-1, total - 1)
    for leaf in range(leaves if turn else 0):
        start = prompt + leaf * turn
        end[start : start + turn] = start + turn
        before[start] = prompt - 1
    return end, before


@pytest.mark.parametrize("window", [None, 1024])
@pytest.mark.parametrize(("leaves", "prompt", "turn"), [(1, 32_768, 0), (64, 2_048, 480), (10_000, 2_768, 3)])
def test_b11_a_tree_of_32k_tokens_plans_without_an_n_by_n_tensor(
    leaves: int, prompt: int, turn: int, window: int | None
) -> None:
    end, before = long_tree(leaves, prompt, turn)
    assert len(end) == 32_768
    tracemalloc.start()
    plan = plan_attention(end, before)
    plan.cover(window)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensors = [t for c in plan.cover(window).calls for t in (c.queries, c.keys, c.mask) if t is not None]
    held = sum(t.numel() * t.element_size() for t in tensors)
    assert peak < 64 << 20
    assert held < 96 << 20  # one byte a pair would be 1024 MiB
