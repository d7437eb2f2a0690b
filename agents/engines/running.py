"""The rows that are being sampled: what each has so far, their shared KV buffer, and who joins and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from turntree.agents.engines.kv import BatchCache, KVShape
from turntree.agents.engines.protocol import FinishReason, Request
from turntree.agents.engines.sampling import RowParams, Sampled, sample, uniforms
from turntree.agents.stops import find_stop
from turntree.agents.tokenizer import Tokenizer, decode

__all__ = ["Row", "Running", "StopWatch"]

_GROUP = 0.85  # Rows leave and join once so few of the batch are alive: either copies the whole buffer.


@dataclass(slots=True, eq=False)
class Row:
    """A request while it is being sampled; ``index`` is its place among the caller's requests.

    ``kv`` holds the keys and values of its sampled tokens but the last, once it has finished.
    """

    index: int
    request: Request
    watch: frozenset[int]
    draws: NDArray[np.float64]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None
    kv: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens of the context and of what was sampled."""
        return len(self.request.prefix) + len(self.ids)

    @property
    def left(self) -> int:
        """Tokens that may still be sampled."""
        return self.request.params.max_tokens - len(self.ids)

    def last_id(self) -> int:
        """The token that is fed next."""
        if self.ids:
            return self.ids[-1]
        return next(node.ids[-1] for node in self.request.prefix.ancestors() if node.ids)


class Running:
    """A batch that rows leave when they finish and that waiting requests join.

    Contexts are kept without their last token, which is fed with the first step. With ``keep`` finished rows get their
    ``kv``.
    """

    def __init__(self, shape: KVShape, stops: StopWatch, ends: frozenset[int], *, keep: bool) -> None:
        self.rows: list[Row] = []
        self.cache = BatchCache([], shape, room=0)
        self._stops, self._ends, self._keep = stops, ends, keep
        self._device = shape.device
        self._ids = self._positions = self._last = torch.empty(0)
        self._params = RowParams.of([], self._device)
        self._uniforms, self._steps = torch.empty(0), torch.empty(0)

    @property
    def alive(self) -> list[Row]:
        """Rows that have not finished."""
        return [row for row in self.rows if row.finish is None]

    @property
    def wants_change(self) -> bool:
        """Whether enough rows have finished to be worth a copy of the buffer."""
        return not self.rows or len(self.alive) <= _GROUP * len(self.rows)

    def has_room(self, joining: Sequence[Request], *, rows: int, tokens: int) -> bool:
        """Whether the batch with these requests keeps to ``rows`` rows of ``tokens`` padded tokens together."""
        alive = self.alive
        count = len(alive) + len(joining)
        longest = max([*(row.length for row in alive), *(len(r.prefix) for r in joining)])
        left = max([*(row.left for row in alive), *(r.params.max_tokens for r in joining)])
        return count <= 1 or (count <= rows and count * (longest + left) <= tokens)

    def change(self, joining: Sequence[tuple[int, Request]], contexts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Drop the finished rows and add requests with the keys and values of their contexts."""
        kept = [i for i, row in enumerate(self.rows) if row.finish is None]
        added = [
            Row(index, r, self._stops.candidates(r.params.stop), uniforms(r.seed, r.params.max_tokens))
            for index, r in joining
        ]
        self.rows = [*(self.rows[i] for i in kept), *added]
        room = min(64, max((row.left for row in self.rows), default=0))
        self.cache.change(kept, [_without_last(context) for context in contexts], room=room)
        self._ids = torch.tensor([[row.last_id()] for row in self.rows], device=self._device)
        self._positions = torch.tensor([[row.length - 1] for row in self.rows], device=self._device)
        self._last = torch.tensor([[row.length + row.left - 1] for row in self.rows], device=self._device)
        self._params = RowParams.of([row.request.params for row in self.rows], self._device)
        width = max((len(row.draws) for row in self.rows), default=0)
        draws = [np.pad(row.draws, (0, width - len(row.draws))) for row in self.rows]
        self._uniforms = torch.tensor(np.array(draws), device=self._device)
        self._steps = torch.tensor([[len(row.ids)] for row in self.rows], device=self._device)

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What is fed next: token ids and positions, [B, 1] each."""
        return self._ids, self._positions

    def sample(self, logits: torch.Tensor) -> list[Row]:
        """Draw the next token of every row from ``logits`` [B, V]; returns the rows that finished with it."""
        drawn = sample(logits, self._uniforms.gather(1, self._steps)[:, 0], self._params)
        # A finished row that is still in the batch is sampled on, unread, at positions that a model has.
        self._ids, self._positions = drawn.tokens[:, None], torch.minimum(self._positions + 1, self._last)
        self._steps = (self._steps + 1).clamp_max(self._uniforms.shape[1] - 1)
        return self._record(drawn)

    def _record(self, drawn: Sampled) -> list[Row]:
        tokens, logprobs, entropies = (t.tolist() for t in (drawn.tokens, drawn.logprobs, drawn.entropies))
        finished = []
        for place, row in enumerate(self.rows):
            if row.finish is not None:
                continue
            row.ids.append(tokens[place])
            row.logprobs.append(logprobs[place])
            row.entropies.append(entropies[place])
            stops = row.request.params.stop
            if tokens[place] in self._ends:
                row.finish = "stop"
            elif tokens[place] in row.watch and (stop := self._stops.match(row.ids, stops)):
                row.finish, row.stop = "stop", stop
            elif row.left == 0:
                row.finish = "length"
            else:
                continue
            if self._keep:
                row.kv = self.cache.tail(place, len(row.ids) - 1)
            finished.append(row)
        return finished


def _without_last(context: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The context up to, not including, its last token."""
    return [*context[:-1], context[-1][:, :, :, :-1]]


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
