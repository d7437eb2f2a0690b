"""Several trajectories of one question: chance that some are right, and choosing one without the gold answers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from turntree.envs.metrics import Normalizer, normalize_answer
from turntree.errors import ConfigError, DataError
from turntree.trainers.evaluation.rows import EvalRow

__all__ = ["choose", "majority", "pass_at_k", "powers", "within_tokens"]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of ``k`` of ``n`` samples, drawn without replacement, is among the ``correct`` ones.

    The unbiased estimator ``1 - C(n - c, k) / C(n, k)`` (Chen et al. 2021, Evaluating Large Language Models Trained on
    Code, equation 1), exactly. Raises ``DataError`` unless ``0 <= correct <= n`` and ``1 <= k <= n``.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise DataError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, found n={n}, correct={correct}, k={k}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def powers(n: int) -> list[int]:
    """1, 2, 4, ... and ``n``."""
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n}) if n > 0 else []


def majority(rows: Sequence[EvalRow], *, normalizer: Normalizer = "squad") -> int | None:
    """Place of a row with the most frequent answer after normalisation; None where no row answered.

    Rows without an answer do not vote. Of equally frequent answers the one that the model found likeliest in all wins
    (sum of mean log-probs), then the one given first; it is represented by its likeliest row.
    """
    votes: defaultdict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.prediction is not None and not row.failed:
            votes[normalize_answer(row.prediction, normalizer=normalizer)].append(i)
    if not votes:
        return None

    def weight(places: Sequence[int]) -> tuple[int, float, int]:
        return len(places), math.fsum(_logprob(rows[i]) for i in places), -places[0]

    places = max(votes.values(), key=weight)
    return max(places, key=lambda i: (_logprob(rows[i]), -i))


def choose(rows: Sequence[EvalRow], how: str, *, normalizer: Normalizer = "squad") -> int | None:
    """Place of the row that ``how`` chooses; None where every trajectory failed.

    ``majority``; or the highest ``logprob`` (mean over sampled tokens), ``value`` (of a value head) or ``scorer``
    (reward of a configured scorer). Trajectories without an answer are chosen only where no other is there. Raises
    ``ConfigError`` for a number that the rows do not have.
    """
    live = [i for i, row in enumerate(rows) if not row.failed]
    if not live:
        return None
    if how == "majority":
        found = majority(rows, normalizer=normalizer)
        return live[0] if found is None else found
    readers: dict[str, Callable[[EvalRow], float | None]] = {
        "logprob": lambda row: row.logprob,
        "value": lambda row: row.value,
        "scorer": lambda row: row.reward,
    }
    if how not in readers:
        raise ConfigError(f"eval.choose={how}: expected majority or one of {list(readers)}")
    numbers = {i: readers[how](rows[i]) for i in live}
    if all(value is None for value in numbers.values()):
        raise ConfigError(
            f"eval.choose={how}: expected a number for each trajectory, found none: a chat endpoint has no log-probs, "
            "value needs eval.value_head, scorer needs reward.scorer"
        )

    def rank(i: int) -> tuple[bool, float, int]:
        value = numbers[i]
        return rows[i].prediction is not None, -math.inf if value is None else value, -i

    return max(live, key=rank)


def within_tokens(rows: Sequence[EvalRow], tokens: int) -> list[EvalRow]:
    """The first rows that together took at most ``tokens`` generated tokens, and the first one in any case."""
    kept: list[EvalRow] = []
    used = 0
    for row in rows:
        used += row.generated_tokens
        if kept and used > tokens:
            break
        kept.append(row)
    return kept


def _logprob(row: EvalRow) -> float:
    return 0.0 if row.logprob is None else row.logprob
