"""Exact match, sub-exact match and F1 of short answers.

Four normalisers, chosen by name, so that a result can say which one it used:

``squad`` (default; English) reproduces the official SQuAD v1 / HotpotQA scorers: lower case, ASCII punctuation deleted
without inserting a space, ``a``, ``an``, ``the`` removed, white space collapsed. F1 has HotpotQA's rule that ``yes``,
``no`` and ``noanswer`` score 0 against anything else. Known to be blind: ``3.5`` equals ``35``, ``-5`` equals ``5``,
full-width forms and Chinese punctuation are left alone, a Chinese answer is one word. One deviation: a gold answer
that normalises to nothing (``A``, ``The The``) is never contained in every prediction. Sub-EM then asks for equality,
and F1 compares the forms before articles are removed.

``unicode`` (any language) keeps numbers, signs and scripts apart: NFKC and case folding (so NFC equals NFD, full-width
equals half-width, ``ß`` equals ``ss``); Chinese characters and kana are one token each, other scripts split at white
space; punctuation of every script is deleted; a decimal point and a leading minus stay; thousands separators go; other
punctuation between digits separates (``2012-13``); English articles are removed. An answer that would lose everything
keeps what it had. Sub-EM matches whole tokens, so ``5`` is not in ``3.5``.

``zh`` (Chinese) is ``unicode`` with three differences. Articles stay: ``A股`` is not ``股``. Numbers in Chinese
numerals are the numbers they write, where that is beyond doubt (:mod:`turntree.envs.numerals`): ``二〇二〇年`` equals
``2020年`` and ``一百二十`` equals ``120``, while ``一``, ``十``, ``三四``, ``万一`` and ``百年`` stay words. ``是`` and
``否`` score F1 0 against anything else, as ``yes`` and ``no`` do. Traditional and simplified characters differ.

``cmrc`` (Chinese reading comprehension) reproduces the CMRC 2018 scorer: lower case, its list of signs deleted, EM on
what is left, F1 of the longest common run of segments, where a Chinese character is a segment. Two limits: other text
is cut into words and signs, where the scorer uses NLTK; and what is nothing but signs has no sub-EM with anything else.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

from turntree.envs.loading import reject_unknown
from turntree.envs.numerals import arabic
from turntree.errors import DataError

__all__ = ["Normalizer", "exact_match", "f1_score", "normalize_answer", "sub_exact_match"]

Normalizer = Literal["squad", "unicode", "zh", "cmrc"]
"""Names of the answer normalisers."""

_NORMALIZERS = get_args(Normalizer)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ARTICLE_WORDS = frozenset({"a", "an", "the"})
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_CLOSED = {"zh": _CLOSED_ANSWERS | {"是", "否"}}
# cmrc2018_evaluate.py, sp_char. Its "……" has two characters and never equals one.
_CMRC_SIGNS = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_CMRC_SEGMENT = re.compile(r"[\u4e00-\u9fa5]|[^\W\u4e00-\u9fa5]+|[^\w\s]")
# Kana, Bopomofo and Han with its extensions: scripts that are written without spaces.
_UNSPACED = (
    "\u3005-\u3007\u3040-\u30ff\u3100-\u312f\u31a0-\u31bf\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_LONGEST_KEPT = 1000
_STARTS = ("-", "0.")  # what a number begins with that a sign was read as
_DASHES = frozenset("-\u2010\u2011\u2012\u2013\u2014\u2212")


def exact_match(
    prediction: str | None, golden_answers: str | Sequence[str], *, normalizer: Normalizer = "squad"
) -> float:
    """1.0 if the normalised prediction equals any normalised gold answer, else 0.0 (also for ``None``: no answer).

    Raises ``DataError`` without gold answers, and for a prediction that is no text; so do the other two metrics.
    """
    golds = _checked(prediction, golden_answers, normalizer)
    if prediction is None:
        return 0.0
    found = normalize_answer(prediction, normalizer=normalizer)
    return float(any(found == normalize_answer(gold, normalizer=normalizer) for gold in golds))


def sub_exact_match(
    prediction: str | None, golden_answers: str | Sequence[str], *, normalizer: Normalizer = "squad"
) -> float:
    """1.0 if any normalised gold answer is contained in the normalised prediction, else 0.0."""
    golds = _checked(prediction, golden_answers, normalizer)
    if prediction is None:
        return 0.0
    found = normalize_answer(prediction, normalizer=normalizer)
    normal = [normalize_answer(gold, normalizer=normalizer) for gold in golds]
    whole_tokens = normalizer in ("unicode", "zh")
    return float(any(_contains(found, gold, whole_tokens=whole_tokens) for gold in normal))


def f1_score(prediction: str | None, golden_answers: str | Sequence[str], *, normalizer: Normalizer = "squad") -> float:
    """Harmonic mean of token precision and recall, the best over the gold answers; in [0, 1]."""
    golds = _checked(prediction, golden_answers, normalizer)
    return 0.0 if prediction is None else max(_f1(prediction, gold, normalizer) for gold in golds)


def normalize_answer(text: str, *, normalizer: Normalizer = "squad") -> str:
    """The form that is compared; under ``unicode`` and ``zh`` its tokens are joined by single spaces."""
    # Answers come again and again; thousands of long texts (whole observations, turns) would only fill the memory.
    return _remembered(text, normalizer) if len(text) <= _LONGEST_KEPT else _normal(text, normalizer)


def _normal(text: str, normalizer: Normalizer) -> str:
    if normalizer == "unicode":
        tokens = _unicode_tokens(text)
        return " ".join([token for token in tokens if token not in _ARTICLE_WORDS] or tokens)
    if normalizer == "zh":
        return " ".join(_unicode_tokens(arabic(unicodedata.normalize("NFKC", text))))
    if normalizer == "cmrc":
        return "".join(character for character in text.lower().strip() if character not in _CMRC_SIGNS)
    return " ".join(_ARTICLES.sub(" ", _unpunctuated(text)).split())


_remembered = lru_cache(maxsize=4096)(_normal)


def _checked(prediction: Any, golden_answers: Any, normalizer: str) -> list[str]:
    """Gold answers as strings, everything else looked at; data sets hold single strings and numbers too."""
    if normalizer not in _NORMALIZERS:  # asked first: this runs three times a leaf
        reject_unknown([normalizer], _NORMALIZERS, what="normalizer")
    if prediction is not None and not isinstance(prediction, str):
        raise DataError(f"expected a text as prediction (None: no answer), found {prediction!r:.100}")
    if isinstance(golden_answers, str):
        return [golden_answers]
    if not isinstance(golden_answers, Iterable) or isinstance(golden_answers, (Mapping, bytes)):
        raise DataError(f"expected gold answers as a text or a list of texts, found {golden_answers!r:.100}")
    golds = list(golden_answers)
    if not golds or any(gold is None for gold in golds):
        raise DataError(f"expected at least one gold answer, each a text or a number, found {golds!r:.100}")
    return [str(gold) for gold in golds]


def _unpunctuated(text: str) -> str:
    return text.lower().translate(_ASCII_PUNCTUATION)


def _contains(found: str, gold: str, *, whole_tokens: bool) -> bool:
    if not gold:
        return not found
    return f" {gold} " in f" {found} " if whole_tokens else gold in found


def _f1(prediction: str, gold: str, normalizer: Normalizer) -> float:
    """One pair. HotpotQA's ``hotpot_evaluate_v1.f1_score``, with the deviation of the module's docstring."""
    left, right = (normalize_answer(text, normalizer=normalizer) for text in (prediction, gold))
    if not left and not right and normalizer == "squad":
        left, right = (" ".join(_unpunctuated(text).split()) for text in (prediction, gold))
    if normalizer == "cmrc":
        return _common_run(_CMRC_SEGMENT.findall(left), _CMRC_SEGMENT.findall(right))
    if left != right and not _CLOSED.get(normalizer, _CLOSED_ANSWERS).isdisjoint((left, right)):
        return 0.0
    predicted, golden = left.split(), right.split()
    if predicted == golden or set(predicted).isdisjoint(golden):  # nearly always, and nothing has to be counted
        return float(bool(predicted) and predicted == golden)
    common = sum((Counter(predicted) & Counter(golden)).values())
    precision, recall = common / len(predicted), common / len(golden)
    return 2 * precision * recall / (precision + recall)


def _common_run(predicted: Sequence[str], golden: Sequence[str]) -> float:
    """CMRC 2018's F1: the longest run of segments that both hold, against the lengths of both."""
    longest, ends = 0, [0] * (len(golden) + 1)
    for segment in predicted:
        for j in range(len(golden), 0, -1):
            ends[j] = ends[j - 1] + 1 if segment == golden[j - 1] else 0
            longest = max(longest, ends[j])
    return 2 * longest / (len(predicted) + len(golden)) if longest else 0.0


