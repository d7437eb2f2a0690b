"""Generation with a transformers model in the trainer's own process: KV cache per tree node, forked for branches."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turntree.agents.engines.kv import BatchCache, KVShape, PrefixStore
from turntree.agents.engines.protocol import FinishReason, Generation, Prefix, Request, check_requests
from turntree.agents.engines.sampling import RowParams, Sampled, sample, uniforms
from turntree.agents.stops import find_stop
from turntree.agents.tokenizer import Tokenizer, decode, end_ids
from turntree.errors import ConfigError, EngineError

__all__ = ["EngineStats", "HFEngine"]

_ATTENTION = "turntree_cached"
_PREFILL_COLUMNS = 1024  # Longer prompts are fed in slices, which bounds the attention mask.


@dataclass(slots=True)
class EngineStats:
    """What the engine did since it was made: tokens sampled, tokens fed as context, tokens taken from the cache."""

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    decode_steps: int = 0


class HFEngine:
    """Samples from a causal language model of transformers (Llama and Qwen families: full attention only).

    The model is shared with the trainer: it is put into eval mode while it generates and left as it was found.
    ``max_batch_rows`` rows of at most ``max_batch_tokens`` padded tokens run at a time. With ``cache`` the keys and
    values of every prefix handle are kept as long as the handle lives (``max_cached_tokens`` bounds them, least
    recently used first), so a branch pays for its new tokens only. ``autocast`` runs the forward pass in that dtype.

    A request's draws depend on its seed alone, not on the other rows, up to the rounding of matrix products.
    Raises ``ConfigError`` for models whose attention it cannot cache.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        max_batch_rows: int = 64,
        max_batch_tokens: int = 65536,
        cache: bool = True,
        max_cached_tokens: int | None = None,
        autocast: torch.dtype | None = None,
        version: int = 0,
    ) -> None:
        _check_model(model)
        if max_batch_rows < 1 or max_batch_tokens < 1:
            raise ConfigError(
                f"max_batch_rows and max_batch_tokens must be positive, found {max_batch_rows} and {max_batch_tokens}"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.max_batch_rows = max_batch_rows
        self.max_batch_tokens = max_batch_tokens
        self.max_cached_tokens = max_cached_tokens
        self.autocast = autocast
        self.end_ids = end_ids(tokenizer, getattr(model, "generation_config", None))
        self.stats = EngineStats()
        self.store: PrefixStore | None = PrefixStore() if cache else None
        self._version = version
        self._stops = StopWatch(tokenizer, len(_embedding(model)))
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def max_context_tokens(self) -> int | None:
        """Number of positions the model was made for."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def update_weights(self, version: int) -> None:
        """The trainer changed the shared weights: drop every cache, generate under the new version."""
        with self._lock:
            if self.store is not None:
                self.store.clear()
            self._version = version

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises ``EngineError`` on impossible requests and NaN logits."""
        check_requests(requests, max_context_tokens=self.max_context_tokens)
        results: dict[int, Generation] = {}
        with self._lock, self._model_ready():
            for indices in self._batches(requests):
                rows = [requests[i] for i in indices]
                store = PrefixStore() if self.store is None else self.store
                self._prefill(store, [r.prefix for r in rows])
                results.update(zip(indices, self._decode(store, rows), strict=True))
                if self.store is not None and self.max_cached_tokens is not None:
                    self.store.evict(self.max_cached_tokens)
        return [results[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests that run together: contexts of similar length, within the two limits."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prefix), requests[i].params.max_tokens))
        batch: list[int] = []
        longest = 0
        for i in order:
            longest = max(longest, len(requests[i].prefix) + requests[i].params.max_tokens)
            if batch and (len(batch) == self.max_batch_rows or longest * (len(batch) + 1) > self.max_batch_tokens):
                yield batch
                batch, longest = [], len(requests[i].prefix) + requests[i].params.max_tokens
            batch.append(i)
        if batch:
            yield batch

    @contextmanager
    def _model_ready(self) -> Iterator[None]:
        """Eval mode, no gradients, cached attention; everything is put back afterwards."""
        config, training = self.model.config, self.model.training
        attention = config._attn_implementation
        precision: AbstractContextManager[Any] = nullcontext()
        if self.autocast is not None:
            precision = torch.autocast(next(self.model.parameters()).device.type, dtype=self.autocast)
        self.model.eval()
        config._attn_implementation = _ATTENTION
        try:
            with torch.inference_mode(), precision:
                yield
        finally:
            config._attn_implementation = attention
            self.model.train(training)

    def _shape(self) -> KVShape:
        return KVShape(self.model, self.autocast or _embedding(self.model).dtype)

    def _forward(self, cache: BatchCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Feed columns of tokens ``(B, n)``; returns the logits behind the last column ``(B, V)``."""
        cache.reserve(ids.shape[1])
        output = self.model(
            input_ids=ids,
            attention_mask=cache.mask(ids.shape[1]),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.advance(ids.shape[1])
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    # Prefill -------------------------------------------------------------------------------------------------------

    def _prefill(self, store: PrefixStore, prefixes: Sequence[Prefix]) -> None:
        """Make the store hold every token of the prefixes; a node that several of them share is fed once."""
        missing: dict[Prefix, None] = {}
        for prefix in dict.fromkeys(prefixes):
            missing.update(dict.fromkeys(n for n in reversed(list(prefix.ancestors())) if not store.complete(n)))
            store.touch(prefix)
        self.stats.reused_tokens += sum(p.length for p in prefixes) - sum(len(n.ids) - store.held(n) for n in missing)
        paths = _paths(list(missing), store)
        while paths:
            ready = [p for p in paths if not any(a in missing for a in _above(p[0]))]
            paths = [p for p in paths if any(a in missing for a in _above(p[0]))]
            for batch in self._prefill_batches(ready, store):
                self._prefill_batch(store, batch)
            for path in ready:
                for node in path:
                    del missing[node]

    def _prefill_batches(self, paths: list[list[Prefix]], store: PrefixStore) -> Iterator[list[list[Prefix]]]:
        """Paths that are fed together, of similar length."""
        batch: list[list[Prefix]] = []
        width = 0
        for path in sorted(paths, key=lambda p: (len(_new_ids(p, store)), p[-1].length)):
            width = max(width, path[-1].length)
            if batch and (len(batch) == self.max_batch_rows or width * (len(batch) + 1) > self.max_batch_tokens):
                yield batch
                batch, width = [], path[-1].length
            batch.append(path)
        if batch:
            yield batch

    def _prefill_batch(self, store: PrefixStore, paths: list[list[Prefix]]) -> None:
        """Feed the missing tokens of some paths whose contexts are held, and store their keys and values."""
        contexts = [_held_context(store, path[0]) for path in paths]
        tokens = [_new_ids(path, store) for path in paths]
        width = max(len(t) for t in tokens)
        cache = BatchCache(contexts, self._shape(), room=width)
        device = cache.starts.device
        # Short rows are filled up on the right: causal attention keeps the filling away from real tokens.
        ids = torch.tensor([t + [0] * (width - len(t)) for t in tokens], device=device)
        positions = torch.arange(cache.past, cache.past + width, device=device)[None] - cache.starts[:, None]
        for start in range(0, width, _PREFILL_COLUMNS):
            part = slice(start, start + _PREFILL_COLUMNS)
            self._forward(cache, ids[:, part], positions[:, part])
        self.stats.prefilled_tokens += sum(len(t) for t in tokens)
        for row, path in enumerate(paths):
            column = cache.past
            for node in path:
                new = len(node.ids) - store.held(node)
                store.append(node, cache.row(row, column, column + new))
                column += new

    # Decode --------------------------------------------------------------------------------------------------------

    def _decode(self, store: PrefixStore, requests: list[Request]) -> list[Generation]:
        """Sample all rows to their ends. The last token of each context is fed again, to get the first logits."""
        shape = self._shape()
        contexts = [_without_last(_held_context(store, r.prefix, whole=True)) for r in requests]
        longest = max(r.params.max_tokens for r in requests)
        cache = BatchCache(contexts, shape, room=min(longest, 64))
        batch = _Batch(requests, self._stops, self.end_ids, shape.device)
        ids = torch.tensor([_last_id(r.prefix) for r in requests], device=shape.device)[:, None]
        positions = torch.tensor([len(r.prefix) - 1 for r in requests], device=shape.device)[:, None]
        first = cache.past + 1  # Column of the first sampled token.
        for step in range(longest):
            drawn = batch.draw(self._forward(cache, ids, positions), step)
            self.stats.decode_steps += 1
            finished = batch.record(drawn, step)
            for row in finished if self.store is not None else ():
                batch.turns[batch.alive[row]].kv = cache.row(row, first, first + step)
            alive = [row for row in range(cache.rows) if batch.running[row]]
            if not alive:
                break
            ids, positions = drawn.tokens[:, None], positions + 1
            if len(alive) <= 0.85 * cache.rows:
                cache.keep(alive)
                index = batch.keep(alive)
                ids, positions = ids[index], positions[index]
        return [self._generation(store, request, turn) for request, turn in zip(requests, batch.turns, strict=True)]

    def _generation(self, store: PrefixStore, request: Request, turn: _Turn) -> Generation:
        if not np.isfinite(turn.logprobs).all():
            raise EngineError(
                f"request {request.key}: expected finite log-probs, found {turn.logprobs[:5]}; the weights diverged"
            )
        continuation = request.prefix.extend(turn.ids)
        if turn.kv is not None and turn.kv.shape[3]:
            store.append(continuation, turn.kv)
        self.stats.generated_tokens += len(turn.ids)
        return Generation(
            ids=tuple(turn.ids),
            logprobs=tuple(turn.logprobs),
            finish_reason=turn.finish,
            version=self._version,
            continuation=continuation,
            entropies=tuple(turn.entropies),
            entropy_kind="exact",
            stop_string=turn.stop,
        )


@dataclass(slots=True)
class _Turn:
    """A row while it is being sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: FinishReason = "length"
    stop: str | None = None
    kv: torch.Tensor | None = None


class _Batch:
    """Bookkeeping of the rows of one batch; ``alive`` maps a row of the tensors to its request."""

    def __init__(
        self, requests: Sequence[Request], stops: StopWatch, ends: frozenset[int], device: torch.device
    ) -> None:
        self.turns = [_Turn() for _ in requests]
        self.alive = list(range(len(requests)))
        self.running = [True] * len(requests)
        self._limits = [r.params.max_tokens for r in requests]
        self._stop_strings = [r.params.stop for r in requests]
        self._watch = [stops.candidates(r.params.stop) for r in requests]
        self._stops, self._ends = stops, ends
        self._params = RowParams.of([r.params for r in requests], device)
        width = max(self._limits)
        draws = [np.pad(uniforms(r.seed, r.params.max_tokens), (0, width - r.params.max_tokens)) for r in requests]
        self._uniforms = torch.tensor(np.stack(draws), device=device)

    def draw(self, logits: torch.Tensor, step: int) -> Sampled:
        """Sample the next token of every row."""
        return sample(logits, self._uniforms[:, step], self._params)

    def record(self, drawn: Sampled, step: int) -> list[int]:
        """Take the sampled tokens in; returns the rows that finished with them."""
        tokens, logprobs, entropies = (t.tolist() for t in (drawn.tokens, drawn.logprobs, drawn.entropies))
        finished = []
        for row, index in enumerate(self.alive):
            if not self.running[row]:
                continue
            turn, token = self.turns[index], tokens[row]
            turn.ids.append(token)
            turn.logprobs.append(logprobs[row])
            turn.entropies.append(entropies[row])
            if token in self._ends:
                turn.finish = "stop"
            elif token in self._watch[index] and (stop := self._stops.match(turn.ids, self._stop_strings[index])):
                turn.finish, turn.stop = "stop", stop
            elif step + 1 < self._limits[index]:
                continue
            self.running[row] = False
            finished.append(row)
        return finished

    def keep(self, rows: Sequence[int]) -> torch.Tensor:
        """Go on with these rows only; returns them as an index."""
        index = torch.tensor(rows, device=self._uniforms.device)
        self.alive = [self.alive[row] for row in rows]
        self.running = [True] * len(rows)
        self._uniforms = self._uniforms[index]
        self._params = self._params.select(index)
        return index


class StopWatch:
    """Finds stop strings while tokens arrive, decoding only after tokens that can complete one."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._texts: list[str] = []
        self._candidates: dict[tuple[str, ...], frozenset[int]] = {}

    def candidates(self, stops: tuple[str, ...]) -> frozenset[int]:
        """Tokens whose text holds the last character of a stop string, or part of a character."""
        if stops not in self._candidates:
            self._candidates[stops] = self._find(stops)
        return self._candidates[stops]

    def _find(self, stops: tuple[str, ...]) -> frozenset[int]:
        last = {stop[-1] for stop in stops if stop}
        if not last:
            return frozenset()
        if any(char.isspace() for char in last):  # Some tokenizers drop a space when a token is decoded alone.
            return frozenset(range(self._vocabulary))
        if not self._texts:
            self._texts = [decode(self._tokenizer, [i]) for i in range(self._vocabulary)]
        last.add("\ufffd")
        return frozenset(i for i, text in enumerate(self._texts) if not last.isdisjoint(text))

    def match(self, ids: Sequence[int], stops: tuple[str, ...]) -> str | None:
        """The stop string that the last token completed."""
        # A token holds at least one byte of text, so this many reach back to the start of any stop string, with room
        # for ids that stand for nothing.
        reach = 2 * max(len(stop.encode("utf-8")) for stop in stops) + 8
        found = find_stop(decode(self._tokenizer, ids[-reach:]), stops)
        return None if found is None else found[1]


def _paths(missing: list[Prefix], store: PrefixStore) -> list[list[Prefix]]:
    """Group missing nodes (parents before children) into unbranched paths whose tokens are contiguous."""
    children: dict[Prefix, list[Prefix]] = {}
    for node in missing:
        if node.parent is not None:
            children.setdefault(node.parent, []).append(node)
    inside = set(missing)
    paths: dict[Prefix, list[Prefix]] = {}
    for node in missing:
        parent = node.parent
        joins = parent is not None and parent in inside and len(children[parent]) == 1 and store.held(node) == 0
        path = paths[parent] if joins and parent is not None else []
        path.append(node)
        paths[node] = path
    return list({id(path): path for path in paths.values()}.values())


def _above(node: Prefix) -> Iterator[Prefix]:
    return iter(()) if node.parent is None else node.parent.ancestors()


def _new_ids(path: Sequence[Prefix], store: PrefixStore) -> list[int]:
    """Tokens of a path that are not held; only its first node may be held in part."""
    return [i for node in path for i in node.ids[store.held(node) :]]


def _held_context(store: PrefixStore, node: Prefix, *, whole: bool = False) -> list[torch.Tensor]:
    """Keys and values of a node's context and what is held of its own tokens, from the start."""
    parts = [store.get(n) for n in reversed(list(node.ancestors()))]
    held = [kv for kv in parts if kv is not None and kv.shape[3]]
    if whole and sum(kv.shape[3] for kv in held) != node.length:
        raise EngineError(f"expected the keys and values of {node.length} tokens; the prefix store lost some")
    return held


def _without_last(context: list[torch.Tensor]) -> list[torch.Tensor]:
    """The context up to, not including, its last token."""
    return [*context[:-1], context[-1][:, :, :, :-1]]


def _last_id(prefix: Prefix) -> int:
    return next(node.ids[-1] for node in prefix.ancestors() if node.ids)


def _embedding(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def _check_model(model: Any) -> None:
    """Refuse models whose attention is more than full causal attention over all earlier tokens."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    if kinds != {"full_attention"} or (window and not getattr(config, "layer_types", None)) or soft_cap:
        raise ConfigError(
            f"expected a model with full attention in every layer, found {type(model).__name__} with layers "
            f"{sorted(kinds)}, sliding window {window}, soft cap {soft_cap}; use the vllm engine for it"
        )


def _cached_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of new tokens ``(B, heads, n, D)`` over the batch cache, without copies for grouped heads."""
    grouped = key.shape[1] != query.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query.to(key.dtype), key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return out.to(query.dtype).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _cached_attention)
