"""What no search is needed for: one constant answer to all questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from turntree.envs.metrics import Normalizer, exact_match, f1_score, normalize_answer
from turntree.envs.task import Question
from turntree.trainers.evaluation.summary import interval_json
from turntree.trainers.stats import bootstrap_mean, share_interval

__all__ = ["constant_score", "most_frequent_answer"]


def most_frequent_answer(questions: Sequence[Question], *, normalizer: Normalizer = "squad") -> str | None:
    """The gold answer that is right for most questions after normalisation; of equal ones the first.

    It is taken from the questions that are scored, so no constant answer has a higher exact match. None without
    questions that have gold answers.
    """
    counts: Counter[str] = Counter()
    written: dict[str, str] = {}
    for question in questions:
        forms = {normalize_answer(str(gold), normalizer=normalizer): str(gold) for gold in question.golden_answers}
        counts.update(forms.keys())
        for form, gold in forms.items():
            written.setdefault(form, gold)
    return written[counts.most_common(1)[0][0]] if counts else None


def constant_score(
    questions: Sequence[Question], answer: str, *, normalizer: Normalizer = "squad", seed: int = 0
) -> dict[str, Any]:
    """EM and F1, with intervals, of giving ``answer`` to every question."""
    asked = [q for q in questions if q.golden_answers]
    em = [exact_match(answer, q.golden_answers, normalizer=normalizer) for q in asked]
    f1 = [f1_score(answer, q.golden_answers, normalizer=normalizer) for q in asked]
    return {
        "answer": answer,
        "em": interval_json(share_interval(em)),
        "f1": interval_json(bootstrap_mean(f1, seed=seed)),
    }
