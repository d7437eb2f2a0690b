"""``engine=openai`` as configured: the endpoint, its engine and dialogue, and why nothing is trained through it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from turntree.agents.dialogue import Dialogue, Style
from turntree.agents.engines.endpoint import Endpoint, Usage
from turntree.agents.engines.openai import ChatEngine, CompletionsEngine
from turntree.agents.engines.transcript import TextTokenizer
from turntree.agents.models import load_tokenizer
from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig

__all__ = ["RemoteBench", "endpoint", "refuse_training", "remote_bench"]


@dataclass(frozen=True, slots=True)
class RemoteBench:
    """A served model with what lets it talk; there are no weights here.

    ``protocol`` is ``chat`` (text; its results compare with other chat results only) or ``tokens``.
    """

    tokenizer: Any
    dialogue: Dialogue
    engine: ChatEngine | CompletionsEngine
    protocol: str
    dialogue_text: str

    def close(self) -> None:
        """Close the connections."""
        self.engine.close()

    def provenance(self, config: RunConfig) -> dict[str, Any]:
        """What a result says of the endpoint; no key is in it."""
        return {
            "model": config.engine.model,
            "base_url": config.engine.base_url,
            "protocol": self.protocol,
            "openai_sampling": dict(config.openai.sampling),
            "dialogue": self.dialogue_text,
        }


def endpoint(config: RunConfig) -> Endpoint:
    """The endpoint of ``engine.*`` and ``openai.*``, for engines and for :class:`ChatClient` alike."""
    if not config.engine.base_url:
        raise ConfigError("engine.base_url is empty: expected the server's address, such as http://127.0.0.1:8000/v1")
    own = asdict(config.openai)
    del own["protocol"]
    engine = config.engine
    return Endpoint(
        engine.base_url,
        engine.model,
        concurrency=engine.max_concurrent_requests,
        timeout_s=engine.timeout_s,
        retries=engine.retries,
        **own,
    )


def refuse_training(config: RunConfig) -> None:
    """Raises ``ConfigError`` with the reason why ``engine=openai`` cannot train; nothing for other engines."""
    if config.engine.name != "openai":
        return
    reason = (
        "the chat protocol returns text, but training needs the sampled token ids and their log-probs"
        if config.openai.protocol == "chat"
        else "an OpenAI-compatible server cannot take the trainer's weights, so every rollout after the first update "
        "would come from stale ones"
    )
    raise ConfigError(
        f"engine=openai evaluates, it does not train: {reason}. Use engine=hf, engine=vllm, or engine=vllm_server "
        "(token ids, log-probs and weights over HTTP)"
    )


def remote_bench(config: RunConfig, *, spent: Usage | None = None) -> RemoteBench:
    """Connect to the endpoint; ``spent`` counts against ``openai.max_cost`` already.

    Raises ``ConfigError`` for what is missing, and where a completions endpoint returns no token ids or log-probs.
    """
    if config.openai.protocol == "chat":
        text = TextTokenizer()
        dialogue = Dialogue(text, style="chat")
        said = "dialogue: chat messages, rendered by the server's own template"
        return RemoteBench(text, dialogue, ChatEngine(endpoint(config), spent=spent), "chat", said)
    if not config.model.path:
        raise ConfigError(
            "openai.protocol=completions sends token ids: model.path must be a folder with the served model's "
            "tokenizer; or use openai.protocol=chat"
        )
    tokenizer = load_tokenizer(Path(config.model.path))
    engine = CompletionsEngine(endpoint(config), tokenizer, spent=spent)
    if reason := engine.probe().refusal():
        raise ConfigError(f"{config.engine.base_url} cannot serve openai.protocol=completions: {reason}; use chat")
    dialogue = Dialogue(tokenizer, style=cast("Style", config.model.dialogue))
    return RemoteBench(tokenizer, dialogue, engine, "tokens", dialogue.report.text())
