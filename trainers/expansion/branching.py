"""ARPO and AEPO: chains copy themselves after tool results, more often where the next turn was uncertain.

Both papers' code runs all chains of a prompt in lock step: one turn of each live chain, its tool call, then the copies.
Whether a chain is copied after its t-th turn depends on that turn, on the chain's first turn and on a uniform draw,
never on later turns. So the same copies can be made after the chains have ended: a rule that is asked between rounds
returns the copies of the shallowest level that has any left. Copies grow, their turns join the deeper levels, and the
cap on leaves is used in the published order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from turntree.errors import ConfigError
from turntree.trainers.expansion.rule import Expansion
from turntree.trainers.seeds import derive_rng
from turntree.trainers.tree import Node, Tree

__all__ = ["aepo", "aepo_branch", "arpo", "arpo_branch", "initial_rollouts", "truncated_entropy"]

ENTROPY_TOKENS = 20
"""The entropy of a turn is that of its first tokens."""

Over: TypeAlias = Literal["chain", "tree"]


def truncated_entropy(top_logprobs: Sequence[Sequence[float]], *, vocab_size: int) -> float:
    """``-sum of p log p`` over the given candidates of the first 20 tokens, divided by ``ln(vocab_size)``.

    ``top_logprobs`` holds, for each token, the log-probs of its likeliest candidates (10 in the published code of ARPO
    and AEPO); one of minus infinity adds nothing. Neither divided by the number of tokens nor completed by the
    candidates left out.
    """
    pooled = (logprob for token in top_logprobs[:ENTROPY_TOKENS] for logprob in token if logprob > -math.inf)
    return -math.fsum(math.exp(logprob) * logprob for logprob in pooled) / math.log(vocab_size)


def arpo_branch(u: float, delta: float, *, entropy_weight: float, branch_probability: float) -> tuple[float, bool]:
    """ARPO: ``(y, y <= branch_probability)`` with ``y = u - entropy_weight * delta``, clamped to [0, 1]."""
    y = min(1.0, max(0.0, u - entropy_weight * delta))
    return y, y <= branch_probability


def aepo_branch(
    u: float, delta: float, consecutive: int, *, entropy_weight: float, branch_probability: float, decay: float = 0.05
) -> tuple[float, bool]:
    """AEPO: ``(x, x >= branch_probability)``.

    ``x = (u + entropy_weight * delta) * max(0, 1 - decay * consecutive)``, clamped to [0, 1]: without the penalty the
    probability of ARPO's branch, ``branch_probability + entropy_weight * delta`` for 0.5.
    """
    x = (u + entropy_weight * delta) * max(0.0, 1.0 - decay * consecutive)
    x = min(1.0, max(0.0, x))
    return x, x >= branch_probability


def initial_rollouts(root_entropy: float, tool_entropy: float, total: int) -> int:
    """AEPO, entropy pre-monitoring: first chains of ``total`` trajectories, in [1, total].

    ``int(total * sigmoid(0.5 * (H_root - H_tool))) + 1``: an uncertain question gets chains, uncertain tool calls
    branches.
    """
    half = 0.5 * (root_entropy - tool_entropy)
    share = 0.5 * (1.0 + math.tanh(0.5 * half))  # the sigmoid, without overflow
    return max(1, min(int(total * share) + 1, total))


def arpo(
    tree: Tree,
    k: int,
    rng: np.random.Generator,
    *,
    entropy_weight: float = 0.2,
    branch_probability: float = 0.5,
    beam_size: int = 2,
    vocab_size: int | None = None,
) -> list[Expansion]:
    """Copies of chains after tool results: new children of the turns whose entropy rose (ARPO, arXiv 2507.19849).

    A turn n whose tool results came back is copied up to ``beam_size - 1`` times, each time with :func:`arpo_branch` of
    ``delta = H(n) - H_0`` and a draw u of ``derive_rng(tree.seed, n.path, "arpo")``, so that the decision belongs to
    the node. H is the sum of the entropies of the turn's first 20 tokens divided by ``ln(vocab_size)``. H_0 is the H of
    the first turn that *this chain* sampled: a copy keeps its source's context, and measures from its own first turn,
    at which ``delta`` is therefore 0. Corrections of invalid actions are no tool results.

    One call gives copies of one level, the shallowest that has any left to make, up to ``k``, in the published order:
    chains as old as the level's first, then copies, each generation in the order of its sources. When no copy is left,
    one new chain from the root. (The published code leaves the draws of a beam unused that exceed the free places; that
    differs for ``beam_size > 2`` only, in the last round.)

    ``vocab_size`` is set from the tokenizer in a run. Raises ``ConfigError`` for options out of range and for turns
    without entropies.
    """
    del rng
    chance = _Chance(entropy_weight, branch_probability, beam_size, _norm(vocab_size))

    def decide(u: float, turn: _Turn) -> tuple[float, bool, str]:
        delta = chance.delta(turn)
        y, branch = arpo_branch(u, delta, entropy_weight=entropy_weight, branch_probability=branch_probability)
        return y, branch, f"u {u:.4f} - {entropy_weight:g} x (H - H0 {delta:+.4f}) = {y:.4f} <= {branch_probability:g}"

    return _branch(tree, k, chance, decide, over="chain")


def aepo(
    tree: Tree,
    k: int,
    rng: np.random.Generator,
    *,
    entropy_weight: float = 0.2,
    branch_probability: float = 0.5,
    beam_size: int = 2,
    decay: float = 0.05,
    penalty: Over = "chain",
    dynamic: bool = False,
    rollouts: int | None = None,
    vocab_size: int | None = None,
) -> list[Expansion]:
    """As :func:`arpo`, with a penalty for turns copied in a row (AEPO, arXiv 2510.14545).

    The decision is :func:`aepo_branch`. ``penalty="chain"`` counts the turns directly above n, on n's own path, that
    were copied; a copy inherits its source's count and the source itself adds one, as for the chain that goes on.
    ``"tree"`` counts the levels directly above n in which any turn of the tree was copied: the published code has one
    such counter for all chains of a prompt (it also counts new chains, and forgets to reset while no prompt of the
    batch is copied, which would make a tree depend on its neighbours).

    ``dynamic=True`` is for trees that start with one chain (``chains=1``), the pre-monitoring: the first call computes
    :func:`initial_rollouts` of ``rollouts`` trajectories, with H_root the H of that chain's first turn and H_tool the
    mean H of all its turns, and starts the further chains from the root. The published code throws the pre-monitoring
    chain away; here it is the first of them.

    Raises ``ConfigError`` for options out of range and for turns without entropies.
    """
    del rng
    chance = _Chance(entropy_weight, branch_probability, beam_size, _norm(vocab_size))
    if not decay >= 0 or penalty not in ("chain", "tree"):
        raise ConfigError(f"decay must be at least 0, penalty 'chain' or 'tree', found {decay} and {penalty!r}")
    if dynamic != (rollouts is not None) or (rollouts is not None and rollouts < 1):
        raise ConfigError(
            f"dynamic={dynamic} with rollouts={rollouts}: the number of first chains is a share of rollouts, the "
            "trajectories of a tree; set dynamic=true and rollouts to at least 1, or neither"
        )
    if rollouts is not None and (missing := _first_chains(tree, rollouts, chance) - len(tree.root.children)) > 0:
        return _fresh(tree, min(k, missing), f"first chains, {missing} left to start")

    def decide(u: float, turn: _Turn) -> tuple[float, bool, str]:
        delta, c = chance.delta(turn), turn.consecutive
        x, branch = aepo_branch(
            u, delta, c, entropy_weight=entropy_weight, branch_probability=branch_probability, decay=decay
        )
        sum_ = f"(u {u:.4f} + {entropy_weight:g} x (H - H0 {delta:+.4f}))"
        return x, branch, f"{sum_} x penalty of {c} in a row = {x:.4f} >= {branch_probability:g}"

    return _branch(tree, k, chance, decide, over=penalty)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn, the first turn of the chain that sampled it, and how many copied turns (or levels) lie right above it."""

    node: Node
    head: Node
    consecutive: int


