"""A prompt of a user's own: a text with the placeholder ``{question}``, in the place of a grammar's instructions."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import ConfigError, DataError

__all__ = ["PromptTemplate", "require_question"]

# A word in braces is a placeholder, in two pairs of braces it is itself in one; other braces are plain text.
_PLACE = re.compile(r"\{\{(\w+)\}\}|\{\s*([^\W\d]\w*)\s*\}")


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """The text of a prompt. ``{question}`` stands for the question; ``{{word}}`` for ``{word}`` itself.

    Raises ``ConfigError`` without ``{question}``, and for any other placeholder.
    """

    text: str

    def __post_init__(self) -> None:
        places = [match[0] for match in _PLACE.finditer(self.text) if match[2]]
        other = next((place for place in places if place != "{question}"), None)
        if other is not None:
            raise ConfigError(
                f"the prompt has the placeholder {other}, but only {{question}} is known; write {{{other}}} for the "
                "word in braces itself"
            )
        if not places:
            raise ConfigError(
                f"the prompt has no placeholder {{question}}, found {self.text!r:.80}; put it where the question goes"
            )

    @staticmethod
    def read(path: str | Path) -> PromptTemplate:
        """The prompt in a UTF-8 file, without white space around it. Raises ``ConfigError`` that names the file."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the prompt file {path}: {error}; expected a text file in UTF-8") from error
        try:
            return PromptTemplate(text.strip())
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @property
    def fingerprint(self) -> str:
        """A short hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]

    def ask(self, question: str) -> str:
        """The prompt for one question, as it is written. Raises ``DataError`` for an empty one."""
        stripped = require_question(question)
        return _PLACE.sub(lambda match: f"{{{match[1]}}}" if match[1] else stripped, self.text)


def require_question(text: str) -> str:
    """The question without white space around it. Raises ``DataError`` for an empty one."""
    stripped = text.strip()
    if not stripped:
        raise DataError("expected a question, found an empty one; remove the row or repair its 'question' field")
    return stripped
