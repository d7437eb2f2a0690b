"""A model as checker: its prompt, what it is shown, and the strict reading of its verdict."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from turntree.agents.completeness.calls import CallTurn, call_turns
from turntree.agents.completeness.checkers import Ballot, Spoilt, Vote
from turntree.agents.completeness.texts import EndpointTexts, EngineTexts, Said, Texts
from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.chat import ChatClient
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.scorer import Failed, Finished
from turntree.envs.loading import reject_unknown
from turntree.errors import ConfigError

__all__ = ["Language", "LLMChecker", "llm_checker", "read_prompt", "read_verdict", "show_calls"]

Language = Literal["en", "zh"]

PROMPTS = Path(__file__).resolve().parent.parent / "prompts"
_PLACES = ("{question}", "{calls}")
_TAGGED = re.compile(r"<verdict>\s*([^<>]*?)\s*</verdict>", re.IGNORECASE)
_TAG = re.compile(r"<\s*/?\s*verdict\s*>", re.IGNORECASE)
_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)
_FENCED = re.compile(r"\A```(?:json)?\s*\n(.*?)\n```\Z", re.DOTALL)
_WORDS = {"complete": True, "incomplete": False, "完整": True, "不完整": False}


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


def read_prompt(path: str | Path) -> str:
    """A checker's prompt: a UTF-8 file with ``{question}`` and ``{calls}`` in it, each once; other braces are text.

    Raises ``ConfigError`` that names the file.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the checker's prompt {path}: {error}; expected a text file in UTF-8") from error
    return _with_places(text, what=str(path))


def _with_places(text: str, *, what: str) -> str:
    for place in _PLACES:
        if text.count(place) != 1:
            raise ConfigError(f"{what}: expected {place} in the prompt once, found it {text.count(place)} times")
    return text


def read_verdict(text: str) -> bool | None:
    """Whether the reply says that the calls are complete; None for everything that is no clear verdict.

    After a closed ``<think>`` block: a JSON object (fenced or not) and nothing else, whose ``complete`` is true or
    false; or a text with exactly one ``<verdict>`` element, which holds ``complete``, ``incomplete``, ``完整`` or
    ``不完整``.
    """
    reply = _THOUGHT.sub("", text).strip()
    fenced = _FENCED.match(reply)
    body = fenced[1] if fenced else reply
    if body.startswith("{"):
        return _from_json(body)
    tagged = _TAGGED.findall(reply)
    if len(tagged) != 1 or len(_TAG.findall(reply)) != 2:
        return None
    return _WORDS.get(tagged[0].casefold())


def _from_json(body: str) -> bool | None:
    try:
        pairs = json.loads(body, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return None
    said = [value for key, value in pairs if key == "complete"] if isinstance(pairs, list) else []
    return said[0] if len(said) == 1 and isinstance(said[0], bool) else None


def show_calls(turns: Sequence[CallTurn], *, language: Language = "en", max_result_chars: int | None = 4000) -> str:
    """The calls with their results as a checker reads them.

    Each line of a call or result starts with ``| ``, so that none can pass for a line of ours; verdict tags inside are
    taken out. A result longer than ``max_result_chars`` is cut, which is said in its place.
    """
    labels, parts, number = _LABELS[language], list[str](), 0
    for turn in turns:
        for call in turn.calls:
            number += 1
            parts += [labels.call.format(number, _quoted(call.tool)[2:]), _quoted(call.argument)]
        cut = max_result_chars is not None and len(turn.result.strip()) > max_result_chars
        shown = turn.result.strip()[:max_result_chars] + (labels.cut if cut else "")
        parts += [labels.result, _quoted(shown)]
    return "\n".join(parts) or labels.nothing


def _quoted(text: str) -> str:
    clean = _TAG.sub("[verdict]", text)
    return "\n".join(f"| {line}".rstrip() for line in clean.splitlines() or [""])


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

    def __post_init__(self) -> None:
        reject_unknown([self.language], get_args(Language), what="language of the checker")
        packaged = PROMPTS / f"completeness_{self.language}.txt"
        text = _with_places(self.prompt, what="prompt of the checker") if self.prompt else read_prompt(packaged)
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
        question = _quoted(str(getattr(finished.task, "question", finished.prompt)).strip())
        before, _, after = self.prompt.partition("{calls}")  # a question may hold the other placeholder
        return before.replace("{question}", question) + calls + after.replace("{question}", question)

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
    dtype: str = "float32",
    device: str = "cpu",
    **endpoint: Any,
) -> LLMChecker:
    """A checker from a configuration.

    With ``base_url``, ``model`` is a name at that endpoint and ``endpoint`` holds further fields of
    :class:`~turntree.agents.engines.endpoint.Endpoint` (``api_key_env``, ``concurrency``, ``timeout_s``, ``retries``,
    ``max_cost``, ``sampling``, ...). Without one, ``model`` is a model folder, loaded into this process on ``device``.
    ``prompt``: path of the prompt's file. At temperature 0 all votes are one. Raises ``ConfigError``.
    """
    if not model:
        raise ConfigError("checker=llm: model is empty; give base_url and a model's name there, or a model folder")
    if not temperature >= 0:
        raise ConfigError(f"checker=llm: temperature={temperature}; expected at least 0")
    if base_url:
        texts = _endpoint_texts(base_url, model, max_tokens, temperature, endpoint)
    else:
        reject_unknown(endpoint, (), what="argument of checker=llm without base_url")
        texts = _engine_texts(model, max_tokens, temperature, dtype, device)
    return LLMChecker(
        texts,
        language=language,
        prompt=read_prompt(prompt) if prompt else "",
        max_result_chars=max_result_chars,
        constant=temperature == 0,
    )


def _endpoint_texts(base_url: str, model: str, max_tokens: int, temperature: float, more: dict[str, Any]) -> Texts:
    known = {f.name for f in fields(Endpoint)} - {"base_url", "model"}
    reject_unknown(more, known, what="argument of checker=llm")
    return EndpointTexts(ChatClient(Endpoint(base_url, model, **more)), max_tokens, temperature)


def _engine_texts(model: str, max_tokens: int, temperature: float, dtype: str, device: str) -> Texts:
    from turntree.agents.engines.hf import HFEngine  # torch: not for those who ask a server
    from turntree.agents.models import load_model

    weights, tokenizer = load_model(model, dtype=dtype, device=device)
    style: Literal["chat", "inline"] = "chat" if tokenizer.chat_template else "inline"
    return EngineTexts(HFEngine(weights, tokenizer), Dialogue(tokenizer, style=style), model, max_tokens, temperature)
