"""What a model that was not there is shown of an episode: the question, the calls and their results, as data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turntree.agents.scorer import Finished
from turntree.errors import ConfigError

if TYPE_CHECKING:
    from turntree.agents.completeness.calls import CallTurn

__all__ = [
    "PROMPTS",
    "Language",
    "check_result_chars",
    "fill",
    "question_of",
    "quoted",
    "read_template",
    "show_calls",
    "with_places",
]

Language = Literal["en", "zh"]
"""Languages of the packaged prompts."""

PROMPTS = Path(__file__).resolve().parent / "prompts"
"""The folder of the packaged prompts."""
_PLACES = ("{question}", "{calls}")
_TAG = re.compile(r"<\s*(?:/\s*)?(verdict|answer|think)\s*>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Labels:
    call: str
    result: str
    nothing: str
    cut: str


_LABELS: dict[Language, _Labels] = {
    "en": _Labels("Call {}: {}", "Result:", "No tool was called.", " [cut here]"),
    "zh": _Labels("调用 {}：{}", "结果：", "没有调用任何工具。", "［此处截断］"),
}


def read_template(path: str | Path, *, what: str) -> str:
    """A prompt: a UTF-8 file with ``{question}`` and ``{calls}`` in it, each once; other braces are text.

    ``what`` names the prompt in messages. Raises ``ConfigError`` that names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {what} {path}: {error}; expected a text file in UTF-8") from error
    return with_places(text, what=str(path))


def with_places(text: str, *, what: str) -> str:
    """``text`` if it holds ``{question}`` and ``{calls}``, each once. Raises ``ConfigError``."""
    for place in _PLACES:
        if text.count(place) != 1:
            raise ConfigError(f"{what}: expected {place} in the prompt once, found it {text.count(place)} times")
    return text


def check_result_chars(most: int | None) -> None:
    """Raise ``ConfigError`` where ``max_result_chars`` is neither a whole number of at least 1 nor None."""
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError(f"max_result_chars={most!r}: expected a whole number of characters, at least 1 (null: all)")


def fill(template: str, *, question: str, calls: str) -> str:
    """The prompt; ``question`` is quoted here, ``calls`` come from :func:`show_calls`."""
    asked = quoted(question)
    before, _, after = template.partition("{calls}")  # a question may hold the other placeholder
    return before.replace("{question}", asked) + calls + after.replace("{question}", asked)


def question_of(finished: Finished) -> str:
    """What was asked; of a task that is no question, its prompt."""
    return str(getattr(finished.task, "question", finished.prompt)).strip()


def show_calls(turns: Sequence[CallTurn], *, language: Language = "en", max_result_chars: int | None = 4000) -> str:
    """The calls with their results as a reader sees them.

    Each line of a call or result starts with ``| ``, so that none can pass for a line of ours; tags that a reply is
    read by (of verdicts, answers, thoughts) are taken out. A result longer than ``max_result_chars`` is cut, which is
    said in its place.
    """
    labels, parts, number = _LABELS[language], list[str](), 0
    for turn in turns:
        for call in turn.calls:
            number += 1
            parts += [labels.call.format(number, quoted(call.tool)[2:]), quoted(call.argument)]
        cut = max_result_chars is not None and len(turn.result.strip()) > max_result_chars
        shown = turn.result.strip()[:max_result_chars] + (labels.cut if cut else "")
        parts += [labels.result, quoted(shown)]
    return "\n".join(parts) or labels.nothing


def quoted(text: str) -> str:
    """Every line after ``| ``, tags that a reply is read by in square brackets."""
    clean = _TAG.sub(lambda tag: f"[{tag[1].lower()}]", text)
    return "\n".join(f"| {line}".rstrip() for line in clean.splitlines() or [""])
