"""Intra-group comparison against step-level DPO: the same direction, another weight (docs/algorithms.md).

At a state with n sampled continuations of rewards 0 and 1, p_w of them winners, both gradients are multiples of
mean over winners of grad log pi - mean over losers of grad log pi.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from turntree.trainers.credit import grpo, normalise
from turntree.trainers.forward import score_packs
from turntree.trainers.losses import Denominators, Occurrences, Pairs, policy_loss, step_dpo
from turntree.trainers.objectives import PolicyObjective
from turntree.trainers.packing import Pack, pack_groups, pack_pairs, write_advantages
from turntree.trainers.pairs import sibling_pairs
from turntree.trainers.tree import Group, Node, Tree

SIZE = 6
seeds = st.integers(0, 10_000)
counts = st.integers(1, 4)


@dataclass(frozen=True)
class Siblings:
    """Continuations sampled from one state of a tabular soft-max policy, the winners first.

    ``table`` [SIZE, SIZE] holds the logits of the next token after each token; ``tokens`` the continuations' tokens.
    """

    table: Tensor
    tokens: list[list[int]]
    winners: int

    @classmethod
    def draw(cls, seed: int, winners: int, losers: int) -> Siblings:
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64)
        lengths = torch.randint(1, 5, (winners + losers,), generator=generator).tolist()
        tokens = [torch.randint(0, SIZE, (length,), generator=generator).tolist() for length in lengths]
        return cls(table.requires_grad_(), tokens, winners)

    @property
    def rewards(self) -> list[float]:
        return [1.0] * self.winners + [0.0] * (len(self.tokens) - self.winners)

    @property
    def shares(self) -> tuple[float, float]:
        """p_w and p_l."""
        return self.winners / len(self.tokens), 1 - self.winners / len(self.tokens)

    def token_logps(self) -> list[Tensor]:
        logp = torch.log_softmax(self.table, dim=1)
        return [logp[[0, *tokens[:-1]], tokens] for tokens in self.tokens]

    def logps(self) -> Tensor:
        """[n]: log-prob of each continuation."""
        return torch.stack([logp.sum() for logp in self.token_logps()])

    def scores(self) -> Tensor:
        """[n, SIZE * SIZE]: grad log pi of each continuation."""
        one = torch.eye(len(self.tokens), dtype=torch.float64)
        return torch.autograd.grad(self.logps(), self.table, one, is_grads_batched=True)[0].flatten(1)

    def contrast(self) -> Tensor:
        """Mean over winners less mean over losers of grad log pi."""
        scores = self.scores()
        return scores[: self.winners].mean(0) - scores[self.winners :].mean(0)

    def group_gradient(self, std: str) -> Tensor:
        """Of the policy objective (to be raised) with the siblings' normalised rewards as advantages."""
        parts = self.token_logps()
        leaf = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(p) for p in parts]))
        logp = torch.cat(parts)
        advantage = torch.from_numpy(normalise(self.rewards, std=std, eps=0.0))  # type: ignore[arg-type]
        n = len(parts)
        occ = Occurrences(logp, logp.detach(), advantage[leaf], torch.ones_like(logp).detach(), leaf, leaf, n, n)
        total = Denominators.of_occurrences(occ.weight, leaf, n_leaves=n)
        loss = policy_loss(occ, total, aggregation="seq-mean-token-sum").loss
        return -torch.autograd.grad(loss, self.table)[0].flatten()

    def dpo_gradient(self, log_ratios: Tensor, *, beta: float) -> Tensor:
        """Of step-level DPO (to be raised) over all ordered pairs, where log pi - log ref are ``log_ratios`` [n]."""
        logp = self.logps()
        ref = logp.detach() - log_ratios
        grid = [(w, lo) for w in range(self.winners) for lo in range(self.winners, len(self.tokens))]
        winner, loser = torch.tensor(grid).unbind(1)
        pairs = Pairs(logp[winner], logp[loser], ref[winner], ref[loser], torch.ones(len(grid)).double())
        loss = step_dpo(pairs, Denominators(0.0, 0.0, 0.0, pairs=float(len(grid))), beta=beta).loss
        return -torch.autograd.grad(loss, self.table)[0].flatten()


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, winners=counts, losers=counts, std=st.sampled_from(["population", "none"]))
def test_the_weight_of_the_intra_group_gradient(seed: int, winners: int, losers: int, std: str) -> None:
    siblings = Siblings.draw(seed, winners, losers)
    p_w, p_l = siblings.shares
    weight = math.sqrt(p_w * p_l) if std == "population" else p_w * p_l
    torch.testing.assert_close(siblings.group_gradient(std), weight * siblings.contrast())