_Decide: TypeAlias = Callable[[float, _Turn], tuple[float, bool, str]]


@dataclass(frozen=True, slots=True)
class _Chance:
    """The options that both rules share; ``norm`` is ``ln(vocab_size)``."""

    entropy_weight: float
    branch_probability: float
    beam_size: int
    norm: float

    def __post_init__(self) -> None:
        if not 0 <= self.branch_probability <= 1 or self.beam_size < 1 or not math.isfinite(self.entropy_weight):
            raise ConfigError(
                "expected branch_probability in [0, 1], beam_size of at least 1 and a finite entropy_weight, found "
                f"{self.branch_probability}, {self.beam_size} and {self.entropy_weight}"
            )

    def entropy(self, node: Node) -> float:
        if node.turn_ids and not node.entropies:
            raise ConfigError(
                f"token-entropy branching needs the entropy of every sampled token, but node {node.path} has "
                f"{len(node.turn_ids)} tokens and no entropies; use an engine that reports them (entropy_kind exact or "
                "topk, such as HFEngine), or another expansion rule"
            )
        return math.fsum(node.entropies[:ENTROPY_TOKENS]) / self.norm

    def delta(self, turn: _Turn) -> float:
        return self.entropy(turn.node) - self.entropy(turn.head)


def _norm(vocab_size: int | None) -> float:
    if vocab_size is None or vocab_size < 2:
        raise ConfigError(
            f"token-entropy branching divides by ln(vocab_size): expected the tokenizer's size, found {vocab_size}"
        )
    return math.log(vocab_size)


