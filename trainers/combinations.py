"""Which built-in expansion rules, credit rules and ratio levels go together, and why the others do not.

The table stands in docs/combinations.md. Rules of your own go with everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from turntree.trainers.surrogate import LEVELS

__all__ = ["CREDITS", "EXPANSIONS", "RATIOS", "Refusal", "combinations", "refusal", "render"]

EXPANSIONS = ("chain", "random_nodes", "entropy", "arpo", "aepo", "value_variance", "ucb", "guided")
"""Built-in expansion rules."""
CREDITS = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "tree_grpo",
    "tree_grpo_reference",
    "at2po",
    "at2po_reference",
    "at2po_centred",
    "tree_diff",
    "tree_diff_reference",
    "sibling_baseline",
    "shrunk_loo",
    "arpo",
    "rejection_sampling",
)
"""Built-in credit rules."""
RATIOS = LEVELS
"""Levels of the ratio."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Combinations that are refused for one reason: every one of the named rules and levels with each other."""

    expansions: tuple[str, ...]
    credits: tuple[str, ...]
    ratios: tuple[str, ...]
    reason: str

    def covers(self, expansion: str, credit: str, ratio: str) -> bool:
        return expansion in self.expansions and credit in self.credits and ratio in self.ratios


REFUSALS = (
    Refusal(
        ("chain",),
        ("sibling_baseline",),
        RATIOS,
        "chains branch at the root only: every turn after the first has no sibling, so its advantage would be 0",
    ),
    Refusal(
        ("guided",),
        ("at2po", "at2po_reference", "at2po_centred"),
        RATIOS,
        "guided expansion chooses by entropy, and V(n) weighs the children by entropy once more: what one noisy "
        "entropy picked would also dominate the credit",
    ),
    Refusal(
        EXPANSIONS,
        ("reinforce_pp", "gae"),
        ("turn", "sequence"),
        "their advantages differ from token to token, but one ratio a turn or sequence is clipped as a whole",
    ),
)


def refusal(expansion: str, credit: str, ratio: str) -> str | None:
    """Why three built-in names do not go together; None if they do, or if one of them is not built in."""
    return next((r.reason for r in REFUSALS if r.covers(expansion, credit, ratio)), None)


def combinations() -> Iterator[tuple[str, str, str]]:
    """All (expansion, credit, ratio) that are allowed."""
    for expansion in EXPANSIONS:
        for credit in CREDITS:
            for ratio in RATIOS:
                if refusal(expansion, credit, ratio) is None:
                    yield expansion, credit, ratio


def render() -> str:
    """The table as Markdown: the ratio levels that are allowed, or the number of the reason that allows none."""
    lines = [
        "| credit | " + " | ".join(f"`{e}`" for e in EXPANSIONS) + " |",
        "|---|" + "---|" * len(EXPANSIONS),
    ]
    for credit in CREDITS:
        lines.append(f"| `{credit}` | " + " | ".join(_cell(e, credit) for e in EXPANSIONS) + " |")
    notes = [f"{i}. {r.reason[0].upper()}{r.reason[1:]}." for i, r in enumerate(REFUSALS, 1)]
    return "\n".join([*lines, "", *notes])


def _cell(expansion: str, credit: str) -> str:
    allowed = [ratio for ratio in RATIOS if refusal(expansion, credit, ratio) is None]
    numbers = [str(i) for i, r in enumerate(REFUSALS, 1) if any(r.covers(expansion, credit, x) for x in RATIOS)]
    words = "all" if len(allowed) == len(RATIOS) else ", ".join(allowed) or "no"
    return f"{words} ({', '.join(numbers)})" if numbers else words
