"""Search backends: recall on real questions, building and searching corpora of 10,000 to a million passages."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run
from _search_corpora import SETS, load_sets
from _search_dense import ENCODERS, dense_recall, hybrid_weights, query_rates
from _search_lexical import lexical_recall, lexical_scale
from _search_server import figures as server_figures
from _search_vectors import vector_scale


def _lexical(args: argparse.Namespace, folder: Path) -> list[Figure]:
    sets = load_sets(("musique_train", "zh_cmrc2018_dev") if args.quick else SETS)
    sizes = (10_000,) if args.quick else (10_000, 100_000, 1_000_000)
    return lexical_recall(sets) + lexical_scale(sizes, queries=256 if args.quick else 1024, folder=folder)


def _dense(args: argparse.Namespace, folder: Path) -> list[Figure]:
    models = args.models or folder
    encoders = ("wordllama",) if args.quick and args.models is None else ENCODERS
    sets = load_sets(("musique_train", "zh_cmrc2018_dev") if args.quick else SETS)
    weights = [] if args.quick else hybrid_weights(models, encoders=encoders, out=models / "weights.json")
    timed = [figure for part in sets[:1] for figure in query_rates(part, models, encoders=encoders)]
    return dense_recall(sets, models, encoders=encoders) + timed + weights


def _vectors(args: argparse.Namespace, folder: Path) -> list[Figure]:
    sizes = args.size or ((10_000,) if args.quick else (10_000, 100_000, 1_000_000))
    return vector_scale(sizes, queries=256 if args.quick else 1024, folder=folder, factories=args.factory or ())


def _server(args: argparse.Namespace, folder: Path) -> list[Figure]:
    del folder
    return server_figures(quick=args.quick)


PARTS: Mapping[str, Callable[[argparse.Namespace, Path], list[Figure]]] = {
    "lexical": _lexical,
    "dense": _dense,
    "vectors": _vectors,
    "server": _server,
}
"""What can be measured: a function of the arguments and a folder for files, in a file of its own."""


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = []
    for name in args.part or PARTS:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures += PARTS[name](args, Path(folder))
    return figures


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="measure this part only; repeatable")
    parser.add_argument("--models", type=Path, help="keep encoders and dense indexes here (embedding takes long)")
    parser.add_argument("--size", action="append", type=int, help="vectors: measure this many; repeatable")
    parser.add_argument("--factory", action="append", help="vectors: measure this FAISS index; repeatable")
    parser.add_argument("--folder", type=Path, help="where corpora and indexes go (5 GB in the full form)")


if __name__ == "__main__":
    run(measure, description="Search: recall, build, rates, memory", options=options)