def _branch(tree: Tree, k: int, chance: _Chance, decide: _Decide, *, over: Over) -> list[Expansion]:
    for level in _levels(tree, over):
        copies = [e for turn in level for e in _copies(tree, turn, chance, decide)]
        if copies:
            return copies[:k]
    return _fresh(tree, min(k, 1), "no copy left to make: a new chain")


def _levels(tree: Tree, over: Over) -> Iterator[list[_Turn]]:
    """Turns by depth, each level in the order of the published loop: chains that go on, then the new copies."""
    level = [_Turn(node, node, 0) for node in tree.root.children]
    while level:
        yield level
        copied = any(len(turn.node.children) > 1 for turn in level)

        def count(turn: _Turn, copied: bool = copied) -> int:
            return turn.consecutive + 1 if (copied if over == "tree" else len(turn.node.children) > 1) else 0

        onward = [_Turn(t.node.children[0], t.head, count(t)) for t in level if t.node.children]
        level = onward + [_Turn(c, c, count(t)) for t in level for c in t.node.children[1:]]


def _copies(tree: Tree, turn: _Turn, chance: _Chance, decide: _Decide) -> list[Expansion]:
    """The copies of ``turn`` that its draws ask for and that were not made yet."""
    node = turn.node
    if node.is_leaf or not node.branchable or node.action == "invalid":
        return []
    draws = derive_rng(tree.seed, node.path, "arpo").random(chance.beam_size - 1)
    wanted = [(score, why) for score, branch, why in (decide(float(u), turn) for u in draws) if branch]
    made = max(0, len(node.children) - 1)
    return [Expansion(node, node, score, why) for score, why in wanted[made:]]


def _fresh(tree: Tree, count: int, reason: str) -> list[Expansion]:
    return [Expansion(tree.root, tree.root, None, reason)] * count if tree.root.branchable else []


def _first_chains(tree: Tree, total: int, chance: _Chance) -> int:
    turns: list[Node] = []
    node = tree.root
    while node.children:
        node = node.children[0]
        turns.append(node)
    entropies = [chance.entropy(n) for n in turns]
    if not entropies:
        return 1
    return initial_rollouts(entropies[0], math.fsum(entropies) / len(entropies), total)