def _unicode_tokens(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    joined = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), folded)
    kept = unicodedata.normalize("NFKC", _without_punctuation(joined))
    return _TOKEN.findall(kept) or _TOKEN.findall(folded)


def _without_punctuation(text: str) -> str:
    """What :func:`_keep` leaves; a number that begins where signs were deleted does not grow onto what stands before:
    ``1,.5`` is ``1 0.5``, and ``1,-1`` is ``1 -1``."""
    kept: list[str] = []
    for index in range(len(text)):
        piece = _keep(text, index)
        if piece in _STARTS and kept and not kept[-1].endswith("-") and not kept[-1].isspace():
            piece = f" {piece}"
        if piece:
            kept.append(piece)
    return "".join(kept)


def _keep(text: str, index: int) -> str:
    """What becomes of one character: itself, nothing, a space, or the ``-`` of a negative number."""
    character = text[index]
    if not _is_punctuation(character):
        return character
    before, after = text[index - 1 : index], text[index + 1 : index + 2]
    if character == "." and after.isdecimal():
        if before.isdecimal():
            return "."
        return "" if _is_word(before) else "0."
    if character in _DASHES and not _is_word(before) and _starts_number(text, index + 1):
        return "-"
    return " " if before.isdecimal() and after.isdecimal() else ""


def _is_punctuation(character: str) -> bool:
    return character in string.punctuation or character == "\u2212" or unicodedata.category(character).startswith("P")


def _is_word(character: str) -> bool:
    """Whether a dash after ``character`` joins words rather than being a sign; scripts without spaces do not join."""
    return character.isalnum() and not re.match(f"[{_UNSPACED}]", character)


def _starts_number(text: str, index: int) -> bool:
    return bool(re.match(r"[$£€¥]?\.?\d", text[index : index + 3]))
