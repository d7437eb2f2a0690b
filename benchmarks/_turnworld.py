"""TurnWorld-S: questions of several hops for a tabular policy, small enough for its exact success rate.

A question is a sequence of H contexts. Each search turn chooses a relation and a sense of a name in the context of the
next hop. Relation 0 with sense 0 is right. Relations 1 and 2 find nothing: the same hop is tried again, without what
was tried. Every other mistake is a dead end that nobody sees: the hops go on, the answer is wrong. After the last hop,
or H + 2 searches, one answer turn chooses an answer in the last context; 0 is right. The reward is exact match.

The policy is a softmax over logits ``[3 C, K]``: C rows of relations, C of senses, C of answers, each as wide as the
widest. Choices are read from a table ``[6 C, K]`` in which relations have a row for each set of tried ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from turntree.trainers.seeds import derive_rng

__all__ = [
    "ANSWERS",
    "OBSERVATION_TOKENS",
    "START",
    "WORLDS",
    "Question",
    "State",
    "World",
    "answer",
    "question",
    "search",
]

ANSWERS = 3
SPARE_SEARCHES = 2
OBSERVATION_TOKENS = 300
SEARCH_TOKENS = (20, 80)
ANSWER_TOKENS = (10, 40)

Question = tuple[int, ...]
"""The context of each hop."""


@dataclass(frozen=True, slots=True)
class State:
    """Hops done, searches made, relations tried at this hop (bit 0: relation 1, bit 1: relation 2), on a dead end."""

    hop: int = 0
    searches: int = 0
    tried: int = 0
    lost: bool = False

    def answers(self, hops: int) -> bool:
        """Whether the next turn is the answer."""
        return self.hop == hops or self.searches == hops + SPARE_SEARCHES


START = State()


def search(state: State, relation: int, sense: int) -> State:
    """The state after a search turn."""
    if relation in (1, 2):
        return State(state.hop, state.searches + 1, state.tried | relation, state.lost)
    return State(state.hop + 1, state.searches + 1, 0, state.lost or relation != 0 or sense != 0)


def answer(state: State, choice: int, *, hops: int) -> float:
    """Exact match of an answer: 1 after all hops on the right way with the right answer, else 0."""
    return float(choice == 0 and state.hop == hops and not state.lost)


@dataclass(frozen=True)
class World:
    """A family of questions, and how the cold start knows it.

    ``contexts`` C, ``relations`` B (at least 3) and ``senses`` B2 a context; H is uniform over ``hops``. Logits of the
    cold start are N(0, 1), plus ``advantage`` on the right choice, or plus 4 with probability ``known``. ``tokens`` is
    what a learning curve may use: sampled tokens, with ``observations`` those of observations too.
    """

    contexts: int
    relations: int
    senses: int
    hops: tuple[int, ...]
    advantage: float
    known: float
    tokens: int
    observations: bool = False

    @property
    def width(self) -> int:
        return max(self.relations, self.senses, ANSWERS)

    def relation_row(self, context: int, tried: int = 0) -> int:
        """The row of the table of choices for a relation, after ``tried``."""
        return tried * self.contexts + context

    def sense_row(self, context: int) -> int:
        return 4 * self.contexts + context

    def answer_row(self, context: int) -> int:
        return 5 * self.contexts + context

    @cached_property
    def _parameter_rows(self) -> Tensor:
        own = torch.arange(self.contexts)
        return torch.cat([own, own, own, own, own + self.contexts, own + 2 * self.contexts])

    @cached_property
    def _barred(self) -> Tensor:
        """Where the table has no choice: beyond the width of its kind, and what was tried; ``[6 C, K]`` bool."""
        blocks = torch.arange(self.width)[None] >= torch.tensor([self.relations] * 4 + [self.senses, ANSWERS])[:, None]
        for tried in range(1, 4):
            for relation in (1, 2):
                blocks[tried, relation] |= bool(tried & relation)
        return blocks.repeat_interleave(self.contexts, 0)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The table of choices ``[6 C, K]``: log-probs, -inf where there is no choice."""
        return logits[self._parameter_rows].masked_fill(self._barred, -torch.inf).log_softmax(1)

    def cold_start(self, seed: int) -> Tensor:
        """Logits ``[3 C, K]`` float64; what lies beyond a kind's width is 0 and never read."""
        rng = derive_rng("turnworld", seed, "cold start")
        logits = rng.standard_normal((3 * self.contexts, self.width))
        logits[:, 0] += np.where(rng.random(3 * self.contexts) < self.known, 4.0, self.advantage)
        for block, width in enumerate((self.relations, self.senses, ANSWERS)):
            logits[block * self.contexts : (block + 1) * self.contexts, width:] = 0.0
        return torch.from_numpy(logits)

    def exact_match(self, logits: Tensor) -> Tensor:
        """Expected exact match over all questions, a scalar with a gradient.

        A hop is done after k searches that found nothing, of which the question can bear ``SPARE_SEARCHES`` in all, so
        the hops' distributions of k are convolved; that of the last hop carries the answer, which has its context.
        """
        p = self.log_probs(logits).exp().view(6, self.contexts, self.width)
        first, after_1, after_2, after_both = p[:4]
        retried = first[:, 1] * after_1[:, 0] + first[:, 2] * after_2[:, 0]
        twice = (first[:, 1] * after_1[:, 2] + first[:, 2] * after_2[:, 1]) * after_both[:, 0]
        done = torch.stack([first[:, 0], retried, twice]) * p[4, :, 0]
        hop, last = done.mean(1), (done * p[5, :, 0]).mean(1)
        return torch.stack([self._chained(hop, last, hops) for hops in self.hops]).mean()

    @staticmethod
    def _chained(hop: Tensor, last: Tensor, hops: int) -> Tensor:
        total = last
        for _ in range(hops - 1):
            total = torch.stack([(total[: k + 1] * hop[: k + 1].flip(0)).sum() for k in range(SPARE_SEARCHES + 1)])
        return total.sum()


def question(world: World, rng: np.random.Generator) -> Question:
    """A random question."""
    hops = world.hops[int(rng.integers(len(world.hops)))]
    contexts: npt.NDArray[np.int64] = rng.integers(world.contexts, size=hops)
    return tuple(contexts.tolist())


WORLDS = {
    "A": World(100, 8, 2, (3, 4), 1.0, 0.25, 3_000_000),
    "B": World(60, 8, 3, (4,), 0.5, 0.4, 4_000_000),
    "F": World(150, 6, 2, (4, 5), 1.4, 0.2, 8_000_000),
}
