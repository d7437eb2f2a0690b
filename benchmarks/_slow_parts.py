"""An engine and a retriever that take a stated time and compute nothing: what a schedule costs is measured on them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turntree.agents.engines.protocol import Generation, Request
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.search_backend import Passage

__all__ = ["BatchCurve", "SlowEngine", "SlowSearch", "speak"]

Span = tuple[int, int]

WORDS = "the search goes on to the next person of this town "


def speak(turn: Span, turns: Span, context: str, seed: int) -> str:
    """A turn of a length in bytes drawn from ``turn``; the last one of a number drawn from ``turns`` answers."""
    rng = np.random.default_rng(seed)
    length, done = int(rng.integers(turn[0], turn[1] + 1)), context.count("</information>") + 1
    answers = done >= turns[1] or (done >= turns[0] and rng.random() < 1 / (turns[1] - done + 1))
    argument = f"{seed % 10**9}"
    text = f"<answer>{argument}</answer>" if answers else f"<search>{argument}</search>"
    thought = (WORDS * (1 + length // len(WORDS)))[: max(0, length - len(text) - len("<think></think>"))]
    return f"<think>{thought}</think>{text}"


@dataclass(frozen=True, slots=True)
class BatchCurve:
    """Seconds of one decoding step of ``rows`` rows: ``step_s + row_s * rows``."""

    step_s: float
    row_s: float

    def __call__(self, rows: int) -> float:
        return self.step_s + self.row_s * rows


class _Clock:
    """Rows that decode together, one token a step; a row may join at any step and leaves at its end."""

    def __init__(self, curve: BatchCurve) -> None:
        self.curve = curve
        self.busy_s = 0.0
        self.steps = 0
        self.row_steps = 0
        self._rows: dict[threading.Event, int] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="clock").start()

    def decode(self, tokens: Sequence[int]) -> list[threading.Event]:
        """An event for each row, which is set when the row's tokens are decoded."""
        ends = [threading.Event() for _ in tokens]
        with self._changed:
            self._rows.update(zip(ends, tokens, strict=True))
            self._changed.notify()
        return ends

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._rows))
            start = due = time.monotonic()
            while self._rows:
                with self._changed:
                    rows = list(self._rows)
                due += self.curve(len(rows))
                time.sleep(max(0.0, due - time.monotonic()))
                self._step(rows)
            self.busy_s += time.monotonic() - start

    def _step(self, rows: Sequence[threading.Event]) -> None:
        self.steps += 1
        self.row_steps += len(rows)
        with self._changed:
            for row in rows:
                self._rows[row] -= 1
                if not self._rows[row]:
                    del self._rows[row]
                    row.set()


class SlowEngine(ScriptedEngine):
    """Speaks by script, at the speed of a batch curve. With ``in_flight`` rows join and leave the batch one by one."""

    def __init__(self, curve: BatchCurve, turn: Span, turns: Span, *, in_flight: int = 0) -> None:
        super().__init__(lambda context, seed: speak(turn, turns, context, seed), ByteTokenizer())
        self.in_flight = in_flight
        self.clock = _Clock(curve)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, when the slowest of them is decoded."""
        generations = super().generate(requests)
        for end in self.clock.decode([len(generation.ids) for generation in generations]):
            end.wait()
        return generations

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
        """In the order of the requests."""
        return iter(list(enumerate(self.generate(requests))))


class SlowSearch:
    """A search server that answers each query after a time of its own; queries of a batch are searched side by side."""

    fingerprint = "slow"

    def __init__(self, span_s: tuple[float, float], *, in_flight: int) -> None:
        self.span_s = span_s
        self.in_flight = in_flight

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """One passage a query."""
        time.sleep(max(self.seconds(query) for query in queries))
        return [[Passage(query, "a passage", f"Nothing is known about {query}.")][:k] for query in queries]

    def seconds(self, query: str) -> float:
        """How long this query takes: drawn evenly from the span, by the query alone."""
        draw = int.from_bytes(hashlib.sha256(query.encode()).digest()[:8], "big") / 2**64
        return self.span_s[0] + draw * (self.span_s[1] - self.span_s[0])
