"""Activation checkpointing: which results of a layer's forward pass are kept for its backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from turntree.agents.architecture import text_config
from turntree.errors import ConfigError
from turntree.trainers.config import SELECTIVE_FROM
from turntree.trainers.tree_runs import RUN_ATTENTION

__all__ = ["Recompute", "recompute_activations", "recomputing"]

Recompute = Literal["auto", "none", "selective", "full"]
"""``none``: everything is kept. ``selective``: results of matrix products and attention are kept, what lies between
them (norms, activation functions, rotations) is computed again. ``full``: a layer's input alone is kept. ``auto``:
``selective`` for a model that supports it, from a hidden size of 256 on; in narrower ones it costs a quarter of the
time, and their memory is small."""


_PRODUCTS = ("mm", "addmm", "_grouped_mm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

# A product with a short inner dimension (the second of a LoRA adapter) costs less than its result's memory is worth.
_LONG = 16


def recompute_activations(model: nn.Module, how: Recompute = "full") -> None:
    """Say what packed forward passes of ``model`` keep for the backward pass; results stay what they were.

    Raises ``ConfigError`` where ``selective`` or ``full`` is asked of a model that does not support it.
    """
    if how not in get_args(Recompute):
        raise ConfigError(f"activation checkpointing is one of {list(get_args(Recompute))}, found {how!r}")
    supported = getattr(model, "supports_gradient_checkpointing", False)
    if how == "none" or (how == "auto" and not (supported and _hidden_size(model) >= SELECTIVE_FROM)):
        return
    if not supported:
        raise ConfigError(
            f"{type(model).__name__} does not support activation checkpointing; set "
            "trainer.activation_checkpointing=none"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if how != "full":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    cast("Any", model).gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _hidden_size(model: nn.Module) -> int:
    return int(getattr(text_config(model), "hidden_size", 0))


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, kwargs
    keep = operator in _attention() or (operator in _products() and _worth_keeping(args))
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _worth_keeping(args: tuple[Any, ...]) -> bool:
    """Of ``mm(a, b)``, ``addmm(bias, a, b)`` or ``_grouped_mm(a, b, ends)``: whether the inner dimension is long beside
    that of the result."""
    matrices = [x for x in args if isinstance(x, torch.Tensor) and x.ndim >= 2]  # a bias and ends of groups are none
    return bool(matrices[-1].shape[-2] * _LONG >= matrices[-1].shape[-1])


@functools.cache
def _products() -> frozenset[Any]:
    return _operators(_PRODUCTS)


@functools.cache
def _attention() -> frozenset[Any]:
    return _operators(_ATTENTION) | {RUN_ATTENTION}


def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    """Those of the names that this build of PyTorch has."""
    return frozenset(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """transformers recomputes in training mode alone, and policies stay in evaluation mode, where nothing is dropped.

    So only the layers' own flag is switched, not that of what they hold.
    """
    layers = (
        [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
        if torch.is_grad_enabled()
        else []
    )
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes):
            layer.training = mode
