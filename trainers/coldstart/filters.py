"""Filters: small functions that say why a trajectory should not be learnt from.

A filter takes a :class:`Played` and its options, and returns '' (or None) for a trajectory that may stay, else the
reason in a few words. ``coldstart.filters`` names them with their options.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turntree.agents.completeness import call_key, call_turns
from turntree.agents.completeness.calls import is_legal
from turntree.envs.loading import check_arguments, reject_unknown
from turntree.errors import ConfigError
from turntree.trainers.coldstart.played import Played
from turntree.trainers.compose import import_object
from turntree.trainers.probe import require_rule

__all__ = [
    "FILTERS",
    "Filter",
    "answered",
    "duplicate_calls",
    "format_legal",
    "language",
    "length",
    "load_filters",
    "scripts",
]

Filter = Callable[[Played], str]
"""A filter: an empty text keeps the trajectory, any other is the reason why not."""

LANGUAGES: dict[str, frozenset[str]] = {
    "en": frozenset({"LATIN"}),
    "latin": frozenset({"LATIN"}),
    "zh": frozenset({"CJK", "BOPOMOFO"}),
    "ja": frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"}),
    "ko": frozenset({"HANGUL"}),
    "ru": frozenset({"CYRILLIC"}),
    "el": frozenset({"GREEK"}),
    "ar": frozenset({"ARABIC"}),
    "he": frozenset({"HEBREW"}),
    "hi": frozenset({"DEVANAGARI"}),
    "th": frozenset({"THAI"}),
}
"""The scripts that a language is told by. ``en`` is any text in Latin letters: scripts do not tell it from French."""

# One character of these is about a word; other scripts are counted by runs of letters.
_SINGLE = frozenset({"CJK", "BOPOMOFO", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"})
_CALL_BLOCK = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
_MARKUP = re.compile(r"</?[A-Za-z_][\w-]*>|\\boxed\b")


# -- language ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    return unicodedata.name(letter, "UNKNOWN").split()[0]


def scripts(text: str) -> Counter[str]:
    """About how many words ``text`` has in each script: runs of letters, of Chinese and kana each character.

    Full-width letters count as what they are; digits, signs and punctuation are of no script.
    """
    counts: Counter[str] = Counter()
    before = ""
    for character in unicodedata.normalize("NFKC", text):
        if unicodedata.category(character).startswith("M"):  # a mark belongs to the letter before it
            continue
        script = _script(character) if character.isalpha() else ""
        if script and (script in _SINGLE or script != before):
            counts[script] += 1
        before = script
    return counts


def language(
    played: Played, *, allow: str | Sequence[str] = "same", min_share: float = 0.8, calls: bool = False
) -> str:
    """The model's own words are in the languages of ``allow``, told by their script.

    ``allow``: codes such as ``en``, ``zh``, ``[en, zh]``, or ``same``: the scripts of the question. At least
    ``min_share`` of the words must be; tags are left out, and so are the arguments of calls unless ``calls``: a name is
    searched for as it is written. Texts without letters pass.
    """
    wanted = _wanted(played, [allow] if isinstance(allow, str) else list(allow))
    found = sum((scripts(text) for text in _own_words(played, calls=calls)), Counter[str]())
    total = found.total()
    if not total or not wanted:
        return ""
    share = sum(n for script, n in found.items() if script in wanted) / total
    if share >= min_share:
        return ""
    other = max((s for s in found if s not in wanted), key=lambda s: found[s])
    return f"{share:.2f} of the words are in the language asked for, at least {min_share:g} are needed; most of the \
others are {other.lower()}"


def _wanted(played: Played, allow: Sequence[str]) -> set[str]:
    reject_unknown([code for code in allow if code != "same"], LANGUAGES, what="language")
    wanted: set[str] = set().union(*(LANGUAGES[code] for code in allow if code != "same"))
    if "same" in allow:
        finished = played.finished
        asked = scripts(str(getattr(finished.task, "question", finished.prompt)))
        # A name in another script does not make the question bilingual.
        wanted |= {script for script, n in asked.items() if n >= 0.25 * asked.total()}
    return wanted


def _own_words(played: Played, *, calls: bool) -> Iterator[str]:
    arguments = [call.argument for turn in call_turns(played.finished) for call in turn.calls]
    for turn in played.finished.turns:
        text = _CALL_BLOCK.sub(" ", turn.text)
        for argument in arguments:
            text = text.replace(argument, " ") if argument.strip() else text
        yield _MARKUP.sub(" ", text)
    if calls:
        yield from arguments


# -- the others -------------------------------------------------------------------------------------------------------


def length(
    played: Played,
    *,
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    min_turns: int | None = None,
    max_turns: int | None = None,
    min_calls: int | None = None,
    max_calls: int | None = None,
) -> str:
    """Generated tokens, turns and executed calls within bounds."""
    bounds = (
        ("tokens", played.tokens, min_tokens, max_tokens),
        ("turns", len(played.finished.turns), min_turns, max_turns),
        ("calls", played.calls, min_calls, max_calls),
    )
    for what, found, low, high in bounds:
        if low is not None and found < low:
            return f"{found} {what}, at least {low} are needed"
        if high is not None and found > high:
            return f"{found} {what}, at most {high} are allowed"
    return ""


def duplicate_calls(played: Played, *, most: int = 0) -> str:
    """At most ``most`` executed calls that equal an earlier one, as the completeness reward compares them."""
    keys = [call_key(call) for turn in call_turns(played.finished) for call in turn.calls]
    repeated = len(keys) - len(set(keys))
    return f"{repeated} calls repeat an earlier one, at most {most} may" if repeated > most else ""


def format_legal(played: Played, *, corrections: int | None = None) -> str:
    """The environment finds the format legal; ``corrections``: turns that may be corrected instead (null: its word)."""
    finished = played.finished
    if corrections is not None:
        invalid = sum(turn.action == "invalid" for turn in finished.turns)
        return f"{invalid} turns were not executed, at most {corrections} may be" if invalid > corrections else ""
    return "" if is_legal(finished) else f"illegal format: {finished.info.get('format_reason', '')}"


def answered(played: Played) -> str:
    """The episode ended by itself, not at a limit."""
    finished = played.finished
    return "" if finished.status == "answered" else f"no answer: ended by {finished.info.get('stop_reason', 'a limit')}"


FILTERS: dict[str, Callable[..., str]] = {
    "language": language,
    "length": length,
    "duplicate_calls": duplicate_calls,
    "format": format_legal,
    "answered": answered,
}
"""Filters by name."""


def load_filters(given: Mapping[str, Any]) -> dict[str, Filter]:
    """The filters of ``coldstart.filters``: name -> true, its options, an import path, or ``{path, args}``.

    ``false`` and ``null`` switch one off. Raises ``ConfigError`` naming the option.
    """
    found: dict[str, Filter] = {}
    for name, value in given.items():
        option = f"coldstart.filters.{name}"
        if value is None or value is False:
            continue
        found[name] = _built_in(name, value, option) if name in FILTERS else _own(name, value, option)
    return found


def _built_in(name: str, value: Any, option: str) -> Filter:
    arguments = {} if value is True else value
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{option}={value!r}: expected true, false, or its arguments ({option}.NAME=VALUE)")
    check_arguments(FILTERS[name], {"played": None, **arguments}, what=option)
    for key, given in arguments.items():
        _check_argument(f"{option}.{key}", key, given)
    return functools.partial(FILTERS[name], **arguments)


def _check_argument(option: str, key: str, given: Any) -> None:
    """Each built-in filter is checked before anything is played: a bound that no trajectory can keep drops them all."""
    if key == "allow":
        codes = [given] if isinstance(given, str) else given
        if not isinstance(codes, Sequence) or not codes:
            raise ConfigError(f"{option}={given!r}: expected a language, or a list of at least one")
        reject_unknown([code for code in codes if code != "same"], LANGUAGES, what=f"language in {option}")
    elif key == "calls":
        if not isinstance(given, bool):
            raise ConfigError(f"{option}={given!r}: expected true or false")
    elif given is not None:
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            raise ConfigError(f"{option}={given!r}: expected a number")
        most = 1.0 if key == "min_share" else math.inf
        if not 0 <= given <= most:
            raise ConfigError(
                f"{option}={given!r} is out of range; expected a value >= 0{' and <= 1' if most == 1 else ''}"
            )


def _own(name: str, value: Any, option: str) -> Filter:
    if isinstance(value, str):
        value = {"path": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("path"), str):
        reject_unknown([name], FILTERS, what="filter (others need an import path),")
        raise ConfigError(f"{option}={value!r}: expected an import path, or {{path, args}}")
    reject_unknown(value, ("path", "args"), what=f"key of {option}")
    arguments = dict(value.get("args") or {})
    function = require_rule(import_object(value["path"], option=option), option=f"{option}={value['path']}")
    check_arguments(function, arguments, what=f"{option}={value['path']}")
    return functools.partial(_said, function, arguments, option)


def _said(function: Callable[..., Any], arguments: Mapping[str, Any], option: str, played: Played) -> str:
    """What a user's filter says, checked."""
    try:
        said = function(played, **arguments)
    except Exception as error:  # a rule of a user's own may fail in any way
        raise ConfigError(
            f"{option} failed on sample {played.key.sample} of question {played.key.question!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if said is None:
        return ""
    if not isinstance(said, str):
        raise ConfigError(f"{option}: expected '' or None to keep a trajectory, else the reason, found {said!r:.80}")
    return said
