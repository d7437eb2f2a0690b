"""One start of vLLM with a tiny model: all that a run needs of it, checked. Run by ``make smoke``."""

from __future__ import annotations

import faulthandler
import functools
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.engines.vllm import VLLMEngine
from turntree.agents.models import save_model, save_weights
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import decode, encode
from turntree.envs.datasets import load_questions
from turntree.envs.search_qa import SearchQACore
from turntree.envs.worlds import generate_world, lexicon, name_words
from turntree.search_backend.bm25 import BM25Backend
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow

TEMPERATURE = 0.7
CONTEXT = 512


def check(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"vllm smoke: {message}")


def reference(model: Any, prefix: Prefix, generation: Generation, temperature: float) -> np.ndarray:
    """Log-probs of a generation's tokens by the model's own forward pass."""
    ids, n = prefix.token_ids() + list(generation.ids), len(generation.ids)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -n - 1 : -1].float() / (temperature or 1.0)
    found: np.ndarray = logits.log_softmax(-1).gather(1, torch.tensor(generation.ids)[:, None])[:, 0].numpy()
    return found


def agree(model: Any, requests: list[Request], generations: list[Generation]) -> float:
    """The largest difference between vLLM's log-probs and the model's."""
    worst = 0.0
    for request, generation in zip(requests, generations, strict=True):
        own = reference(model, request.prefix, generation, request.params.temperature)
        worst = max(worst, float(np.abs(np.array(generation.logprobs) - own).max()))
    return worst


def check_generation(engine: VLLMEngine, model: Any, tokenizer: Any, root: Prefix) -> list[Generation]:
    requests = [Request(root, SamplingParams(10, TEMPERATURE), seed=2**63 - 1 - i) for i in range(4)]
    requests.append(Request(root, SamplingParams(10, 0.0), seed=0))
    first = engine.generate(requests)
    check(agree(model, requests, first) < 1e-4, f"log-probs are off by {agree(model, requests, first)}")
    check(len({g.ids for g in first[:4]}) > 1, "siblings with different seeds are equal")
    again = engine.generate(requests)
    check([g.ids for g in again] == [g.ids for g in first], "equal seeds gave different ids")
    check(engine.stats.reused_tokens > 0, "a repeated prefix did not hit the prefix cache")
    check(all(g.continuation.token_ids() == root.token_ids() + list(g.ids) for g in first), "ids in are not ids out")
    # A stop string that ends inside a token: the token is kept whole.
    pieces = [piece for i in first[0].ids if len(piece := decode(tokenizer, [i])) > 2 and piece.isascii()]
    stop = pieces[0][:2]
    stopped = engine.generate([Request(root, SamplingParams(10, TEMPERATURE, stop=(stop,)), seed=requests[0].seed)])[0]
    check(stopped.ids == first[0].ids[: len(stopped.ids)], "a stop string changed what is sampled")
    check(stopped.finish_reason == "stop" and stopped.stop_string == stop, f"{stop!r} did not stop it: {stopped}")
    check(Dialogue(tokenizer).cut_at_stop(stopped, (stop,)) == stopped, "vLLM's stop differs from the transcript's")
    return first


def check_many_prompts(engine: VLLMEngine, tokenizer: Any) -> None:
    """More tokens of seeded prompts than one step takes: vLLM on CPU dies of a prompt that it prefills in parts."""
    words = [f"river {i} of the north begins " * 12 for i in range(8)]
    requests = [
        Request(Prefix(encode(tokenizer, w)), SamplingParams(4, TEMPERATURE), seed=i) for i, w in enumerate(words)
    ]
    check(sum(len(r.prefix) for r in requests) > 2 * CONTEXT, "the prompts fit into one step; make them longer")
    check(len(engine.generate(requests)) == len(requests), "prompts were lost")


def check_weights(engine: VLLMEngine, model: Any, root: Prefix) -> None:
    requests = [Request(root, SamplingParams(8, TEMPERATURE), seed=i) for i in range(3)]
    before = engine.generate(requests)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    short, long = (Request(root, SamplingParams(n, TEMPERATURE), seed=9) for n in (1, 200))
    waiting = engine.as_completed([short, long, long])
    next(waiting)
    engine.update_weights(1)
    late = [generation for _, generation in waiting]
    check({(g.version, g.finish_reason) for g in late} == {(0, "abort")}, f"stale generations pass for fresh: {late}")
    changed = engine.generate(requests)
    check(all(g.version == 1 for g in changed), "a fresh generation has an old version")
    check(agree(model, requests, changed) < 1e-4, f"new weights are off by {agree(model, requests, changed)}")
    model.load_state_dict(kept)
    engine.update_weights(2)
    restored = engine.generate(requests)
    check([g.logprobs for g in changed] != [g.logprobs for g in before], "new weights changed no log-prob")
    check([g.logprobs for g in restored] == [g.logprobs for g in before], "log-probs did not come back exactly")


def check_rollout(engine: VLLMEngine, tokenizer: Any, world: Path) -> None:
    questions = load_questions(world / "questions.jsonl")[:2]
    core = SearchQACore(BM25Backend.from_corpus(world / "corpus.jsonl"), tokenizer=tokenizer)
    sampling = SamplingParams(24, 1.0, stop=tuple(core.grammar.stop))
    rollout = grow(
        [Prompt(f"q/{i}", question) for i, question in enumerate(questions)],
        core=core,
        engine=engine,
        dialogue=Dialogue(tokenizer),
        plan=GrowthPlan(trees=1, chains=2),
        sampling=sampling,
        limits=Limits(max_turn_tokens=24, max_context_tokens=512),
    )
    check(rollout.stats.failed == 0, f"leaves failed: {rollout.stats}")
    nodes = [node for group in rollout.groups for tree in group.trees for node in tree.root.walk() if node.turn_ids]
    check(bool(nodes) and all(len(n.turn_ids) == len(n.logprobs) for n in nodes), "turns without log-probs")


def main() -> None:
    logging.disable(logging.WARNING)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turntree-vllm-smoke-") as tmp:
        world = Path(tmp) / "world"
        generate_world("quickstart", seed=0, split="train", entities=80, questions=20).save(world)
        words, syllables = lexicon()
        tokenizer = build_tokenizer([*words, *name_words()], syllables)
        model = build_tiny_model(tokenizer, hidden=64, layers=2, heads=2, seed=1)  # 32 dimensions a head
        save_model(model, tokenizer, Path(tmp) / "model")
        engine = VLLMEngine(
            Path(tmp) / "model",
            tokenizer,
            max_context_tokens=CONTEXT,
            publish=functools.partial(save_weights, model, untie=True),
            max_concurrent_requests=8,
            options={"max_num_batched_tokens": CONTEXT},
        )
        root = Prefix(encode(tokenizer, "Where does the river of the north begin? " * 6))
        try:
            check_generation(engine, model, tokenizer, root)
            check_many_prompts(engine, tokenizer)
            check_weights(engine, model, root)
            check_rollout(engine, tokenizer, world)
        finally:
            engine.close()
    print(
        f"vllm smoke passed in {time.monotonic() - started:.0f} s: start {engine.stats.start_seconds:.0f} s, weights "
        f"{engine.stats.sync_seconds:.2f} s"
    )


if __name__ == "__main__":
    faulthandler.dump_traceback_later(300, exit=True)  # a smoke that hangs is a smoke that failed
    main()
