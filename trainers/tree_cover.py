"""How attention over packed trees is cut into blocks: some queries, and a superset of the keys that they may see.

The rule inside a block decides what is seen, so any cover is exact; the cover only decides the cost. Plain Python over
runs (maximal chains of tokens), of which there are about as many as nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Block", "Run", "Span", "batches", "cover", "cover_cost", "find_runs", "trim"]

# Costs of the cover, counted in query-key pairs: one more block, and one more key to gather. Then limits: the longest
# block and the largest padded call.
_BLOCK_COST = 2_048
_KEY_COST = 32
_MAX_QUERIES = 512
_CALL_PAIRS = 1 << 20

Span = tuple[int, int]
"""First token, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``[start, stop)`` and their keys: the ancestors' spans, then ``[first_key, stop)``."""

    start: int
    stop: int
    first_key: int
    ancestors: tuple[Span, ...]

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.stop - self.start

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.stop - self.first_key + _size(self.ancestors)


def trim(block: Block, window: int) -> Block:
    """The block without the keys that lie ``window`` or more positions before its first query: none sees them."""
    left = _size(block.ancestors) + block.start - block.first_key - window + 1
    ancestors: list[Span] = []
    for start, stop in block.ancestors:
        cut = min(max(left, 0), stop - start)
        left -= cut
        if cut < stop - start:
            ancestors.append((start + cut, stop))
    return replace(block, ancestors=tuple(ancestors), first_key=block.first_key + max(left, 0))


@dataclass(slots=True)
class Run:
    """A maximal chain of tokens that are seen up to the same end, with the runs that hang below it.

    Its tokens are ``[start, stop)``; those below it are ``[stop, subtree_end)``, and each of them sees all of it.
    """

    start: int
    stop: int
    subtree_end: int
    parent: int
    ancestors: tuple[Span, ...]
    children: list[int]


def _size(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def find_runs(ends: Sequence[int], previous: Sequence[int]) -> list[Run]:
    """The runs of a pack; ``ends`` and ``previous`` are its columns ``subtree_end`` and ``predecessor``.

    Raises ``ValueError`` where they are not those of depth-first trees.
    """
    runs: list[Run] = []
    owner: list[int] = []
    for i, (end, before) in enumerate(zip(ends, previous)):
        if not (i < end <= len(ends) and before < i):
            raise ValueError(f"token {i}: subtree_end {end} and predecessor {before} are not those of a packed tree")
        if before == i - 1 and before >= 0 and end == ends[before]:
            runs[-1].stop = i + 1
        else:
            parent = owner[before] if before >= 0 else -1
            if parent >= 0 and (runs[parent].stop != before + 1 or end > runs[parent].subtree_end):
                raise ValueError(f"token {i}: branches inside a chain of tokens; packed trees branch at its end")
            spans = (*runs[parent].ancestors, (runs[parent].start, runs[parent].stop)) if parent >= 0 else ()
            if parent >= 0:
                runs[parent].children.append(len(runs))
            runs.append(Run(i, i + 1, end, parent, _merge(spans), []))
        owner.append(len(runs) - 1)
    return runs


def _merge(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Join touching spans, so that a first child's path stays one slice."""
    out: list[Span] = []
    for start, stop in spans:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def _cost(queries: int, keys: int) -> int:
    return queries * keys + _KEY_COST * keys + _BLOCK_COST


def cover(runs: Sequence[Run]) -> list[Block]:
    """The cheapest of, bottom up: a whole subtree as one block, or its top run alone and covers of its children."""
    splits: dict[int, list[Block]] = {}
    costs: list[int] = [0] * len(runs)
    for i in range(len(runs) - 1, -1, -1):
        run = runs[i]
        above, width, own = _size(run.ancestors), run.subtree_end - run.start, run.stop - run.start
        whole, split = _cost(width, above + width), _cost(own, above + own)
        joined, extra = _join([runs[c] for c in run.children], [costs[c] for c in run.children])
        if run.children and (width > _MAX_QUERIES or split + extra < whole):
            splits[run.start] = joined
            costs[i] = split + extra
        else:
            costs[i] = whole
    roots = [i for i, run in enumerate(runs) if run.parent < 0]
    by_start = {run.start: run for run in runs}
    blocks: list[Block] = []
    stack, _ = _join([runs[i] for i in roots], [costs[i] for i in roots])
    while stack:
        block = stack.pop()
        run = by_start[block.start]
        if run.start in splits and block.stop == run.subtree_end:
            blocks += _pieces(run.start, run.stop, run.ancestors)
            stack += splits[run.start]
        else:
            blocks += _pieces(block.start, block.stop, block.ancestors)
    return blocks


def _join(siblings: Sequence[Run], costs: Sequence[int]) -> tuple[list[Block], int]:
    """Put neighbouring subtrees that share their ancestors into one block where that is cheaper."""
    out: list[Block] = []
    total = 0
    last = 0
    for run, cost in zip(siblings, costs):
        if out and out[-1].stop == run.start:
            width = run.subtree_end - out[-1].start
            together = _cost(width, width + _size(run.ancestors))
            if width <= _MAX_QUERIES and together <= last + cost:
                out[-1] = Block(out[-1].start, run.subtree_end, out[-1].start, run.ancestors)
                total += together - last
                last = together
                continue
        out.append(Block(run.start, run.subtree_end, run.start, run.ancestors))
        total += cost
        last = cost
    return out, total


def _pieces(first: int, end: int, ancestors: tuple[Span, ...]) -> Iterator[Block]:
    for start in range(first, end, _MAX_QUERIES):
        yield Block(start, min(start + _MAX_QUERIES, end), first, ancestors)


def batches(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Group blocks of similar shape while padding costs less than another call."""
    group: list[Block] = []
    longest = widest = real = 0
    for block in sorted(blocks, key=lambda b: (-b.queries, -b.keys, b.start)):
        lq, lk = max(longest, block.queries), max(widest, block.keys)
        padded = (len(group) + 1) * lq * lk
        real += block.queries * block.keys
        if group and (padded > _CALL_PAIRS or padded - real > (len(group) + 1) * _BLOCK_COST):
            yield group
            group, real = [], block.queries * block.keys
            lq, lk = block.queries, block.keys
        group.append(block)
        longest, widest = lq, lk
    if group:
        yield group


def cover_cost(blocks: Sequence[Block]) -> tuple[int, int]:
    """Query-key pairs that the blocks cost when they run batched, gathered keys included, and the number of calls."""
    shapes = [(len(g), max(b.queries for b in g), max(b.keys for b in g)) for g in batches(blocks)]
    return sum(rows * keys * (queries + _KEY_COST) for rows, queries, keys in shapes), len(shapes)
