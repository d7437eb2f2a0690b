"""Passages of a store to counted terms, block by block, in this process or in several of its own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from turntree.errors import SearchIndexError
from turntree.search_backend.analyzer import Analyzer, BM25Settings
from turntree.search_backend.passage import Passage
from turntree.search_backend.store import CorpusStore

__all__ = ["TermBlock", "count_terms", "read_blocks"]

BLOCK = 8192
"""Passages of a block."""


@dataclass(frozen=True)
class TermBlock:
    """Terms of some passages. ``terms``: in the order of their first occurrence; ``lengths``: int32 [passages],
    tokens; ``distinct``: int32 [passages], different terms; ``numbers``, ``counts``: int32 [postings], for each
    passage in order its different terms, by position in ``terms``, and how often each occurs.
    """

    terms: list[str]
    lengths: npt.NDArray[np.int32]
    distinct: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]


def count_terms(passages: Sequence[Passage], analyzer: Analyzer) -> TermBlock:
    """Analyse and count."""
    vocabulary: dict[str, int] = {}
    tokens: list[int] = []
    lengths = np.zeros(len(passages), np.int32)
    for i, p in enumerate(passages):
        terms = analyzer.passage(p.title, p.text)
        lengths[i] = len(terms)
        tokens += [vocabulary.setdefault(t, len(vocabulary)) for t in terms]
    size = max(len(vocabulary), 1)
    rows = np.repeat(np.arange(len(passages), dtype=np.int64), lengths)
    pairs, counts = np.unique(rows * size + np.asarray(tokens, dtype=np.int64), return_counts=True)
    distinct = np.bincount(pairs // size, minlength=len(passages)).astype(np.int32)
    return TermBlock(list(vocabulary), lengths, distinct, (pairs % size).astype(np.int32), counts.astype(np.int32))


def read_blocks(store: CorpusStore, settings: BM25Settings, start: int, *, workers: int) -> Iterator[TermBlock]:
    """The blocks of a store from row ``start`` on, in order, whatever the number of processes."""
    rows = [(i, min(i + BLOCK, len(store))) for i in range(start, len(store), BLOCK)]
    if workers <= 1 or len(rows) < 2:
        analyzer = Analyzer(settings)
        yield from (count_terms(store[begin:end], analyzer) for begin, end in rows)
        return
    with ExitStack() as stack:
        crew = itertools.cycle([_Worker(stack, store.folder, settings) for _ in range(min(workers, len(rows)))])
        waiting: deque[_Worker] = deque()
        for begin, end in rows:
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().receive()
            worker = next(crew)
            worker.send(begin, end)
            waiting.append(worker)
        while waiting:
            yield waiting.popleft().receive()


class _Worker:
    """A process that counts the blocks it is asked for; it ends with its standard input, so with its parent."""

    def __init__(self, stack: ExitStack, store: Path, settings: BM25Settings) -> None:
        about = json.dumps({"store": str(store.absolute()), "settings": asdict(settings)})
        command = [sys.executable, "-c", "from turntree.search_backend.terms import serve; serve()", about]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._process = stack.enter_context(process)
        stack.callback(process.kill)

    def send(self, begin: int, end: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d %d\n" % (begin, end))
        self._process.stdin.flush()

    def receive(self) -> TermBlock:
        assert self._process.stdout is not None
        try:
            return _receive(self._process.stdout)
        except EOFError as error:
            code = self._process.wait()
            raise SearchIndexError(
                f"a process that reads passages ended with code {code}; its message is above. Run the build again: it "
                f"goes on where it was"
            ) from error


def serve() -> None:
    """The worker's side of the pipes: lines with two row numbers in, blocks out."""
    about = json.loads(sys.argv[-1])
    store, analyzer = CorpusStore.open(about["store"]), Analyzer(BM25Settings(**about["settings"]))
    for line in sys.stdin.buffer:
        begin, end = map(int, line.split())
        _send(sys.stdout.buffer, count_terms(store[begin:end], analyzer))


def _send(pipe: IO[bytes], block: TermBlock) -> None:
    terms = "\n".join(block.terms).encode()
    arrays = (block.lengths, block.distinct, block.numbers, block.counts)
    pipe.write(np.array([len(terms), *map(len, arrays)], dtype=np.int64).tobytes() + terms)
    for array in arrays:
        pipe.write(array.tobytes())
    pipe.flush()


def _receive(pipe: IO[bytes]) -> TermBlock:
    sizes = np.frombuffer(_exactly(pipe, 5 * 8), dtype=np.int64).tolist()
    text = _exactly(pipe, sizes[0]).decode()
    arrays: list[Any] = [np.frombuffer(_exactly(pipe, 4 * n), dtype=np.int32) for n in sizes[1:]]
    return TermBlock(text.split("\n") if text else [], *arrays)


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data
