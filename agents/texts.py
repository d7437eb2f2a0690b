"""One-shot answers to prompts, from an endpoint or an engine of this process: for checkers and summarisers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.chat import ChatClient, Reply
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.engines.protocol import Engine, Generation, Prefix, Request, SamplingParams
from turntree.agents.scorer import Failed
from turntree.agents.weights import weights_hash
from turntree.envs.loading import construct, reject_unknown
from turntree.errors import ConfigError, EngineError, TurnTreeError

__all__ = ["EndpointTexts", "EngineTexts", "LocalEngine", "Said", "Texts", "check_texts", "open_texts"]

LocalEngine = Literal["hf", "vllm"]
"""Engines that a summariser or checker may start in this process."""

_OWN = ("engine", "max_tokens", "temperature", "dtype", "device")
"""Further arguments of :func:`open_texts`."""


@dataclass(frozen=True, slots=True)
class Said:
    """A model's answer. ``cut``: it ran into the limit of tokens."""

    text: str
    cut: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Texts(Protocol):
    """Answers prompts, each on its own. ``fingerprint``: who answers, and how it is sampled."""

    @property
    def fingerprint(self) -> str: ...

    def ask(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Said | Failed]:
        """One outcome a prompt, in order; ``Failed`` where there is no whole answer."""
        ...

    def close(self) -> None:
        """Let go of what is held outside of this process."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointTexts:
    """A model behind an OpenAI-compatible endpoint. ``sampling``: further keys, such as ``top_p``."""

    client: ChatClient
    max_tokens: int = 512
    temperature: float = 0.7
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        endpoint = self.client.endpoint
        keys = sorted({**endpoint.sampling, **self.sampling}.items())
        return repr((endpoint.base_url, endpoint.model, self.max_tokens, self.temperature, keys))

    def ask(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Said | Failed]:
        talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outcomes = self.client.complete_all(
            talks, max_tokens=self.max_tokens, seeds=seeds, temperature=self.temperature, **self.sampling
        )
        return [_failed(o) if isinstance(o, EngineError) else _said(o) for o in outcomes]

    def close(self) -> None:
        """Close the connections."""
        self.client.close()


def _said(reply: Reply) -> Said:
    return Said(reply.text, reply.finish == "length", reply.prompt_tokens, reply.completion_tokens)


def _failed(error: TurnTreeError) -> Failed:
    return Failed(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class EngineTexts:
    """Any engine of this process, with the dialogue that writes its prompts. ``name`` says which model it is.

    ``own``: the engine is this object's and is closed with it.
    """

    engine: Engine
    dialogue: Dialogue
    name: str
    max_tokens: int = 512
    temperature: float = 0.7
    own: bool = False

    @property
    def fingerprint(self) -> str:
        return repr((self.name, self.engine.version, self.max_tokens, self.temperature))

    def ask(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[Said | Failed]:
        params = SamplingParams(self.max_tokens, self.temperature)
        requests = [
            Request(Prefix(self.dialogue.prompt_ids(prompt)), params, seed=seed, key=("text", i))
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        return self._answers(requests)

    def close(self) -> None:
        """Close the engine, where it is ours and can be closed; another belongs to whoever made it."""
        close = getattr(self.engine, "close", None)
        if self.own and close is not None:
            close()

    def _answers(self, requests: Sequence[Request]) -> list[Said | Failed]:
        """A batch that fails is asked again one by one, to find out which of its requests do."""
        try:
            return [self._read(r, g) for r, g in zip(requests, self.engine.generate(requests), strict=True)]
        except TurnTreeError as error:
            if len(requests) < 2:
                return [_failed(error) for _ in requests]
        return [outcome for request in requests for outcome in self._answers([request])]

    def _read(self, request: Request, generation: Generation) -> Said | Failed:
        if generation.finish_reason == "abort":
            return Failed("abort", "the engine aborted the answer")
        turn = self.dialogue.read_turn(generation)
        return Said(turn.text, generation.finish_reason == "length", len(request.prefix), len(generation.ids))


def check_texts(
    *,
    model: str,
    base_url: str = "",
    engine: LocalEngine = "hf",
    max_tokens: int = 512,
    temperature: float = 0.7,
    what: str = "texts",
    **more: Any,
) -> None:
    """Find mistakes in what :func:`open_texts` takes, without loading a model. Raises ``ConfigError``."""
    of_endpoint = {f.name for f in fields(Endpoint)}
    if engine != "vllm" or base_url:  # a misspelt name is told before what it was meant for is missed
        reject_unknown(more, {*of_endpoint, *_OWN}, what=f"argument of {what}")
    if not model:
        raise ConfigError(f"{what}: model is empty; give base_url and a model's name there, or a model folder")
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)) or not temperature >= 0:
        raise ConfigError(f"{what}: temperature={temperature!r}; expected a number, at least 0")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
        raise ConfigError(f"{what}: max_tokens={max_tokens!r}; expected a whole number, at least 1")
    if base_url:
        return
    reject_unknown([engine], ("hf", "vllm"), what=f"engine of {what}")
    if engine == "hf" and more:
        raise ConfigError(f"{what}: {', '.join(sorted(more))} is for a server; give its base_url, or leave it out")
    from turntree.agents.models import model_source

    model_source(model)


def open_texts(
    *,
    model: str,
    base_url: str = "",
    engine: LocalEngine = "hf",
    max_tokens: int = 512,
    temperature: float = 0.7,
    dtype: str = "float32",
    device: str = "cpu",
    what: str = "texts",
    **more: Any,
) -> Texts:
    """A model from a configuration, to be closed after use.

    With ``base_url``, ``model`` is a name at that endpoint and ``more`` holds further fields of
    :class:`~turntree.agents.engines.endpoint.Endpoint`. Without one, ``model`` is a model folder, loaded into this
    process by the ``engine`` ``hf`` (on ``device``) or ``vllm`` (``more`` are then arguments of ``VLLMEngine``).
    ``what`` is how messages name who asks. Raises ``ConfigError``.
    """
    check_texts(
        model=model,
        base_url=base_url,
        engine=engine,
        max_tokens=max_tokens,
        temperature=temperature,
        what=what,
        **more,
    )
    if base_url:
        return EndpointTexts(ChatClient(Endpoint(base_url, model, **more)), max_tokens, temperature)
    if engine == "vllm":
        return _vllm_texts(model, max_tokens, temperature, dtype, more)
    return _hf_texts(model, max_tokens, temperature, dtype, device)


def _hf_texts(model: str, max_tokens: int, temperature: float, dtype: str, device: str) -> Texts:
    from turntree.agents.engines.hf import HFEngine  # torch: not for those who ask a server
    from turntree.agents.models import load_model

    weights, tokenizer = load_model(model, dtype=dtype, device=device)
    name = _name(model, dtype)
    return EngineTexts(HFEngine(weights, tokenizer), _dialogue(tokenizer), name, max_tokens, temperature, own=True)


def _vllm_texts(model: str, max_tokens: int, temperature: float, dtype: str, more: Mapping[str, Any]) -> Texts:
    from turntree.agents.engines.vllm import VLLMEngine
    from turntree.agents.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    engine = construct(VLLMEngine, {"model": model, "tokenizer": tokenizer, "dtype": dtype, **more}, what="engine=vllm")
    return EngineTexts(engine, _dialogue(tokenizer), _name(model, dtype), max_tokens, temperature, own=True)


def _name(folder: str, dtype: str) -> str:
    """Who answers, by the weights themselves: a model that was trained on under the same path is another one."""
    return f"{weights_hash(folder) or folder} {dtype}"


def _dialogue(tokenizer: Any) -> Dialogue:
    return Dialogue(tokenizer, style="chat" if tokenizer.chat_template else "inline")
