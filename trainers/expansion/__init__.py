"""Where a tree grows next: expansion rules.

A rule is a function ``rule(tree, k, rng, **options) -> list[Expansion]``: up to ``k`` places to grow, repetition
allowed. It reads the tree, never changes it, and draws from ``rng`` only, or from a generator derived from
``tree.seed``. A tree in which nothing runs and for which it names no place grows no more. A rule may carry an attribute
``needs``:

- ``"finished_round"`` (the default): it is asked between the rounds of a tree, when every trajectory has ended;
- ``"any"``: it may be asked while trajectories of the tree are still running, for one place at a time, until as many
  run as the larger of chains and expansions. Trees then depend on the order in which trajectories end, so all rules
  here need a finished round.

Both ways of naming a place map to one. Most rules pick a state and grow a child of it; AT2PO picks a turn and generates
it again, which is a new child of its parent (``Expansion.picked`` keeps the turn).
"""

from turntree.trainers.expansion.asking import ask_rule
from turntree.trainers.expansion.branching import (
    aepo,
    aepo_branch,
    arpo,
    arpo_branch,
    initial_rollouts,
    truncated_entropy,
)
from turntree.trainers.expansion.nodes import chain, entropy, random_nodes
from turntree.trainers.expansion.outcomes import guided, ucb, value_variance
from turntree.trainers.expansion.rule import Expansion, ExpansionRule, Needs, needs_of

__all__ = [
    "Expansion",
    "ExpansionRule",
    "Needs",
    "aepo",
    "aepo_branch",
    "arpo",
    "arpo_branch",
    "ask_rule",
    "chain",
    "entropy",
    "guided",
    "initial_rollouts",
    "needs_of",
    "random_nodes",
    "truncated_entropy",
    "ucb",
    "value_variance",
]
