"""Published scorers of short answers, by name, as their own code computes them.

Results of a paper compare with those of its scorer only. Each function takes a prediction and all gold answers, takes
the best gold answer, and gives its numbers by name. :mod:`turntree.envs.metrics` holds the project's own metrics.

- ``hotpotqa``: ``hotpot_evaluate_v1.py`` (EM, F1, precision, recall); ``yes``, ``no`` and ``noanswer`` match whole.
- ``squad``: ``evaluate-v1.1.py`` (EM, F1), without that rule.
- ``search_r1``: ``qa_em.py`` of Search-R1 and its descendants (EM, sub-EM by substring).
- ``cover``: cover EM as in R1-Searcher: punctuation separates, every word of the answer occurs in the prediction.
- ``unicode``, ``zh``, ``cmrc``: EM, F1 and sub-EM of :mod:`turntree.envs.metrics` under the normaliser of that name.
"""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast, get_args

from turntree.envs.loading import resolve
from turntree.envs.metrics import Normalizer, exact_match, f1_score, normalize_answer, sub_exact_match
from turntree.errors import ConfigError

__all__ = ["SCORERS", "AnswerMetrics", "cover", "hotpotqa", "load_scorer", "normalized", "search_r1", "squad"]

AnswerMetrics: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, float]]
"""``scorer(prediction, golden_answers)``: numbers by name. A question without an answer is never shown: it gets 0."""

_CLOSED = frozenset({"yes", "no", "noanswer"})
_SPACED = str.maketrans(dict.fromkeys(string.punctuation, " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def hotpotqa(prediction: str, golden_answers: Sequence[str]) -> dict[str, float]:
    """HotpotQA's EM, and F1 with its precision and recall, of the gold answer with the best F1."""
    left = normalize_answer(prediction)
    best = max((_overlap(left, normalize_answer(gold), closed=True) for gold in golden_answers), key=lambda o: o[0])
    em = any(left == normalize_answer(gold) for gold in golden_answers)
    return {"em": float(em), "f1": best[0], "precision": best[1], "recall": best[2]}


def squad(prediction: str, golden_answers: Sequence[str]) -> dict[str, float]:
    """SQuAD v1.1's EM and F1."""
    left = normalize_answer(prediction)
    golds = [normalize_answer(gold) for gold in golden_answers]
    return {"em": float(left in golds), "f1": max(_overlap(left, gold, closed=False)[0] for gold in golds)}


def search_r1(prediction: str, golden_answers: Sequence[str]) -> dict[str, float]:
    """Search-R1's EM and sub-EM. A gold answer that normalises to nothing is contained in every prediction."""
    left = normalize_answer(prediction)
    golds = [normalize_answer(gold) for gold in golden_answers]
    return {"em": float(left in golds), "sub_em": float(any(gold in left for gold in golds))}


def cover(prediction: str, golden_answers: Sequence[str]) -> dict[str, float]:
    """Cover EM: 1 if all words of some gold answer are among those of the prediction, in any order."""
    words = set(_cover_words(prediction))
    return {"em": float(any(set(_cover_words(gold)) <= words for gold in golden_answers))}


def normalized(prediction: str, golden_answers: Sequence[str], *, normalizer: Normalizer) -> dict[str, float]:
    """EM, F1 and sub-EM of this project under a normaliser."""
    rules = {"em": exact_match, "f1": f1_score, "sub_em": sub_exact_match}
    return {name: rule(prediction, golden_answers, normalizer=normalizer) for name, rule in rules.items()}


SCORERS: dict[str, AnswerMetrics] = {
    "hotpotqa": hotpotqa,
    "squad": squad,
    "search_r1": search_r1,
    "cover": cover,
    **{name: functools.partial(normalized, normalizer=name) for name in get_args(Normalizer) if name != "squad"},
}
"""Scorers by name; others are given by import path."""


def load_scorer(name: str, *, what: str = "scorer") -> AnswerMetrics:
    """A scorer from its name or import path. Raises ``ConfigError``; ``what`` names the option."""
    found: Any = resolve(name, SCORERS, what=what)
    if not callable(found):
        raise ConfigError(f"{what}: expected a function of a prediction and gold answers, found {found!r:.100}")
    return cast("AnswerMetrics", found)


def _overlap(left: str, right: str, *, closed: bool) -> tuple[float, float, float]:
    """F1, precision and recall of tokens; ``closed``: yes, no and noanswer match whole or not at all."""
    if closed and left != right and (left in _CLOSED or right in _CLOSED):
        return 0.0, 0.0, 0.0
    predicted, golden = left.split(), right.split()
    common = sum((Counter(predicted) & Counter(golden)).values())
    if not common:
        return 0.0, 0.0, 0.0
    precision, recall = common / len(predicted), common / len(golden)
    return 2 * precision * recall / (precision + recall), precision, recall


def _cover_words(text: str) -> list[str]:
    named = {"True": "yes", "False": "no"}.get(text, text)
    return _ARTICLES.sub(" ", named.lower().translate(_SPACED)).split()
