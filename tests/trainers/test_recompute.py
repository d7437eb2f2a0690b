"""Activation checkpointing: the same gradients, less memory, and the option's names."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

from tests.trainers.test_forward import FAMILIES, SMALL, gradients, made
from turntree.errors import ConfigError
from turntree.trainers import recompute, tree_attention
from turntree.trainers.compose import compose
from turntree.trainers.config import TrainerConfig
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.packing import Pack, column, pack_groups
from turntree.trainers.planning.memory import activation_bytes
from turntree.trainers.planning.models import ModelShape
from turntree.trainers.recompute import Recompute, recompute_activations
from turntree.trainers.tree import Group
from turntree.trainers.tree_runs import RUN_ATTENTION

Groups = Callable[..., list[Group]]


@pytest.fixture
def pack(random_groups: Groups) -> Pack:
    return pack_groups(random_groups(5, depth=4), max_pack_tokens=10_000)[0]


@pytest.mark.parametrize("kept_pairs", [0, 1 << 24])
@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("family", [*FAMILIES])
def test_gradients_are_those_without_it(
    pack: Pack, family: str, how: Recompute, kept_pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "_KEPT_PAIRS", kept_pairs)
    model = made(*FAMILIES[family])
    plain = gradients(model, packed_logprobs(model, pack).logp.sum())
    recompute_activations(model, how)
    found = gradients(model, packed_logprobs(model, pack).logp.sum())
    assert float((found - plain).abs().max()) <= 1e-5 * max(1.0, float(plain.abs().max()))


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("kernel", ["blocks", "runs"])
def test_both_kernels_are_exact_with_it(
    pack: Pack, how: Recompute, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_plan = tree_attention.plan_attention
    monkeypatch.setattr(
        "turntree.trainers.forward.plan_attention", lambda end, before: made_plan(end, before, kernel=kernel)
    )
    model = made(*FAMILIES["tied"]).double()
    plain = gradients(model, packed_logprobs(model, pack).logp.sum())
    recompute_activations(model, how)
    torch.testing.assert_close(gradients(model, packed_logprobs(model, pack).logp.sum()), plain)


def test_adapters_have_the_same_gradients(pack: Pack) -> None:
    from turntree.agents.lora import add_adapter

    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    add_adapter(model, rank=2, alpha=4.0, seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        nn.init.normal_(parameter, std=0.1)

    def found() -> torch.Tensor:
        loss = packed_logprobs(model, pack).logp.sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)])

    plain = found()
    for how in ("selective", "full"):
        recompute_activations(model, how)
        torch.testing.assert_close(found(), plain, rtol=1e-4, atol=1e-5)


def test_second_products_of_adapters_are_not_kept() -> None:
    narrow, wide = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    x, bias = torch.zeros(5, 4), torch.zeros(256)
    keep = CheckpointPolicy.MUST_SAVE
    assert recompute._policy(None, narrow, x, torch.zeros(4, 256)) != keep
    assert recompute._policy(None, wide, bias, torch.zeros(5, 64), torch.zeros(64, 256)) == keep
    assert recompute._policy(None, torch.ops.aten.mul.Tensor, x, x) != keep
    assert recompute._policy(None, RUN_ATTENTION, x, x, x, [], 1.0) == keep


def test_products_of_experts_are_judged_by_their_matrices() -> None:
    grouped, x, ends = torch.ops.aten._grouped_mm.default, torch.zeros(6, 64), torch.tensor([3, 6])
    assert recompute._policy(None, grouped, x, torch.zeros(2, 64, 256), ends) == CheckpointPolicy.MUST_SAVE
    assert recompute._policy(None, grouped, x[:, :4], torch.zeros(2, 4, 256), ends) != CheckpointPolicy.MUST_SAVE


def test_what_is_kept_is_what_the_plan_of_memory_counts(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape("llama", 512, 64, 3, 4, 2, 16, 128, True)
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SMALL, **options})).eval()
    sizes: list[int] = []
    policy = recompute._policy

    def counted(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        answer = policy(context, operator, *args, **kwargs)
        if answer == CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            out = context.op_output
            sizes.extend(x.nbytes for x in (out if isinstance(out, tuple) else (out,)))
        return answer

    monkeypatch.setattr(recompute, "_policy", counted)
    made_plan = tree_attention.plan_attention
    monkeypatch.setattr("turntree.trainers.forward.plan_attention", lambda a, b: made_plan(a, b, kernel="runs"))
    recompute_activations(model, "selective")
    packed_logprobs(model, pack)
    tokens = len(column(pack, "tokens", "ids"))
    inputs = tokens * 64 * 4 * 3
    three, two = (
        activation_bytes(replace(shape, layers=n), tokens, 4, recompute="selective") for n in (3, 2)
    )  # apart by a layer's part, without what is computed again and the end
    assert 3 * (three - two) == pytest.approx(sum(sizes) + inputs, rel=0.02)


def test_a_compiled_kernel_runs_inside() -> None:
    """As FlexAttention does on a GPU, where the compiler meets the policy's mode."""
    compiled = torch.compile(lambda x: torch.tanh(x).sin(), fullgraph=True, backend="aot_eager")

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(recompute._policy)

    weight = torch.randn(6, 6, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return compiled(x @ weight) @ weight

    x = torch.randn(3, 6)
    (plain,) = torch.autograd.grad(layer(x).sum(), weight)
    out: Any = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), weight)[0], plain)


@pytest.mark.parametrize(
    ("written", "name"),
    [("true", "full"), ("False", "none"), *((how, how) for how in get_args(Recompute))],
)
def test_the_option_has_names_and_takes_its_old_values(written: str, name: str) -> None:
    assert TrainerConfig(activation_checkpointing=written).activation_checkpointing == name


def test_a_file_may_still_say_true() -> None:
    assert compose(["trainer.activation_checkpointing=true"]).trainer.activation_checkpointing == "full"
    assert TrainerConfig().activation_checkpointing == "auto"


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.activation_checkpointing='selectiv' is not known.*'selective'"):
        TrainerConfig(activation_checkpointing="selectiv")
    with pytest.raises(ConfigError, match="found 'some'"):
        recompute_activations(nn.Linear(2, 2), "some")  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden", "chosen"), [(252, False), (256, True)])
def test_auto_is_for_wide_models(hidden: int, chosen: bool) -> None:
    options = {"hidden_size": hidden, "head_dim": 16, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SMALL, **options}))
    recompute_activations(model, "auto")
    layer = model.model.layers[0]
    assert layer.gradient_checkpointing is chosen
    assert not chosen or "context_fn" in layer._gradient_checkpointing_func.keywords


def test_models_that_cannot_are_left_alone_or_refused(tiny_llama: LlamaForCausalLM) -> None:
    model: Any = copy.deepcopy(tiny_llama)
    type(model).supports_gradient_checkpointing, before = False, type(model).supports_gradient_checkpointing
    try:
        recompute_activations(model, "auto")
        recompute_activations(model, "none")
        with pytest.raises(ConfigError, match=r"set trainer\.activation_checkpointing=none"):
            recompute_activations(model, "selective")
    finally:
        type(model).supports_gradient_checkpointing = before
