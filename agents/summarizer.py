"""Summarisers: finishers that write the answer from what a planner's tools returned.

They are shown the question and the calls with their results, never the planner's thoughts unless they are asked to be.
Results are data: their lines are quoted, and tags that a reply is read by are taken out of them.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_args

from turntree.agents.completeness.calls import CallTurn, call_turns
from turntree.agents.engines.endpoint import Usage
from turntree.agents.evidence import (
    PROMPTS,
    Language,
    check_result_chars,
    fill,
    question_of,
    quoted,
    read_template,
    show_calls,
)
from turntree.agents.scorer import Failed, Finished, Judged
from turntree.agents.texts import EndpointTexts, LocalEngine, Said, Texts, open_texts
from turntree.envs.loading import reject_unknown
from turntree.errors import CostLimitError, EngineError

__all__ = ["Judge", "RuleSummarizer", "Summarizer", "WrittenAnswers", "llm_summarizer", "read_answer"]

_THOUGHT = re.compile(r"\A.*?</think>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_CLOSED = re.compile("</answer>", re.IGNORECASE)
_NOTES = {"en": "Notes of whoever made the calls:", "zh": "调用者的笔记："}

DEAD_AFTER = 32
"""Answers that failed in a row, after which a summariser is taken for dead."""


def read_answer(text: str) -> str | None:
    """What a reply answers: the last closed ``<answer>`` element after its thought, else all that follows the thought.

    None where nothing is left, and where an ``<answer>`` was opened and never closed.
    """
    reply = _THOUGHT.sub("", text).strip()
    found = _answers(reply)
    if found:
        return found[-1].strip() or None
    return None if "<answer>" in reply.casefold() or "<think>" in reply else reply or None


def _answers(reply: str) -> list[str]:
    """What stands in each ``<answer>``; behind the last closing tag nothing is looked for, so that many opening ones
    take no quadratic time."""
    closed = [match.end() for match in _CLOSED.finditer(reply)]
    return _ANSWER.findall(reply, 0, closed[-1]) if closed else []


class Summarizer:
    """A model writes the answer, one sample for each trajectory.

    Args:
        texts: who is asked. The planner's own engine answers with its current weights.
        language: of the packaged prompt and labels.
        prompt: a text with ``{question}`` and ``{calls}``, each once ('' : the packaged one).
        thoughts: show the planner's turns too, as notes.
        max_result_chars: a longer result is cut, which is said in its place.
        seed: of the samples; each one's own seed follows from it and from what is shown.

    A reply without an answer, one that is cut before it is whole, and a server that fails are failures of the leaf,
    never a wrong answer. Equal prompts of a batch are asked once. ``usage`` counts what was used, apart from the
    planner; ``failed`` the answers that failed.
    """

    def __init__(
        self,
        texts: Texts,
        *,
        language: Language = "en",
        prompt: str = "",
        thoughts: bool = False,
        max_result_chars: int | None = 4000,
        seed: int = 0,
    ) -> None:
        reject_unknown([language], get_args(Language), what="language of the summariser")
        check_result_chars(max_result_chars)
        self.texts = texts
        self.language: Language = language
        self.prompt = _prompt(prompt, language)
        self.thoughts = thoughts
        self.max_result_chars = max_result_chars
        self.seed = seed
        self.failed = 0
        self._failed_in_a_row = 0
        self._used = Usage()

    @property
    def fingerprint(self) -> str:
        """Changes with everything that changes an answer, the model's weights included."""
        parts = repr((self.texts.fingerprint, self.prompt, self.language, self.thoughts, self.max_result_chars))
        return f"summarizer-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    @property
    def usage(self) -> Usage:
        """Requests and tokens so far; of an endpoint its own count, retries and cost included."""
        return self.texts.client.usage if isinstance(self.texts, EndpointTexts) else self._used

    def __call__(self, finished: Sequence[Finished]) -> list[Finished | Failed]:
        """The trajectories with their answers, in order.

        Raises ``CostLimitError`` when the endpoint's budget is spent, ``EngineError`` when nothing answers any more.
        """
        prompts = [self.ask_about(f) for f in finished]
        unique = list(dict.fromkeys(prompts))
        outcomes = dict(zip(unique, self.texts.ask(unique, [self._seed(p) for p in unique]), strict=True))
        for said in outcomes.values():
            self._count(said)
        written = [_written(f, outcomes[prompt]) for f, prompt in zip(finished, prompts)]
        for outcome in written:
            self._watch(outcome)
        return written

    def ask_about(self, finished: Finished) -> str:
        """The prompt for one trajectory."""
        calls = show_calls(call_turns(finished), language=self.language, max_result_chars=self.max_result_chars)
        if self.thoughts:
            notes = "\n".join(quoted(turn.text.strip()) for turn in finished.turns)
            calls = f"{calls}\n\n{_NOTES[self.language]}\n{notes}"
        return fill(self.prompt, question=question_of(finished), calls=calls)

    def close(self) -> None:
        """Let go of connections, or of the model where it is the summariser's own."""
        self.texts.close()

    def _seed(self, prompt: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}\0{prompt}".encode()).digest()[:4], "big") >> 1

    def _count(self, said: Said | Failed) -> None:
        if isinstance(said, Said):
            self._used += Usage(requests=1, prompt_tokens=said.prompt_tokens, completion_tokens=said.completion_tokens)

    def _watch(self, outcome: Finished | Failed) -> None:
        if isinstance(outcome, Finished):
            self._failed_in_a_row = 0
            return
        if outcome.kind == CostLimitError.__name__:
            raise CostLimitError(outcome.message)
        self.failed += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= DEAD_AFTER:
            raise EngineError(
                f"the summariser failed {self._failed_in_a_row} times in a row, so nothing is answered; the last one: "
                f"{outcome.kind}: {outcome.message}"
            )


