"""Rollout with the HF engine: branches from a kept KV cache beside computing contexts again; batches; eviction."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from _common import Figure, run
from _shapes import VOCABULARY, decoder
from transformers import LlamaForCausalLM

from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.tokenizer import ByteTokenizer

BRANCHES = 6
#: Against computing the contexts again in one batch.
TARGET = 2.5
WAYS: tuple[str, ...] = (
    "context again, one by one",
    "context again, in one batch",
    "context once, then forked",
    "kept cache",
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the decoder")
    parser.add_argument("--layers", type=int, default=6, help="layers of the decoder")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")


def measure(args: argparse.Namespace) -> list[Figure]:
    torch.set_num_threads(args.threads)
    model, rounds = _model(args), 1 if args.quick else 5
    figures: list[Figure] = []
    for prefix in (600,) if args.quick else (600, 1200):
        figures += _branches(model, prefix, tokens=30, rounds=rounds)
    return [*figures, *_ragged(model, rounds), *_refill(model, rounds), *_eviction(model)]


def _model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Weights wide enough that greedy texts do not repeat one token."""
    return decoder(args, initializer_range=0.1).eval()  # type: ignore[no-any-return, unused-ignore]


def _engine(model: Any, **options: Any) -> HFEngine:
    engine = HFEngine(model, ByteTokenizer(), **options)
    engine.end_ids = frozenset()  # every row runs to its limit
    return engine


