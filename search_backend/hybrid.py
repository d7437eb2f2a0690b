"""Several backends over one corpus as one: their rankings are fused by weighted reciprocal ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from turntree.errors import ConfigError
from turntree.search_backend.bm25 import check_request
from turntree.search_backend.families import read_layout
from turntree.search_backend.files import read_json, write_json
from turntree.search_backend.index import IndexKind, find_kind
from turntree.search_backend.passage import Passage, SearchBackend
from turntree.search_backend.store import CorpusStore, Progress
from turntree.search_backend.survey import Estimate, Survey

__all__ = ["KIND", "STATIC_WEIGHTS", "WEIGHTS", "Fusion", "HybridBackend", "HybridKind", "fuse", "tune_weights"]

WEIGHTS: Mapping[str, float] = MappingProxyType({"bm25": 0.3, "dense": 0.7})
"""Weights with a transformer: the best for all-MiniLM-L6-v2 on training questions of HotpotQA and MuSiQue."""

STATIC_WEIGHTS: Mapping[str, float] = MappingProxyType({"bm25": 0.95, "dense": 0.05})
"""Weights with a static encoder: best for WordLlama on the same questions."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Weighted reciprocal-rank fusion (Cormack, Clarke and Buettcher, SIGIR 2009): ``sum of w / (constant + rank)``.

    ``weights``: one for each part by name; a part of weight 0 is not asked. ``constant``: the paper's 60. ``depth``:
    results of each part that are fused, or ``k`` where that is more.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    constant: float = 60.0
    depth: int = 100

    def __post_init__(self) -> None:
        numbers = [*self.weights.values(), self.constant]
        plain = all(isinstance(n, (int, float)) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
        if not plain or min(numbers, default=0) < 0 or sum(self.weights.values()) <= 0:
            raise ConfigError(
                f"hybrid: expected weights and a rank constant of at least 0 and one weight above it, found "
                f"{dict(self.weights)} and {self.constant!r}"
            )
        if isinstance(self.depth, bool) or not isinstance(self.depth, int) or self.depth < 1:
            raise ConfigError(f"hybrid: expected a depth of at least 1, found {self.depth!r}")


def fuse(rankings: Mapping[str, Sequence[str]], fusion: Fusion) -> list[tuple[str, float]]:
    """Ids with their fused scores, best first. Equal scores: the better single rank, then the order of the parts."""
    scores: dict[str, float] = {}
    best: dict[str, tuple[int, int]] = {}
    for place, (name, ids) in enumerate(rankings.items()):
        for rank, id in enumerate(ids, start=1):
            scores[id] = scores.get(id, 0.0) + fusion.weights[name] / (fusion.constant + rank)
            best[id] = min(best.get(id, (rank, place)), (rank, place))
    return sorted(scores.items(), key=lambda item: (-item[1], best[item[0]]))


class HybridBackend:
    """A :class:`SearchBackend` over named backends of the same corpus; a passage is known by its id.

    Scores are those of the fusion: they compare results of one query, not queries.
    """

    def __init__(self, parts: Mapping[str, SearchBackend], fusion: Fusion | None = None) -> None:
        self.fusion = fusion or Fusion(dict.fromkeys(parts, 1.0))
        if set(parts) != set(self.fusion.weights):
            raise ConfigError(
                f"hybrid: expected a weight for each part, found the parts {sorted(parts)} and weights for "
                f"{sorted(self.fusion.weights)}"
            )
        self.parts = {name: part for name, part in parts.items() if self.fusion.weights[name] > 0}
        about = [[name, part.fingerprint, self.fusion.weights[name]] for name, part in self.parts.items()] + [
            [self.fusion.constant, self.fusion.depth]
        ]
        self._fingerprint = hashlib.sha256(json.dumps(["hybrid", about]).encode()).hexdigest()[:16]

    @property
    def fingerprint(self) -> str:
        """Hash of the parts' fingerprints, weights, rank constant and depth."""
        return self._fingerprint

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        """The ``k`` passages of the best fused ranks for each query; the parts' own errors pass through."""
        check_request(queries, k)
        different = list(dict.fromkeys(queries))
        depth = max(k, self.fusion.depth)
        results = {name: part.search(different, k=depth) for name, part in self.parts.items()}
        found: dict[str, list[Passage]] = {}
        for row, query in enumerate(different):
            mine = {name: lists[row] for name, lists in results.items()}
            passages = {p.id: p for ranking in mine.values() for p in ranking}
            ranked = fuse({name: [p.id for p in ranking] for name, ranking in mine.items()}, self.fusion)
            found[query] = [replace(passages[id], score=score) for id, score in ranked[:k]]
        return [list(found[query]) for query in queries]


def tune_weights(
    rankings: Mapping[str, Sequence[Sequence[str]]],
    gold: Sequence[Iterable[str]],
    *,
    constant: float = 60.0,
    cutoffs: Sequence[int] = (1, 3, 5, 10),
    step: float = 0.05,
) -> tuple[dict[str, float], float]:
    """Weights of two parts, summing to 1, with the best mean recall at the cutoffs, and that recall (0 to 1).

    ``rankings[part][question]``: ids, best first; ``gold[question]``: ids to be found. Of equal weights those nearest
    to one half win. Use training questions: weights chosen on what is reported make the report too good.
    """
    if len(rankings) != 2:
        raise ConfigError(f"expected two parts to weigh against each other, found {sorted(rankings)}")
    wanted = [frozenset(ids) for ids in gold]
    first, second = rankings
    tried = []
    for i in range(round(1 / step) + 1):
        weights = {first: round(i * step, 6), second: round(1 - i * step, 6)}
        fusion = Fusion(weights, constant)
        recall = 0.0
        for row, ids in enumerate(wanted):
            mine = {name: lists[row] for name, lists in rankings.items() if weights[name] > 0}
            ranked = [id for id, _ in fuse(mine, fusion)]
            recall += sum(len(ids & set(ranked[:k])) / max(len(ids), 1) for k in cutoffs) / len(cutoffs)
        tried.append((-round(recall / max(len(wanted), 1), 9), abs(weights[first] - 0.5), i, weights))
    best = min(tried)
    return best[3], -best[0]


_OWN = ("weight_bm25", "weight_dense", "rank_constant", "depth")
_PARTS, _STATE = ("bm25", "dense"), "parts.json"


class HybridKind:
    """The kind ``hybrid``: a bm25 and a dense index of the same corpus in one folder.

    Options: ``weight_bm25``, ``weight_dense`` (by default :data:`WEIGHTS`, or :data:`STATIC_WEIGHTS`),
    ``rank_constant``, ``depth``; those of BM25 as ``bm25.NAME``; all others, with or without ``dense.``, are the dense
    index's. The same names hold when searching.
    """

    name = "hybrid"

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        own, parts = _split(options)
        dense = _kind("dense").settings(parts["dense"])
        static = read_layout(Path(dense["encoder"])).kind == "static"
        fusion = _fusion(own, STATIC_WEIGHTS if static else WEIGHTS)
        return {
            "weight_bm25": fusion.weights["bm25"],
            "weight_dense": fusion.weights["dense"],
            "rank_constant": fusion.constant,
            "depth": fusion.depth,
            "bm25": _kind("bm25").settings(parts["bm25"]),
            "dense": dense,
        }

    def packages(self, settings: Mapping[str, Any]) -> Sequence[str]:
        return tuple(dict.fromkeys(p for name in _PARTS for p in _kind(name).packages(settings[name])))

    def estimate(self, corpus: Survey, settings: Mapping[str, Any]) -> Estimate:
        needs = [_kind(name).estimate(corpus, settings[name]) for name in _PARTS]
        return Estimate(
            build_memory=max(n.build_memory for n in needs),
            disk=sum(n.disk for n in needs),
            load_memory=sum(n.load_memory for n in needs),
            mapped=sum(n.mapped for n in needs),
            seconds=sum(n.seconds for n in needs),
            notes=tuple(f"{name}: {note}" for name, n in zip(_PARTS, needs) for note in n.notes),
        )

    def alternatives(self, corpus: Survey, settings: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        plain = self.settings({"encoder": settings["dense"]["encoder"]})
        own = {name: settings[name] for name in _OWN if settings[name] != plain[name]}
        words = {f"bm25.{n}": v for n, v in settings["bm25"].items() if v != plain["bm25"][n]}
        return [{**own, **words, **ways} for ways in _kind("dense").alternatives(corpus, settings["dense"])]

    def build(
        self, store: CorpusStore, folder: Path, settings: Mapping[str, Any], progress: Progress
    ) -> dict[str, Any]:
        state = folder / _STATE
        built = read_json(state, what="the state of a build") if state.is_file() else {}
        for name in _PARTS:
            if name not in built:
                (folder / name).mkdir(exist_ok=True)
                built[name] = _kind(name).build(store, folder / name, settings[name], progress)
                write_json(state, built)
        state.unlink()
        return built

    def open(self, store: CorpusStore, folder: Path, manifest: Mapping[str, Any], **options: Any) -> HybridBackend:
        own, wanted = _split(options)
        settings = manifest["settings"]
        fusion = _fusion({name: settings[name] for name in _OWN} | own)
        parts: dict[str, SearchBackend] = {}
        for name in _PARTS:
            about = {**manifest, "kind": name, "settings": settings[name], "built": manifest["built"][name]}
            if fusion.weights[name] > 0:
                parts[name] = _kind(name).open(store, folder / name, about, **wanted[name])
        return HybridBackend(parts, replace(fusion, weights={name: fusion.weights[name] for name in parts}))


def _kind(name: str) -> IndexKind:
    return find_kind(name)


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The fusion's options, and those of each part."""
    own = {name: value for name, value in options.items() if name in _OWN}
    parts: dict[str, dict[str, Any]] = {name: {} for name in _PARTS}
    for name, value in options.items():
        part, dot, rest = name.partition(".")
        if dot and part in parts:
            parts[part][rest] = value
        elif name not in own:
            parts["dense"][name] = value
    return own, parts


def _fusion(own: Mapping[str, Any], weights: Mapping[str, float] = WEIGHTS) -> Fusion:
    return Fusion(
        weights={name: own.get(f"weight_{name}", weights[name]) for name in _PARTS},
        constant=own.get("rank_constant", Fusion().constant),
        depth=own.get("depth", Fusion().depth),
    )


KIND = HybridKind()
"""The index kind ``hybrid``."""
