"""Which language questions are in, and the normaliser that their answers are compared after."""

from __future__ import annotations

import re
from collections.abc import Iterable

from turntree.envs.grammar.words import Language
from turntree.envs.metrics import Normalizer
from turntree.envs.task import Question

__all__ = ["language_of", "normalizer_for"]

_HAN = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")
# Kana and Hangul: Japanese and Korean questions hold Chinese characters too.
_OTHERS = re.compile("[\u3040-\u30ff\u31f0-\u31ff\u1100-\u11ff\uac00-\ud7af]")


def language_of(questions: Iterable[Question]) -> Language:
    """``zh`` where more than half of the questions are Chinese, else ``en``.

    A question says its language in ``metadata["language"]`` (``zh``, ``zh-CN``, ...). Of one that does not, it is read
    off the text: Chinese holds Chinese characters and neither kana nor Hangul.
    """
    votes = [_is_chinese(question) for question in questions]
    return "zh" if 2 * sum(votes) > len(votes) else "en"


def normalizer_for(questions: Iterable[Question]) -> Normalizer:
    """The normaliser of the questions' language: ``zh`` for Chinese, else ``squad``."""
    return "zh" if language_of(questions) == "zh" else "squad"


def _is_chinese(question: Question) -> bool:
    told = question.metadata.get("language")
    if isinstance(told, str) and told:
        return told.replace("_", "-").partition("-")[0].lower() in ("zh", "chinese", "cmn")
    return bool(_HAN.search(question.question)) and not _OTHERS.search(question.question)