def _tokens(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return found


def _greedy(prefix: Prefix, tokens: int) -> Request:
    return Request(prefix, SamplingParams(tokens, temperature=0.0), seed=0)


def _fastest(ways: dict[str, Callable[[], list[Generation]]], rounds: int) -> tuple[dict[str, float], dict[str, Any]]:
    """CPU seconds of each way, the ways in turns, the fastest round of each; and what each one generated."""
    best, made = dict.fromkeys(ways, float("inf")), {}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.process_time()
            generations = way()
            best[name] = min(best[name], time.process_time() - start)
            made[name] = [g.ids for g in generations]
    return best, made


# -- branches of one node -----------------------------------------------------------------------------------------


def _branches(model: Any, prefix: int, *, tokens: int, rounds: int) -> list[Figure]:
    """K children of one node: a prompt, a turn that the engine sampled, and its observation."""
    kept = _engine(model)
    root = Prefix(_tokens(0, prefix // 2))
    turn = kept.generate([_greedy(root, 40)])[0].continuation
    node = turn.extend(_tokens(1, prefix - len(turn)))
    kept.generate([_greedy(node, 1)])
    ids = node.token_ids()

    def again(batched: bool) -> list[Generation]:
        requests = [_greedy(Prefix(ids), tokens) for _ in range(BRANCHES)]
        if batched:
            return _engine(model, cache=False).generate(requests)
        return [_engine(model, cache=False).generate([request])[0] for request in requests]

    def forked() -> list[Generation]:
        once = Prefix(ids)
        return _engine(model).generate([_greedy(once, tokens)] * BRANCHES)

    def branched() -> list[Generation]:
        return kept.generate([_greedy(node, tokens)] * BRANCHES)

    ways: dict[str, Callable[[], list[Generation]]] = dict(
        zip(WAYS, (lambda: again(False), lambda: again(True), forked, branched), strict=True)
    )
    best, made = _fastest(ways, rounds)
    name = f"{BRANCHES} branches of {prefix} tokens"
    return [
        *(
            Figure(f"{name}: {way} against a kept cache", best[way] / best[WAYS[3]], "x", "higher", target)
            for way, target in zip(WAYS, (None, TARGET, None))
        ),
        Figure(f"{name}: generations that differ", _different(made), "", "lower", 0.0),
    ]


def _different(made: dict[str, Any]) -> float:
    """How many generations are not those of the first way."""
    first = next(iter(made.values()))
    return float(sum(a != b for ids in made.values() for a, b in zip(ids, first, strict=True)))


def _gain(best: dict[str, float]) -> float:
    """The first of two ways against the second."""
    slow, fast = best.values()
    return slow / fast


# -- batches ------------------------------------------------------------------------------------------------------


def _ragged(model: Any, rounds: int) -> list[Figure]:
    """Eight nodes at different depths whose caches are kept: one by one, and in one batch padded on the left."""
    engine = _engine(model)
    nodes = [Prefix(_tokens(i, 150 + 100 * i)) for i in range(8)]
    engine.generate([_greedy(node, 1) for node in nodes])
    requests = [_greedy(node, 30) for node in nodes]
    ways: dict[str, Callable[[], list[Generation]]] = {
        "one by one": lambda: [engine.generate([request])[0] for request in requests],
        "in one batch": lambda: engine.generate(requests),
    }
    best, made = _fastest(ways, rounds)
    name = "8 nodes at different depths"
    return [
        Figure(f"{name}: one batch against one by one", _gain(best), "x", "higher"),
        Figure(f"{name}: generations that differ", _different(made), "", "lower", 0.0),
    ]


def _refill(model: Any, rounds: int) -> list[Figure]:
    """48 requests of 4 to 64 tokens, eight rows at a time: waiting ones join as rows finish, or wait for the batch."""
    engine = _engine(model, max_batch_rows=8)
    lengths = np.random.default_rng(2).integers(4, 65, 48)
    requests = [_greedy(Prefix(_tokens(i, 100 + 5 * i)), int(n)) for i, n in enumerate(lengths)]
    engine.generate([_greedy(request.prefix, 1) for request in requests])
    ways: dict[str, Callable[[], list[Generation]]] = {
        "batch after batch": lambda: [g for i in range(0, 48, 8) for g in engine.generate(requests[i : i + 8])],
        "rows join": lambda: engine.generate(requests),
    }
    best, made = _fastest(ways, rounds)
    name = "48 requests, 8 rows"
    return [
        Figure(f"{name}: waiting requests join against batch after batch", _gain(best), "x", "higher"),
        Figure(f"{name}: generations that differ", _different(made), "", "lower", 0.0),
    ]


# -- memory -------------------------------------------------------------------------------------------------------


def _grown(engine: HFEngine) -> tuple[list[Generation], int]:
    """A tree of three levels, three children a node, grown level by level; the most tokens held after any of them."""
    assert engine.store is not None
    level, made, most = [Prefix(_tokens(0, 300))], [], 0
    for depth in range(3):
        generations = engine.generate([_greedy(node.extend(_tokens(i, 5)), 20) for node in level for i in range(3)])
        level = [g.continuation.extend(_tokens(100 + depth, 60)) for g in generations]
        made += generations
        most = max(most, engine.store.tokens)
    return made, most


def _eviction(model: Any) -> list[Figure]:
    """The same tree with room for everything, and with room for a third of it."""
    free = _engine(model)
    made, whole = _grown(free)
    bounded = _engine(model, max_cached_tokens=whole // 3)
    again, most = _grown(bounded)
    different = float(sum(a.ids != b.ids for a, b in zip(made, again, strict=True)))
    paths = sum(len(g.continuation) for g in made[-27:])
    name = "a third of the memory"
    recomputed = bounded.stats.prefilled_tokens / free.stats.prefilled_tokens
    return [
        Figure("tree of 39 turns: memory of the kept caches", _held_mb(free, made), "MB", "lower"),
        Figure("tree of 39 turns: tokens of its 27 paths against tokens held", paths / whole, "x", "higher"),
        Figure(f"{name}: tokens held over the limit", float(max(0, most - whole // 3)), "", "lower", 0.0),
        Figure(f"{name}: context tokens computed against room for all", recomputed, "x", "lower"),
        Figure(f"{name}: generations that differ", different, "", "lower", 0.0),
    ]


def _held_mb(engine: HFEngine, made: Sequence[Generation]) -> float:
    assert engine.store is not None
    handles = dict.fromkeys(handle for g in made for handle in g.continuation.ancestors())
    return sum(kv.numel() * kv.element_size() for kv in map(engine.store.get, handles) if kv is not None) / 2**20


if __name__ == "__main__":
    run(measure, description="Rollout with the HF engine", options=options)
