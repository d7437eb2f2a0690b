"""Dense and hybrid search on real questions: recall beside the reference, and the weights tuned on training sets."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from _common import Figure
from _search_corpora import BenchSet, load_sets, support
from _search_measure import rates

from turntree.search_backend.hybrid import STATIC_WEIGHTS, WEIGHTS, Fusion, HybridBackend, fuse, tune_weights
from turntree.search_backend.index import build_index
from turntree.search_backend.passage import Passage, SearchBackend
from turntree.search_backend.pretrained import unpack_encoder

__all__ = ["ENCODERS", "TRAIN", "dense_recall", "hybrid_weights", "query_rates"]

# Recall@1/3/5/10 of all-MiniLM-L6-v2 to reach within one point: the reference figures of the data's description.
REFERENCE = {
    "hotpotqa_dev": (39.3, 64.6, 73.3, 81.9),
    "hotpotqa_train": (42.0, 70.5, 76.3, 84.5),
    "musique_dev": (28.1, 43.7, 52.2, 61.6),
    "musique_train": (33.9, 54.4, 62.2, 70.3),
    "2wiki_dev": (36.4, 60.1, 66.3, 71.3),
    "zh_cmrc2018_dev": (15.3, 25.3, 31.0, 38.3),
}
DEPTHS = (1, 3, 5, 10)
TRAIN = ("hotpotqa_train", "musique_train")
SHIPPED = {"minilm": WEIGHTS, "wordllama": STATIC_WEIGHTS}
ENCODERS = tuple(SHIPPED)


def dense_recall(sets: Sequence[BenchSet], models: Path, *, encoders: Sequence[str] = ENCODERS) -> list[Figure]:
    """Recall and all-support of each encoder with a flat index, and of the hybrid with its shipped weights.

    ``models``: where encoders and indexes are kept; those that are there are used, and have no build time.
    """
    figures = []
    for part in sets:
        words = _bm25(part, models)
        lexical = words.search(list(part.questions), k=max(DEPTHS))
        figures += _recalls(f"{part.name}, bm25", part, lexical)
        for encoder in encoders:
            began = time.perf_counter()
            fresh = not (_folder(part, encoder, models) / "manifest.json").is_file()
            vectors = _dense(part, encoder, models)
            seconds = time.perf_counter() - began
            name = f"{part.name}, {encoder} flat"
            reference = REFERENCE.get(part.name) if encoder == "minilm" else None
            found = vectors.search(list(part.questions), k=max(DEPTHS))
            figures += _recalls(name, part, found, reference)
            hybrid = HybridBackend({"bm25": words, "dense": vectors}, Fusion(dict(SHIPPED[encoder])))
            fused = hybrid.search(list(part.questions), k=max(DEPTHS))
            figures += _recalls(f"{part.name}, bm25 + {encoder}", part, fused)
            if fresh:
                figures.append(Figure(f"{name}: build", seconds, "s", "lower"))
    return figures


def query_rates(part: BenchSet, models: Path, *, encoders: Sequence[str] = ENCODERS) -> list[Figure]:
    """Rates of whole searches, the encoding of the query included."""
    queries = list(dict.fromkeys(part.questions))
    figures = []
    for encoder in encoders:
        vectors = _dense(part, encoder, models)
        figures += rates(vectors, queries).figures(f"{part.name}, {encoder} flat", gain=None)
    return figures


def hybrid_weights(
    models: Path, *, encoders: Sequence[str] = ENCODERS, names: Sequence[str] = TRAIN, out: Path | None = None
) -> list[Figure]:
    """Weights with the best mean recall on training sets, for each encoder and for all together.

    Sets weigh the same, whatever their size. ``out``: a JSON file for the weights.
    """
    parts = load_sets(names)
    figures, chosen = [], {}
    for encoder in encoders:
        rankings: dict[str, list[list[str]]] = {"bm25": [], "dense": []}
        gold: list[frozenset[str]] = []
        largest = max((len(part.questions) for part in parts), default=0)
        for part in parts:
            repeats = max(1, round(largest / len(part.questions)))
            for name, backend in (("bm25", _bm25(part, models)), ("dense", _dense(part, encoder, models))):
                found = backend.search(list(part.questions), k=Fusion().depth)
                rankings[name] += repeats * [[p.id for p in passages] for passages in found]
            gold += repeats * list(part.gold)
        weights, recall = tune_weights(rankings, gold)
        chosen[encoder] = weights
        even = _mean_recall(rankings, gold, SHIPPED[encoder])
        figures += [
            Figure(
                f"hybrid with {encoder}: weight of bm25, tuned on {' + '.join(names)}", weights["bm25"], "", "higher"
            ),
            Figure(f"hybrid with {encoder}: mean recall there", 100 * recall, "%", "higher"),
            Figure(f"hybrid with {encoder}: mean recall there with the shipped weights", 100 * even, "%", "higher"),
        ]
    if out is not None:
        out.write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")
    return figures


def _mean_recall(
    rankings: Mapping[str, Sequence[Sequence[str]]], gold: Sequence[frozenset[str]], weights: Mapping[str, float]
) -> float:
    fusion, total = Fusion(dict(weights)), 0.0
    for row, ids in enumerate(gold):
        ranked = [id for id, _ in fuse({name: lists[row] for name, lists in rankings.items()}, fusion)]
        total += sum(len(ids & set(ranked[:k])) / len(ids) for k in DEPTHS) / len(DEPTHS)
    return total / max(len(gold), 1)


def _folder(part: BenchSet, kind: str, models: Path) -> Path:
    return models / "indexes" / f"{kind}-{part.name}"


@lru_cache(maxsize=32)
def _bm25(part: BenchSet, models: Path) -> SearchBackend:
    return build_index(part.corpus, _folder(part, "bm25", models), kind="bm25")


@lru_cache(maxsize=32)
def _dense(part: BenchSet, encoder: str, models: Path) -> SearchBackend:
    model = unpack_encoder(encoder, models / encoder)
    return build_index(part.corpus, _folder(part, encoder, models), kind="dense", options={"encoder": str(model)})


def _recalls(
    name: str, part: BenchSet, found: Sequence[Sequence[Passage]], reference: Sequence[float] | None = None
) -> list[Figure]:
    figures = []
    for i, k in enumerate(DEPTHS):
        recall, complete = support(part.gold, found, k)
        target = round(reference[i] - 1, 1) if reference else None
        figures.append(Figure(f"{name}: recall@{k}", recall, "%", "higher", target))
        figures.append(Figure(f"{name}: all support@{k}", complete, "%", "higher"))
    return figures