def _prompt(text: str, language: Language) -> str:
    from turntree.agents.evidence import with_places

    packaged = PROMPTS / f"summarizer_{language}.txt"
    return with_places(text, what="prompt of the summariser") if text else read_template(packaged, what="the prompt")


def _written(finished: Finished, said: Said | Failed) -> Finished | Failed:
    if isinstance(said, Failed):
        return said
    answer = read_answer(said.text)
    if answer is not None and not (said.cut and not _answers(said.text)):
        return replace(finished, answer=answer)
    why = "was cut at max_tokens before it was whole" if said.cut else "holds no answer"
    return Failed("summary", f"the summariser's reply {why}: ...{said.text[-80:]!r}")


def llm_summarizer(
    *,
    texts: Texts | None = None,
    model: str = "",
    base_url: str = "",
    engine: LocalEngine = "hf",
    language: Language = "en",
    prompt: str | Path = "",
    thoughts: bool = False,
    max_result_chars: int | None = 4000,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    **more: Any,
) -> Summarizer:
    """A summariser from a configuration, see :func:`turntree.agents.texts.open_texts`; ``prompt`` is a file's path.

    ``texts`` is somebody to ask who is there already. Raises ``ConfigError``.
    """
    written = read_template(prompt, what="the summariser's prompt") if prompt else ""
    if texts is None:
        texts = open_texts(
            model=model,
            base_url=base_url,
            engine=engine,
            max_tokens=max_tokens,
            temperature=temperature,
            dtype=dtype,
            device=device,
            what="agent.summarizer=llm",
            **more,
        )
    return Summarizer(
        texts, language=language, prompt=written, thoughts=thoughts, max_result_chars=max_result_chars, seed=seed
    )


# -- without a model ----------------------------------------------------------------------------------------------

# What may be an answer: capitalised words in a row, or a number. Names of Chinese worlds are told by their characters.
_VALUE = re.compile(r"\b[A-Z]\w*(?: [A-Z]\w*)+|(?<![A-Za-z\d_])\d+(?![A-Za-z\d_])")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_WORD = re.compile(r"\w+")
_YES_NO = re.compile(
    r"(?:is|are|was|were|do|does|did|has|have|had)\b|(?!你知道).*(?:(?:相同|也是.*)吗|是否|是不是)",
    re.IGNORECASE | re.DOTALL,
)
_EARLIEST = re.compile(r"\b(?:earlier|earliest|first)\b|更早|较早|最早|在先", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]{1,40}>")  # the grammar's own, around results
_SENTENCE = re.compile(r"(?<=[.!?。！？\n])\s*")


