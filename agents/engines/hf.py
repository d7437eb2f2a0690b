"""Generation with a transformers model in the trainer's own process: KV cache per tree node, forked for branches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from turntree.agents.architecture import attention_problem, capped_attention, exact_positions, text_config
from turntree.agents.engines.kv import BatchCache, KVShape, PrefixStore
from turntree.agents.engines.protocol import Generation, Prefix, Request, check_requests
from turntree.agents.engines.running import Row, Running, StopWatch
from turntree.agents.tokenizer import Tokenizer, end_ids
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
    """Samples from a causal language model of transformers (Llama, Qwen, Mistral and Gemma families).

    The model is shared with the trainer: it is put into eval mode while it generates and left as it was found.
    ``max_batch_rows`` rows of at most ``max_batch_tokens`` padded tokens run at a time; finished rows leave the batch
    and waiting requests join it. With ``cache`` the keys and values of every prefix handle are kept as long as the
    handle lives (``max_cached_tokens`` bounds them, least recently used first), so a branch pays for its new tokens
    only. ``autocast`` runs the forward pass in that dtype.

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
        if max_cached_tokens is not None and max_cached_tokens < 0:
            raise ConfigError(f"max_cached_tokens={max_cached_tokens}: expected 0 or more, or None for no bound")
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
        """Number of positions the model was made for, or within which its rotation does not depend on the length."""
        config = text_config(self.model)
        bounds = (getattr(config, "max_position_embeddings", None), exact_positions(config))
        return min((bound for bound in bounds if bound is not None), default=None)

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
            running = Running(self._shape(), self._stops, self.end_ids, keep=self.store is not None)
            waiting = deque(sorted(range(len(requests)), key=lambda i: _size(requests[i])))
            while waiting or running.alive:
                if running.wants_change:
                    self._refill(running, waiting, requests)
                ids, positions = running.columns()
                finished = running.sample(self._forward(running.cache, ids, positions))
                self.stats.decode_steps += 1
                results.update((row.index, self._generation(row)) for row in finished)
            if self.store is not None and self.max_cached_tokens is not None:
                self.store.evict(self.max_cached_tokens)
        return [results[i] for i in range(len(requests))]

    def _refill(self, running: Running, waiting: deque[int], requests: Sequence[Request]) -> None:
        """Take finished rows out of the batch and waiting requests in, as many as the two limits allow."""
        joining: list[tuple[int, Request]] = []
        while waiting:
            chosen = [*(request for _, request in joining), requests[waiting[0]]]
            if not running.has_room(chosen, rows=self.max_batch_rows, tokens=self.max_batch_tokens):
                break
            joining.append((waiting[0], requests[waiting.popleft()]))
        store = PrefixStore() if self.store is None else self.store
        self._prefill(store, [request.prefix for _, request in joining])
        running.change(joining, [_whole_context(store, request.prefix) for _, request in joining])
        if self.store is not None and self.max_cached_tokens is not None:
            self.store.evict(self.max_cached_tokens)

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
        """Paths that are fed together, of similar length: what is held of them lies before what is new of any."""
        batch: list[list[Prefix]] = []
        held = new = 0
        for path in sorted(paths, key=lambda p: (len(_new_ids(p, store)), p[-1].length)):
            fed = len(_new_ids(path, store))
            held, new = max(held, path[-1].length - fed), max(new, fed)
            if batch and (len(batch) == self.max_batch_rows or (held + new) * (len(batch) + 1) > self.max_batch_tokens):
                yield batch
                batch, held, new = [], path[-1].length - fed, fed
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
        # It stays at the row's last position: a table of positions ends, and some rotations change with the largest.
        ends = torch.tensor([[path[-1].length - 1] for path in paths], device=device)
        positions = torch.arange(cache.past, cache.past + width, device=device)[None] - cache.starts[:, None]
        positions = torch.minimum(positions, ends)
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

    def _generation(self, row: Row) -> Generation:
        request = row.request
        if not np.isfinite(row.logprobs).all():
            raise EngineError(
                f"request {request.key}: expected finite log-probs, found {row.logprobs[:5]}; the weights diverged"
            )
        continuation = request.prefix.extend(row.ids)
        if self.store is not None and row.kv is not None and row.kv.shape[3]:
            self.store.append(continuation, row.kv)
        row.kv = None
        self.stats.generated_tokens += len(row.ids)
        return Generation(
            ids=tuple(row.ids),
            logprobs=tuple(row.logprobs),
            finish_reason=row.finish or "length",
            version=self._version,
            continuation=continuation,
            entropies=tuple(row.entropies),
            entropy_kind="exact",
            stop_string=row.stop,
        )


def _size(request: Request) -> tuple[int, int]:
    """Contexts of similar length run together."""
    return len(request.prefix), request.params.max_tokens


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


def _held_context(store: PrefixStore, node: Prefix) -> list[torch.Tensor]:
    """Keys and values of a node's context and what is held of its own tokens, from the start."""
    parts = [store.get(n) for n in reversed(list(node.ancestors()))]
    return [kv for kv in parts if kv is not None and kv.shape[3]]


def _whole_context(store: PrefixStore, node: Prefix) -> list[torch.Tensor]:
    """Keys and values of all of a node's tokens, from the start."""
    held = _held_context(store, node)
    if sum(kv.shape[3] for kv in held) != node.length:
        raise EngineError(f"expected the keys and values of {node.length} tokens; the prefix store lost some")
    return held


def _embedding(model: Any) -> torch.Tensor:
    weight: torch.Tensor = model.get_input_embeddings().weight
    return weight


def _check_model(model: Any) -> None:
    """Refuse models whose attention is more than causal attention over earlier tokens, all or a window of them.

    And those with attention of their own (GPT-J, Falcon, MPT): it would add the mask of booleans to its scores; and
    multi-head latent attention (DeepSeek V2 and V3), whose keys and values differ in shape.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{type(model).__name__} does not take attention functions from transformers' AttentionInterface, which "
            "the hf engine needs; use the vllm engine for it"
        )
    problem = attention_problem(model)
    if not problem and getattr(text_config(model), "kv_lora_rank", None):
        problem = "latent keys and values"
    if problem:
        raise ConfigError(
            f"expected full attention or a sliding window in every layer, found {type(model).__name__} with {problem}; "
            "use the vllm engine for it"
        )


def _cached_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of new tokens ``(B, heads, n, D)`` over the batch cache, without copies for grouped heads.

    Columns are one position apart in every row, so a window counts columns; what is outside it stays in the cache.
    """
    for option in ("position_bias", "s_aux"):
        if options.get(option) is not None:
            raise ConfigError(f"{type(module).__name__} uses {option}, which the hf engine does not support; use vllm")
    if sliding_window is not None and key.shape[2] > sliding_window and attention_mask is not None:
        columns = torch.arange(key.shape[2], device=key.device)
        attention_mask = attention_mask & (columns[-query.shape[2] :, None] - columns < sliding_window)
    wide = query.to(key.dtype)
    if softcap is not None:
        out = capped_attention(wide, key, value, attention_mask, scaling=scaling, softcap=softcap)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(
            wide, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
        )
    return out.to(query.dtype).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _cached_attention)
