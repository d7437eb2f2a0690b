"""Collapse watch: numbers that tell early that a policy falls apart, and when to say so.

Plain functions over trees and metrics. :func:`turn_metrics` measures what the turns look like, :func:`watch` compares a
step with the run so far. Nothing here stops a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from turntree.trainers.tree import Node, Tree
from turntree.trainers.watch_config import WatchConfig

__all__ = ["Watched", "repetition", "turn_metrics", "watch"]

_PEAKS = ("tree/entropy", "tree/valid_actions")


@dataclass(frozen=True, slots=True)
class Watched:
    """What a look at one step gave.

    ``alarms``: ``alarm/<name>`` is 1 while it rings, else 0. ``memory``: for the next look, plain numbers that a
    checkpoint can hold. ``messages``: of alarms that did not ring in the look before.
    """

    alarms: dict[str, float]
    memory: dict[str, float]
    messages: tuple[str, ...]


def repetition(ids: Sequence[int], *, n: int) -> float:
    """Share of the n-grams of a turn that occurred in it before, in [0, 1); NaN where it has no n-gram.

    0 for a text without repetition; a loop of period p comes to ``1 - p / (len(ids) - n + 1)``.
    """
    grams = list(zip(*(ids[i:] for i in range(n))))
    return 1.0 - len(set(grams)) / len(grams) if grams else math.nan


def turn_metrics(trees: Iterable[Tree], *, ngram: int) -> dict[str, float]:
    """``tree/repetition`` and ``tree/valid_actions``: means over the sampled turns of ``trees``.

    Turns of failed leaves are left out: nobody may have read what they ask for. Means of nothing are NaN.
    """
    turns = [node for tree in trees for node in tree.nodes() if node.turn_ids and node.status != "failed"]
    repeated = [share for node in turns if not math.isnan(share := repetition(node.turn_ids, n=ngram))]
    return {"tree/repetition": _mean(repeated), "tree/valid_actions": _mean([_valid(node) for node in turns])}


def watch(metrics: Mapping[str, float], memory: Mapping[str, float], config: WatchConfig) -> Watched:
    """Compare the metrics of a step with the thresholds, and with the highest values of the steps before it.

    ``memory``: what the last look returned; empty before the first step. Metrics that are missing or NaN ring nothing,
    but for a ratio that is not finite.
    """
    peaks = {key: _highest(memory.get(key), metrics.get(key)) for key in _PEAKS}
    highest = {key: value for key, value in peaks.items() if value is not None}
    rings = {
        name: message
        for name, threshold, message in (
            ("entropy", config.entropy, _entropy(metrics, highest, config)),
            ("ratio", config.ratio, _ratio(metrics, config)),
            ("format", config.format, _format(metrics, highest, config)),
            ("repetition", config.repetition, _repetition(metrics, config)),
        )
        if threshold is not None
    }
    alarms = {f"alarm/{name}": float(message is not None) for name, message in rings.items()}
    new = tuple(m for name, m in rings.items() if m is not None and not memory.get(f"alarm/{name}"))
    return Watched(alarms, {**highest, **alarms}, new)


def _entropy(metrics: Mapping[str, float], highest: Mapping[str, float], config: WatchConfig) -> str | None:
    found, peak = metrics.get("tree/entropy", math.nan), highest.get("tree/entropy", math.nan)
    if config.entropy is None or not found < config.entropy * peak:
        return None
    return (
        f"entropy collapse: tree/entropy is {found:.3g}, its highest in this run was {peak:.3g}; the policy is nearly "
        "certain and groups will agree: lower the learning rate, or raise algorithm.entropy_coef"
    )


def _ratio(metrics: Mapping[str, float], config: WatchConfig) -> str | None:
    found = metrics.get("tree/ratio_max_token", 1.0)
    if config.ratio is None or found <= config.ratio:
        return None
    return (
        f"ratio blow-up: tree/ratio_max_token is {found:.3g}, watch.ratio={config.ratio:g}; the updates of a rollout "
        "move the policy too far: lower the learning rate or trainer.epochs, and look at tree/ess_token"
    )


def _format(metrics: Mapping[str, float], highest: Mapping[str, float], config: WatchConfig) -> str | None:
    found, peak = metrics.get("tree/valid_actions", math.nan), highest.get("tree/valid_actions", math.nan)
    if config.format is None or not peak - found > config.format:
        return None
    return (
        f"format falls: tree/valid_actions is {found:.2f}, its highest in this run was {peak:.2f}; turns are no "
        "actions any more: read some in `turntree view`"
    )


def _repetition(metrics: Mapping[str, float], config: WatchConfig) -> str | None:
    found = metrics.get("tree/repetition", math.nan)
    if config.repetition is None or not found > config.repetition:
        return None
    return (
        f"repetition: tree/repetition is {found:.2f}, watch.repetition={config.repetition:g}; turns say the same again "
        "and again: read some in `turntree view`, and do not reward truncated ones"
    )


def _valid(node: Node) -> float:
    return float(node.action not in ("", "invalid"))


def _highest(before: float | None, now: float | None) -> float | None:
    values = [value for value in (before, now) if value is not None and math.isfinite(value)]
    return max(values, default=None)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
