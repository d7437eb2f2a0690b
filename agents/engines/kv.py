"""Keys and values of contexts: kept per prefix handle, laid out as a batch for the model.

Shapes: ``L`` layers, ``B`` rows, ``H`` key-value heads, ``T`` columns (tokens), ``D`` head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from turntree.agents.architecture import text_config
from turntree.agents.engines.protocol import Prefix

__all__ = ["BatchCache", "PrefixStore"]


class PrefixStore:
    """Keys and values of each handle's own tokens, as one tensor ``(L, 2, H, tokens, D)`` a handle.

    A shared prefix is held once, so memory is that of the unique tokens; an entry dies with its handle. An entry may
    cover only the first tokens of its handle: the last token of a turn is sampled but never fed.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[Prefix, torch.Tensor] = WeakKeyDictionary()
        self._used: WeakKeyDictionary[Prefix, int] = WeakKeyDictionary()
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Number of tokens held."""
        return sum(kv.shape[3] for kv in self._entries.values())

    def get(self, node: Prefix) -> torch.Tensor | None:
        """What is held of the node's own tokens."""
        return self._entries.get(node)

    def held(self, node: Prefix) -> int:
        """How many of the node's own tokens are held."""
        kv = self._entries.get(node)
        return 0 if kv is None else kv.shape[3]

    def complete(self, node: Prefix) -> bool:
        """Whether all of the node's own tokens are held."""
        return self.held(node) == len(node.ids)

    def append(self, node: Prefix, kv: torch.Tensor) -> None:
        """Add the keys and values of the node's next own tokens."""
        old = self._entries.get(node)
        self._entries[node] = kv.contiguous() if old is None else torch.cat([old, kv], dim=3)
        self.touch(node)

    def touch(self, node: Prefix) -> None:
        """Mark the node and its ancestors as used just now, the oldest ancestor last."""
        for handle in node.ancestors():
            if handle in self._entries:
                self._clock += 1
                self._used[handle] = self._clock

    def evict(self, max_tokens: int) -> None:
        """Drop the entries that were used longest ago until at most ``max_tokens`` are held."""
        excess = self.tokens - max_tokens
        if excess <= 0:
            return
        for handle in sorted(self._entries, key=lambda h: self._used[h]):
            excess -= self._entries.pop(handle).shape[3]
            if excess <= 0:
                return

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._used.clear()


class BatchCache(Cache):
    """The cache that the model sees during one batch: a buffer ``(B, H, T, D)`` a layer for keys and one for values.

    Contexts are padded on the left up to column ``past``; new tokens are written in place behind them.
    """

    def __init__(self, contexts: Sequence[Sequence[torch.Tensor]], shape: KVShape, *, room: int) -> None:
        self.layers = []  # The base class keeps a list of layers; this cache has none.
        self.past = self.filled = 0
        self.starts = torch.zeros(0, dtype=torch.int64, device=shape.device)
        self._shape = shape
        self._kv = shape.empty(0, 0)
        self.change([], contexts, room=room)

    def change(self, kept: Sequence[int], contexts: Sequence[Sequence[torch.Tensor]], *, room: int) -> None:
        """Go on with the rows ``kept`` and new rows behind them; a buffer with ``room`` free columns is made.

        The last column filled stays the last one of every row, so contexts of any length may join rows of any length.
        """
        lengths = (self.filled - self.starts).tolist()
        held = [int(lengths[row]) for row in kept]
        added = [sum(kv.shape[3] for kv in context) for context in contexts]
        old, width, filled = self._kv, max(held, default=0), self.filled
        self.past = self.filled = max(held + added, default=0)
        self.starts = torch.tensor([self.past - n for n in held + added], dtype=torch.int64, device=self._shape.device)
        self._kv = self._shape.empty(len(held) + len(added), self.past + room)
        # Padding is masked, but 0 * inf would still be a NaN.
        self._kv[:, :, : len(held), :, : self.past - width] = 0
        for place, row in enumerate(kept):
            self._kv[:, :, place, :, self.past - width : self.past] = old[:, :, row, :, filled - width : filled]
        for place, context in enumerate(contexts, start=len(held)):
            column = self.past - added[place - len(held)]
            self._kv[:, :, place, :, :column] = 0
            for kv in context:
                self._kv[:, :, place, :, column : column + kv.shape[3]] = kv
                column += kv.shape[3]

    @property
    def rows(self) -> int:
        return self._kv.shape[2]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Write new columns of one layer; returns all its keys and values so far."""
        end = self.filled + key_states.shape[2]
        keys, values = self._kv[layer_idx, 0], self._kv[layer_idx, 1]
        keys[:, :, self.filled : end] = key_states
        values[:, :, self.filled : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns filled so far."""
        del layer_idx
        return self.filled

    def reserve(self, columns: int) -> None:
        """Make room for ``columns`` more, in larger and larger steps."""
        need = self.filled + columns
        if need > self._kv.shape[4]:
            grown = self._kv.new_empty((*self._kv.shape[:4], max(need, self._kv.shape[4] * 3 // 2), self._kv.shape[5]))
            grown[:, :, :, :, : self.filled] = self._kv[:, :, :, :, : self.filled]
            self._kv = grown

    def advance(self, columns: int) -> None:
        """The model has written ``columns`` in every layer."""
        self.filled += columns

    def mask(self, queries: int) -> torch.Tensor:
        """Which columns the next ``queries`` tokens see: bool ``(B, 1, queries, filled + queries)``."""
        columns = torch.arange(self.filled + queries, device=self.starts.device)
        valid = columns[None, None, :] >= self.starts[:, None, None]
        causal = columns[None, :] <= columns[self.filled :, None]
        return (valid & causal[None]).unsqueeze(1)

    def tail(self, row: int, columns: int) -> torch.Tensor:
        """A copy of the last columns of one row: ``(L, 2, H, columns, D)``."""
        return self.row(row, self.filled - columns, self.filled)

    def row(self, row: int, start: int, end: int) -> torch.Tensor:
        """A copy of the columns of one row: ``(L, 2, H, end - start, D)``."""
        return self._kv[:, :, row, :, start:end].clone()


class KVShape:
    """Layers, heads, head dimension, dtype and device of a model's keys and values."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        config = text_config(model)
        self.layers: int = config.num_hidden_layers
        self.heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype = dtype
        self.device: torch.device = next(model.parameters()).device

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised buffer ``(L, 2, B, H, T, D)``."""
        shape = (self.layers, 2, rows, self.heads, columns, self.dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)
