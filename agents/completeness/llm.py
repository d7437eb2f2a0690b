"""A model as checker: its prompt, what it is shown, and the strict reading of its verdict."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, get_args

from turntree.agents.completeness.calls import call_turns
from turntree.agents.completeness.checkers import Ballot, Spoilt, Vote
from turntree.agents.evidence import (
    PROMPTS,
    Language,
    check_result_chars,
    fill,
    question_of,
    read_template,
    show_calls,
    with_places,
)
from turntree.agents.scorer import Failed, Finished
from turntree.agents.texts import LocalEngine, Said, Texts, check_texts, open_texts
from turntree.envs.loading import reject_unknown

__all__ = ["LLMChecker", "check_llm_checker", "llm_checker", "read_prompt", "read_verdict"]

# Replies are untrusted texts of any length: no run of white space can be split in two ways.
_TAGGED = re.compile(r"<verdict>([^<>]*)</verdict>", re.IGNORECASE)
_TAG = re.compile(r"<\s*(?:/\s*)?verdict\s*>", re.IGNORECASE)
_THOUGHT = re.compile(r"\A.*?</think>", re.DOTALL)
_FENCED = re.compile(r"\A```(?:json)?[^\S\n]*\n(.*)\n```\Z", re.DOTALL)
_WORDS = {"complete": True, "incomplete": False, "完整": True, "不完整": False}


def read_prompt(path: str | Path) -> str:
    """A checker's prompt: a UTF-8 file with ``{question}`` and ``{calls}`` in it, each once; other braces are text.

    Raises ``ConfigError`` that names the file.
    """
    return read_template(path, what="the checker's prompt")


def read_verdict(text: str) -> bool | None:
    """Whether the reply says that the calls are complete; None for everything that is no clear verdict.

    After its thought (a chat template may have opened that one): a JSON object (fenced or not) and nothing else, whose
    ``complete`` is true or false; or a text with exactly one ``<verdict>`` element, which holds ``complete``,
    ``incomplete``, ``完整`` or ``不完整``. A thought that is never closed has no verdict yet, whatever it weighs.
    """
    reply = _THOUGHT.sub("", text).strip()
    if "<think>" in reply:
        return None
    fenced = _FENCED.match(reply)
    body = fenced[1].strip() if fenced else reply
    if body.startswith("{"):
        return _from_json(body)
    tagged = _TAGGED.findall(reply)
    if len(tagged) != 1 or len(_TAG.findall(reply)) != 2:
        return None
    return _WORDS.get(tagged[0].strip().casefold())


def _from_json(body: str) -> bool | None:
    try:
        pairs = json.loads(body, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    said = [value for key, value in pairs if key == "complete"] if isinstance(pairs, list) else []
    return said[0] if len(said) == 1 and isinstance(said[0], bool) else None


@dataclass(frozen=True, slots=True)
class LLMChecker:
    """Asks a model, one sample a vote.

    The model sees the question and the calls with their results; never the thoughts, in which the policy could plead,
    and never the answer. ``prompt``: the text of :func:`read_prompt` ('' : the packaged one of ``language``).
    """

    texts: Texts
    language: Language = "en"
    prompt: str = ""
    max_result_chars: int | None = 4000
    constant: bool = False
    needs_answer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        reject_unknown([self.language], get_args(Language), what="language of the checker")
        check_result_chars(self.max_result_chars)
        packaged = PROMPTS / f"completeness_{self.language}.txt"
        text = with_places(self.prompt, what="prompt of the checker") if self.prompt else read_prompt(packaged)
        object.__setattr__(self, "prompt", text)

    @property
    def fingerprint(self) -> str:
        parts = repr((self.texts.fingerprint, self.prompt, self.language, self.max_result_chars))
        return f"llm-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"

    def content(self, finished: Finished) -> str:
        """The whole prompt, since it is all that the model sees."""
        return self.ask_about(finished)

    def close(self) -> None:
        """Close the connections."""
        self.texts.close()

    def ask_about(self, finished: Finished) -> str:
        """The prompt for one trajectory."""
        calls = show_calls(call_turns(finished), language=self.language, max_result_chars=self.max_result_chars)
        return fill(self.prompt, question=question_of(finished), calls=calls)

    def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
        """A sample each; a reply without a clear verdict is ``Failed("verdict")``."""
        prompts = [self.ask_about(ballot.finished) for ballot in ballots]
        return [_vote(said) for said in self.texts.ask(prompts, [ballot.seed for ballot in ballots])]


def _vote(said: Said | Failed) -> Vote | Failed:
    if isinstance(said, Failed):
        return said
    verdict = read_verdict(said.text)
    if verdict is not None:
        return Vote(verdict, said.prompt_tokens, said.completion_tokens)
    why = "was cut at max_tokens before a verdict" if said.cut else "holds no clear verdict"
    message = f"the checker's reply {why}: ...{said.text[-80:]!r}"
    return Spoilt("verdict", message, said.prompt_tokens, said.completion_tokens)


def llm_checker(
    *,
    base_url: str = "",
    model: str = "",
    language: Language = "en",
    prompt: str = "",
    temperature: float = 0.7,
    max_tokens: int = 512,
    max_result_chars: int | None = 4000,
    engine: LocalEngine = "hf",
    dtype: str = "float32",
    device: str = "cpu",
    **more: Any,
) -> LLMChecker:
    """A checker from a configuration; :func:`check_llm_checker` finds mistakes in it without loading a model.

    With ``base_url``, ``model`` is a name at that endpoint and ``more`` holds further fields of
    :class:`~turntree.agents.engines.endpoint.Endpoint` (``api_key_env``, ``concurrency``, ``timeout_s``, ``retries``,
    ``max_cost``, ``sampling``, ...). Without one, ``model`` is a model folder, loaded into this process by ``engine``
    ``hf`` on ``device``, or by ``vllm``.
    ``prompt``: path of the prompt's file. At temperature 0 all votes are one. Raises ``ConfigError``.
    """
    texts = open_texts(
        model=model,
        base_url=base_url,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device,
        what="checker=llm",
        engine=engine,
        **more,
    )
    return LLMChecker(
        texts,
        language=language,
        prompt=read_prompt(prompt) if prompt else "",
        max_result_chars=max_result_chars,
        constant=temperature == 0,
    )


def check_llm_checker(
    *,
    base_url: str = "",
    model: str = "",
    language: Language = "en",
    prompt: str = "",
    temperature: float = 0.7,
    max_tokens: int = 512,
    max_result_chars: int | None = 4000,
    engine: LocalEngine = "hf",
    dtype: str = "float32",
    device: str = "cpu",
    **more: Any,
) -> LLMChecker:
    """The checker of :func:`llm_checker` with nobody behind it: its options were read, and it cannot vote."""
    del dtype, device
    check_texts(
        model=model,
        base_url=base_url,
        max_tokens=max_tokens,
        temperature=temperature,
        what="checker=llm",
        engine=engine,
        **more,
    )
    nobody = _Nobody()
    return LLMChecker(nobody, language, read_prompt(prompt) if prompt else "", max_result_chars)


class _Nobody:
    fingerprint = "nobody"

    def ask(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Said | Failed]:
        return [Failed("nobody", "this checker was made to look at its options")] * len(prompts)

    def close(self) -> None:
        return None
