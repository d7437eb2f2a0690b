"""What search is measured on: real questions with their corpora, and generated corpora of any size."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turntree.search_backend.passage import Passage

__all__ = ["SETS", "BenchSet", "generate_corpus", "generated_queries", "load_sets", "support"]

SETS = (
    "hotpotqa_dev", "hotpotqa_train", "musique_dev", "musique_train", "2wiki_dev", "zh_cmrc2018_dev", "zh_drcd_dev",
)  # fmt: skip
_WORDS = 1_000_000  # different words of generated text
_LENGTH = 100  # words of a passage, as wiki-18's
_SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]


@dataclass(frozen=True)
class BenchSet:
    """A set of real questions. ``gold``: ids of each question's supporting passages."""

    name: str
    corpus: Path
    questions: tuple[str, ...]
    gold: tuple[frozenset[str], ...]


def load_sets(names: Sequence[str] = SETS) -> list[BenchSet]:
    """The sets in ``$TURNTREE_SHARED``/data/bench, else ``../shared/data/bench``; none where that is absent."""
    shared = Path(os.environ.get("TURNTREE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
    found = []
    for name in names:
        folder = shared / "data" / "bench" / name
        if not folder.is_dir():
            continue
        rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
        gold = tuple(frozenset(row["metadata"]["supporting_ids"]) for row in rows)
        found.append(BenchSet(name, folder / "corpus.jsonl", tuple(row["question"] for row in rows), gold))
    return found


def support(gold: Sequence[frozenset[str]], found: Sequence[Sequence[Passage]], k: int) -> tuple[float, float]:
    """Per cent of supporting passages among the first ``k``, and of questions with all of them there."""
    shares = [len(g & {p.id for p in passages[:k]}) / len(g) for g, passages in zip(gold, found, strict=True)]
    return 100 * sum(shares) / len(shares), 100 * sum(share == 1 for share in shares) / len(shares)


def generate_corpus(path: Path, passages: int, *, seed: int = 0) -> Path:
    """Write passages of 100 words whose frequencies fall as 1 / rank, as wiki-18; equal for equal arguments."""
    rng = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for start in range(0, passages, 10_000):
            rows = min(10_000, passages - start)
            for i, ranks in enumerate(_ranks(rng, (rows, _LENGTH + 3)).tolist(), start=start):
                words = [_word(rank) for rank in ranks]
                contents = f'"{" ".join(words[:3]).title()}"\n{" ".join(words[3:])}'
                file.write(json.dumps({"id": str(i), "contents": contents}) + "\n")
    return path


def generated_queries(count: int, *, seed: int = 1) -> list[str]:
    """Queries of ten words with the corpora's frequencies, the fifty most frequent words aside: they are stop words."""
    rng = np.random.default_rng(seed)
    return [" ".join(_word(rank) for rank in row) for row in np.maximum(_ranks(rng, (count, 10)), 50).tolist()]


def _ranks(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.power(float(_WORDS), rng.random(shape)).astype(np.int64) - 1


def _word(rank: int) -> str:
    """The word of a rank: short ones first, all different."""
    base, number = len(_SYLLABLES), rank
    word = _SYLLABLES[number % base]
    while number := number // base:
        word += _SYLLABLES[number % base]
    return word + "n"