@settings(max_examples=30, deadline=None)
@given(
    seed=seeds,
    winners=counts,
    losers=counts,
    beta=st.sampled_from([0.05, 0.1, 1.0]),
    ratios=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
)
def test_the_weight_of_the_step_dpo_gradient_with_one_margin(
    seed: int, winners: int, losers: int, beta: float, ratios: tuple[float, float]
) -> None:
    """All winners have one log-ratio to the reference and all losers have one: every pair has the same margin m."""
    siblings = Siblings.draw(seed, winners, losers)
    log_ratios = torch.tensor([ratios[0]] * winners + [ratios[1]] * losers).double()
    margin = beta * (ratios[0] - ratios[1])
    weight = beta / (1 + math.exp(margin))
    torch.testing.assert_close(siblings.dpo_gradient(log_ratios, beta=beta), weight * siblings.contrast())


@settings(max_examples=30, deadline=None)
@given(seed=seeds, winners=counts, losers=counts, shared=st.floats(-3, 3), std=st.sampled_from(["population", "none"]))
def test_both_gradients_point_the_same_way(seed: int, winners: int, losers: int, shared: float, std: str) -> None:
    siblings = Siblings.draw(seed, winners, losers)
    if float(siblings.contrast().norm()) < 1e-6:  # winners and losers sampled the same tokens
        return
    log_ratios = torch.full((winners + losers,), shared).double()
    assert cosine(siblings.group_gradient(std), siblings.dpo_gradient(log_ratios, beta=0.1)) == pytest.approx(1)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, winners=counts, losers=counts)
def test_with_unequal_margins_each_pair_has_a_weight_of_its_own(seed: int, winners: int, losers: int) -> None:
    siblings = Siblings.draw(seed, winners, losers)
    log_ratios = 3 * torch.randn(winners + losers, generator=torch.Generator().manual_seed(seed)).double()
    scores, beta = siblings.scores(), 0.5
    margins = beta * (log_ratios[:winners, None] - log_ratios[None, winners:])
    weight = beta * torch.sigmoid(-margins) / (winners * losers)
    expected = weight.sum(1) @ scores[:winners] - weight.sum(0) @ scores[winners:]
    torch.testing.assert_close(siblings.dpo_gradient(log_ratios, beta=beta), expected)


def test_with_unequal_margins_the_directions_differ() -> None:
    """A pair that the policy already prefers by far weighs nearly nothing under DPO, and as much as any other inside
    a group."""
    siblings = Siblings(torch.zeros(SIZE, SIZE).double().requires_grad_(), [[1], [2], [3]], winners=2)
    settled = siblings.dpo_gradient(torch.tensor([9.0, 0.0, 0.0]).double(), beta=1.0)
    assert cosine(siblings.group_gradient("population"), settled) < 0.95
    even = siblings.dpo_gradient(torch.zeros(3).double(), beta=1.0)
    assert cosine(siblings.group_gradient("population"), even) == pytest.approx(1)


# -- the same on packs of trees and a network ------------------------------------------------------------------------


def sibling_group(seed: int, winners: int, losers: int) -> Group:
    """One tree: a shared first turn, then single-turn answers of rewards 1 and 0."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(0, 23, (length,), generator=generator).tolist())

    root = Node(observation_ids=ids(2, 5))
    turn = ids(1, 4)
    search = root.add_child(Node(turn_ids=turn, logprobs=(0.0,) * len(turn), observation_ids=ids(1, 4)))
    for ordinal in range(winners + losers):
        answer, reward = ids(1, 5), 1.0 if ordinal < winners else 0.0
        search.add_child(
            Node(ordinal=ordinal, turn_ids=answer, logprobs=(0.0,) * len(answer), status="answered", reward=reward)
        )
    return Group("q", [Tree(root, "q")])


def gradient(objective: PolicyObjective, model: LlamaForCausalLM, packs: list[Pack]) -> Tensor:
    denominators = Denominators.of(packs)
    losses = torch.stack([objective(pack, denominators)["loss_objective"] for pack in packs])
    return torch.cat([g.flatten() for g in torch.autograd.grad(-losses.sum(), list(model.parameters()))])


@settings(max_examples=8, deadline=None)
@given(seed=seeds, winners=counts, losers=counts)
def test_both_objectives_point_the_same_way_on_packs(
    tiny_llama: LlamaForCausalLM, seed: int, winners: int, losers: int
) -> None:
    """The advantages of siblings add up to 0, so the shared first turn has no gradient, as it has none under DPO."""
    group = sibling_group(seed, winners, losers)
    packs = pack_groups([group], max_pack_tokens=1000)
    write_advantages(packs, grpo([group], std="population", eps=0.0))
    intra = gradient(PolicyObjective(tiny_llama, aggregation="seq-mean-token-sum"), tiny_llama, packs)
    pairs = pack_pairs([group], max_pack_tokens=1000, pairs=sibling_pairs)
    score_packs(tiny_llama, pairs, key="ref_logp")
    beta = 0.3
    dpo = gradient(PolicyObjective(tiny_llama, loss=functools.partial(step_dpo, beta=beta)), tiny_llama, pairs)
    p_w = winners / (winners + losers)
    torch.testing.assert_close(
        intra / math.sqrt(p_w * (1 - p_w)), dpo / (beta / 2), rtol=1e-3, atol=1e-4 * float(intra.abs().max()) + 1e-6
    )
