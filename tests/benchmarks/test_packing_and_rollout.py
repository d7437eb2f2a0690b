"""The scripts on packed training and on rollout, with models so small that only their arithmetic is tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.benchmarks.scripts import script

FOLDER = Path(__file__).parents[2] / "benchmarks"


packing = script("packing")
rollout = script("rollout")
shapes = script("_shapes")

TINY = Namespace(quick=True, hidden=64, layers=1, threads=1)
SHAPE = shapes.Shape("small", 1, 3, 1, 2, shapes.SHAPES[1].rule, shapes.Lengths(40).scaled(0.1))


def test_every_mode_gives_the_same_log_probs_of_the_same_occurrences() -> None:
    model = shapes.decoder(TINY)
    found = [way(model) for way in packing._prepare(SHAPE, 0).values()]
    assert all(len(logp) == len(found[0]) > 0 for logp in found)
    assert max(float((logp - found[0]).abs().max()) for logp in found) < 1e-5
    gaps = {figure.name: figure for figure in packing._exactness(TINY, SHAPE)}
    assert all(figure.met for figure in gaps.values())


def test_the_ideal_counts_each_token_once() -> None:
    group = shapes.grow_group(SHAPE, 0, vocabulary=packing.VOCABULARY)
    sizes = packing._sizes(SHAPE, 0)
    chains = shapes.chains_of(group)
    assert len(chains) == len(list(group.scored_leaves()))
    assert 1.0 < sizes["flat"] < sizes["padded"]


def test_the_targets_stand_at_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packing.TARGETS, "small", 2.6)
    figures = {f.name: f for f in packing._times(TINY, SHAPE, (0,), 1)}
    assert figures["small: packed against padded rows, full logits"].target == 2.6
    assert figures["small: share of the ideal"].target == 0.9


def test_branches_agree_in_every_way_and_a_bounded_cache_changes_nothing() -> None:
    model = rollout._model(TINY)
    figures = [*rollout._branches(model, 120, tokens=4, rounds=1), *rollout._eviction(model)]
    exact = [figure for figure in figures if figure.target == 0.0]
    assert len(exact) == 3
    assert all(figure.met for figure in exact)
    assert [f.target for f in figures if "in one batch" in f.name] == [2.5]


@pytest.mark.slow
def test_the_rollout_script_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    script = str(FOLDER / "rollout.py")
    command = [sys.executable, script, "--quick", "--hidden", "64", "--layers", "1", "--json", str(out)]
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(out.read_text())["figures"]) == 13
