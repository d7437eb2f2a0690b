"""Adaptive budgets: what settled prompts leave over goes to the other prompts of the rollout.

A prompt is *settled* when every first chain of every one of its trees answered in its first turn, and the mean negative
log-prob of each such turn's sampled tokens, in nats, is below a threshold. More samples would repeat what is certain,
so it is not expanded. What it would still have been allowed (expansions, and the rest of its token and tool-call budget
where these are bounded) is dealt once, when the trees of all other prompts have made their own rounds. The outcome
therefore does not depend on which tree ends first.

The deal is round robin: one expansion each, to the first trees of the prompts whose rewards differ (their credit is not
zero), in the order of the prompts, then to their second trees, then to the trees of the prompts whose rewards do not
differ. Tokens and tool calls are split equally among the trees that were dealt expansions. Whoever was dealt goes on in
rounds as before, and stops when its expansions or its budget are used up.
"""

from __future__ import annotations

from collections.abc import Iterable

from turntree.trainers.expansion.rule import mean_nll
from turntree.trainers.plan import Allowance, Budget, GrowthPlan, part
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Node, Tree

__all__ = ["allowances", "is_certain", "left_over", "rewards_differ"]


def is_certain(tree: Tree, threshold: float) -> bool:
    """Whether all trajectories answered in their first turn, each of mean negative log-prob below ``threshold`` (nats).

    Raises ``ConfigError`` for turns without log-probs.
    """
    return bool(tree.root.children) and all(_is_certain(turn, threshold) for turn in tree.root.children)


def _is_certain(turn: Node, threshold: float) -> bool:
    return turn.status == "answered" and mean_nll(turn) < threshold


def rewards_differ(trees: Iterable[Tree]) -> bool:
    """Whether the scored leaves of a prompt's trees have different rewards."""
    return len({leaf.reward for tree in trees for leaf in tree.scored_leaves()}) > 1


def left_over(plan: GrowthPlan, used: Tally) -> Allowance:
    """What a prompt that used ``used`` for its first chains gives away."""
    budget = plan.budget or Budget()
    expansions = plan.trees * plan.rounds * plan.expansions
    if budget.leaves is not None:
        expansions = min(expansions, max(0, budget.leaves - used.trajectories))
    return Allowance(
        expansions, _rest(budget.generated_tokens, used.generated_tokens), _rest(budget.tool_calls, used.tool_calls)
    )


def _rest(bound: int | None, used: int) -> int:
    return 0 if bound is None else max(0, bound - used)


def allowances(pool: Allowance, trees: int) -> list[Allowance]:
    """``pool`` dealt to the first of ``trees`` trees, as many as there are expansions; the others get nothing."""
    seats = min(trees, pool.expansions)
    shares = ((pool.expansions, pool.generated_tokens, pool.tool_calls) for _ in range(seats))
    return [Allowance(*(part(total, seat, seats) for total in share)) for seat, share in enumerate(shares)]
