"""The OpenAI-compatible engines against vLLM's own server: what it returns, and what of it equals our own engine."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.chat import ChatClient
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.openai import ChatEngine, CompletionsEngine
from turntree.agents.engines.protocol import Prefix, Request, SamplingParams
from turntree.agents.engines.transcript import TextTokenizer
from turntree.agents.models import load_model, save_weights
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import encode
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import resolve_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make venv-vllm"),
]

SERVER = ("--block-size", "32", "--enforce-eager", "--max-model-len", "256", "--dtype", "float32")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Endpoint, Path]]:
    from turntree.agents.engines.vllm_local import local_server

    folder = tmp_path_factory.mktemp("served")
    tokenizer = build_tokenizer(["where", "does", "the", "river", "in", "Karomi", "begin"])
    save_weights(build_tiny_model(tokenizer, hidden=64, layers=1, heads=2, seed=3), folder, untie=True)
    tokenizer.save_pretrained(folder)
    with local_server(folder, arguments=SERVER, environment={"TORCH_COMPILE_DISABLE": "1"}, dev_mode=False) as server:
        yield Endpoint(server.base_url, str(folder), timeout_s=60.0, retries=1), folder


def test_completions_equal_our_own_engine(served: tuple[Endpoint, Path]) -> None:
    endpoint, folder = served
    model, tokenizer = load_model(folder)
    engine = CompletionsEngine(endpoint, tokenizer)
    found = engine.probe()
    assert (found.refusal(), found.refusal(training=True)) == ("", "")
    greedy = [
        Request(Prefix(encode(tokenizer, text)), SamplingParams(8, temperature=0.0), seed=i)
        for i, text in enumerate(["where does the river", "in Karomi", "begin"])
    ]
    here = HFEngine(model, tokenizer).generate(greedy)
    there = engine.generate(greedy)
    assert [g.ids for g in there] == [g.ids for g in here]
    stop = tokenizer.decode(here[0].ids[3:4])
    (cut,) = engine.generate([Request(greedy[0].prefix, SamplingParams(8, 0.0, stop=(stop,)), seed=0)])
    assert (cut.stop_string, cut.finish_reason) == (stop, "stop")
    assert cut.ids == here[0].ids[: len(cut.ids)]
    assert engine.usage.completion_tokens >= sum(len(g.ids) for g in there)
    assert engine.usage.estimated == 0
    engine.close()


def test_chat_restores_the_stop_string_that_vllm_names(served: tuple[Endpoint, Path]) -> None:
    endpoint, _ = served
    client, question = ChatClient(endpoint), [{"role": "user", "content": "where"}]
    said = [client.complete(question, max_tokens=40, temperature=1.0, seed=seed).text for seed in range(20)]
    seed, word = next((i, m[0]) for i, text in enumerate(said) if (m := re.search("[A-Za-z]{3,}", text)))
    dialogue = Dialogue(TextTokenizer(), style="chat")
    engine = ChatEngine(endpoint)
    request = Request(Prefix(dialogue.prompt_ids("where")), SamplingParams(40, 1.0, stop=(word,)), seed=seed)
    (turn,) = engine.generate([request])
    assert dialogue.read_turn(turn).text == said[seed].partition(word)[0] + word
    assert (turn.stop_string, engine.usage.restored_stops) == (word, 1)
    assert turn.continuation.length == engine.usage.prompt_tokens + engine.usage.completion_tokens
    engine.close()


def test_auto_knows_it(served: tuple[Endpoint, Path], make_config: Callable[..., RunConfig]) -> None:
    config = make_config("engine=auto", f"engine.base_url={served[0].base_url}")
    resolve = partial(resolve_engine, config)
    names: list[Any] = [resolve(trains=trains)[0].engine.name for trains in (False, True)]
    assert names == ["vllm_server", "vllm_server"]