@dataclass(frozen=True, slots=True)
class RuleSummarizer:
    """Takes the answer from the results, without a model and without gold: for generated worlds and tests.

    Of each call it reads the sentence that shares most words with the query (of Chinese: pairs of characters that are
    no name), and in it the last name or number that the query does not hold. The last such value answers; a yes/no
    question is answered by whether the values that end its two halves are equal, one that asks for the earliest by
    whose number is the least. Without any value the answer is ``nothing`` (or ``no``). Names are words with capitals in
    Latin letters, and in Chinese those of generated worlds.
    """

    nothing: str = "unknown"
    usage: ClassVar[Usage] = Usage()

    def __call__(self, finished: Sequence[Finished]) -> list[Finished | Failed]:
        return [replace(f, answer=self.answer(question_of(f), call_turns(f))) for f in finished]

    def answer(self, question: str, turns: Sequence[CallTurn]) -> str:
        """What the results say."""
        values = [value for turn in turns if (value := _value(turn)) is not None]
        dated = [_dated(turn) for turn in turns if (_value(turn) or "").isdigit()]
        if len(dated) > 1 and _EARLIEST.search(question):
            return min(dated)[1]
        if _YES_NO.match(question.strip()):
            half = len(values) // 2
            yes, no = ("是", "否") if _CHINESE.search(question) else ("yes", "no")
            return yes if half and values[half - 1] == values[-1] else no
        return values[-1] if values else self.nothing


def _dated(turn: CallTurn) -> tuple[int, str]:
    """The number that a turn found, and whose it is: the last name of the query."""
    names = _values(" ".join(call.argument for call in turn.calls))
    return int(_value(turn) or 0), names[-1] if names else ""


def _value(turn: CallTurn) -> str | None:
    """What a turn's result says about its query; None where it names nothing new."""
    query = " ".join(call.argument for call in turn.calls)
    likeness = _chinese_likeness(query) if _CHINESE.search(query) else _likeness(query)
    for sentence in sorted(_SENTENCE.split(_TAG.sub(" ", turn.result)), key=likeness, reverse=True):
        found = [value for value in _values(sentence) if value not in query]
        if found:
            return found[-1]
    return None


def _likeness(query: str) -> Callable[[str], tuple[int, int]]:
    asked = set(_WORD.findall(query.casefold()))

    def of(sentence: str) -> tuple[int, int]:
        words = set(_WORD.findall(sentence.casefold()))
        return len(words & asked), -len(words)

    return of


def _chinese_likeness(query: str) -> Callable[[str], tuple[int, int]]:
    """Pairs of characters besides names, then names; what was once so counts only where it was asked for."""
    names, asked = set(_names(query)), _pairs(query)

    def of(sentence: str) -> tuple[int, int]:
        once = "以前" in sentence and "以前" not in query
        return -1 if once else len(_pairs(sentence) & asked), len(names.intersection(_names(sentence)))

    return of


def _pairs(text: str) -> set[str]:
    rest = _chinese_names().sub(" ", text).replace("的", " ")
    return {a + b for a, b in pairwise(rest) if _CHINESE.match(a) and _CHINESE.match(b)}


def _names(text: str) -> list[str]:
    return [found[0] for found in _chinese_names().finditer(text)]


@functools.cache
def _chinese_names() -> re.Pattern[str]:
    from turntree.envs.worlds.languages import name_pattern

    return name_pattern("zh")


def _values(text: str) -> list[str]:
    """Names and numbers in their order."""
    found = [(match.start(), match[0]) for match in _VALUE.finditer(text)]
    if _CHINESE.search(text):
        found += [(match.start(), match[0]) for match in _chinese_names().finditer(text)]
    return [value for _, value in sorted(found)]


# -- rewards of answers that the environment never saw ----------------------------------------------------------------


class Judge(Protocol):
    """A task that can judge an answer afterwards, as ``SearchQACore`` can."""

    def judge(self, state: Any, answer: str | None) -> tuple[float, Mapping[str, float]]:
        """The reward of an ended episode with ``answer``, and its parts."""
        ...


@dataclass(frozen=True, slots=True)
class WrittenAnswers:
    """A scorer: the environment's own reward, of the answer that a summariser wrote."""

    core: Judge

    def __call__(self, finished: Sequence[Finished]) -> list[Judged]:
        return [Judged(*self.core.judge(f.state, f.answer)) for f in finished]
