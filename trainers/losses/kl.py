"""Estimates of KL(policy || reference) from tokens sampled from the policy."""

from __future__ import annotations

from torch import Tensor

from turntree.errors import ConfigError

__all__ = ["KLEstimator", "kl_estimate", "kl_rewards"]

KLEstimator = str
"""``k1``, ``k2`` (= ``mse``), ``k3`` (= ``low_var_kl``), ``abs``; with a ``+``: that value, the gradient of ``k2``."""

_DELTA_CLAMP = 20.0
_VALUE_CLAMP = 10.0


def kl_estimate(logp: Tensor, ref_logp: Tensor, *, kind: KLEstimator) -> Tensor:
    """Estimate of KL(policy || reference) from tokens sampled from the policy, elementwise.

    Schulman, "Approximating KL divergence" (2020). k1 = lp - ref; k2 = (lp - ref)^2 / 2; k3 = exp(d) - d - 1 with
    d = ref - lp clamped to +-20 and the result to +-10; ``abs`` = |lp - ref|. A trailing ``+`` keeps the value and
    takes the gradient of k2, which is unbiased. Raises ``ConfigError`` for another word.
    """
    if kind.endswith("+"):
        value = kl_estimate(logp.detach(), ref_logp, kind=kind[:-1])
        surrogate = kl_estimate(logp, ref_logp, kind="k2")
        return surrogate - surrogate.detach() + value
    difference = logp - ref_logp
    if kind == "k1":
        return difference
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    if kind == "abs":
        return difference.abs()
    if kind in ("k3", "low_var_kl"):
        delta = (-difference).clamp(-_DELTA_CLAMP, _DELTA_CLAMP)
        return (delta.exp() - delta - 1.0).clamp(-_VALUE_CLAMP, _VALUE_CLAMP)
    raise ConfigError(
        f"unknown KL estimator {kind!r}; use k1, k2 (mse), k3 (low_var_kl) or abs, with a trailing + for the gradient "
        "of k2"
    )


def kl_rewards(old_logp: Tensor, ref_logp: Tensor, *, kind: KLEstimator = "k1") -> Tensor:
    """The estimate of each token without a gradient: what a KL penalty inside the reward subtracts, times its
    coefficient (verl ``apply_kl_penalty``). ``old_logp``, ``ref_logp`` of any equal shapes."""
    return kl_estimate(old_logp.detach(), ref_logp.detach(), kind=kind.removesuffix("+"))
