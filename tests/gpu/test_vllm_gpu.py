"""vLLM on a GPU: weights from device to device, sleep and wake. ``make test-gpu`` runs it; elsewhere it is skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.engines.vllm import VLLMEngine
from turntree.agents.models import save_model
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import encode

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU, found none"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: pip install 'turntree[vllm]'"),
]


@pytest.fixture
def tokenizer() -> Any:
    return build_tokenizer(["the", "river", "begins", "in", "where", "does"], ["ka", "ro", "mi"])


@pytest.fixture
def model(tokenizer: Any) -> Iterator[Any]:
    yield build_tiny_model(tokenizer, hidden=256, layers=2, heads=4, seed=3).to("cuda:0")
    torch.cuda.empty_cache()


def make_engine(model: Any, tokenizer: Any, folder: Path, **options: Any) -> VLLMEngine:
    save_model(model, tokenizer, folder)
    return VLLMEngine(folder, tokenizer, max_context_tokens=256, gpu_memory_utilization=0.3, **options)


def requests(tokenizer: Any) -> list[Request]:
    root = Prefix(encode(tokenizer, "where does the river in Karomi begins " * 4))
    return [Request(root, SamplingParams(8, 0.7), seed=i) for i in range(4)]


def assert_like_model(model: Any, generations: list[Generation]) -> None:
    for generation in generations:
        ids, n = generation.continuation.token_ids(), len(generation.ids)
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device="cuda:0")).logits[0, -n - 1 : -1].float() / 0.7
        picked = torch.tensor(generation.ids, device=logits.device)[:, None]
        own = logits.log_softmax(-1).gather(1, picked)[:, 0].cpu().numpy()
        np.testing.assert_allclose(generation.logprobs, own, atol=5e-3)


def shake(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)


@pytest.mark.parametrize(
    "sync",
    [
        "ipc",
        pytest.param("nccl", marks=pytest.mark.skipif(GPUS < 2, reason=f"NCCL needs 2 GPUs, found {GPUS}")),
    ],
)
def test_weights_from_device_to_device(model: Any, tokenizer: Any, tmp_path: Path, sync: Any) -> None:
    # On two GPUs vLLM takes the second one: the trainer's is cuda:0.
    options = {"device_ids": [1]} if sync == "nccl" else {}
    engine = make_engine(model, tokenizer, tmp_path / "model", module=model, sync=sync, options=options)
    try:
        first = engine.generate(requests(tokenizer))
        assert_like_model(model, first)
        kept = {name: t.clone() for name, t in model.state_dict().items()}
        shake(model)
        engine.update_weights(1)
        changed = engine.generate(requests(tokenizer))
        assert_like_model(model, changed)
        assert {g.version for g in changed} == {1}
        model.load_state_dict(kept)
        engine.update_weights(2)
        assert [g.logprobs for g in engine.generate(requests(tokenizer))] == [g.logprobs for g in first]
    finally:
        engine.close()


def test_sleep_gives_memory_back_and_wake_restores(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    engine = make_engine(model, tokenizer, tmp_path / "model", module=model, sync="ipc", sleep=True)
    try:
        first = engine.generate(requests(tokenizer))
        awake = torch.cuda.mem_get_info()[0]
        engine.rest()
        assert torch.cuda.mem_get_info()[0] > awake
        assert [g.logprobs for g in engine.generate(requests(tokenizer))] == [g.logprobs for g in first]
        engine.rest()
        shake(model)
        engine.update_weights(1)
        assert_like_model(model, engine.generate(requests(tokenizer)))
    finally:
        engine.close()
