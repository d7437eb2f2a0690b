"""Passports: plain, comparable, and different wherever results may differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.models import load_tokenizer
from turntree.agents.weights import weights_hash
from turntree.errors import DataError
from turntree.trainers.evaluation.passport import Passport, differences, make_passport, run_passport
from turntree.trainers.task import build_task, eval_sampling


def test_a_passport_survives_json() -> None:
    one = Passport(data={"ids": "x"}, sampling={"stop": ("a",)}, seed=3)
    again = Passport.from_json(json.loads(json.dumps(one.to_json())))
    assert differences(one, again) == []
    with pytest.raises(DataError, match="newer turntree"):
        Passport.from_json({**one.to_json(), "version": 99})
    with pytest.raises(DataError, match="unheard"):
        Passport.from_json({"unheard": 1})


def test_the_gravest_difference_is_first() -> None:
    one = Passport(data={"ids": "x", "file": "a"}, prompt={"hash": "p"}, seed=1, software={"torch": "1"})
    two = Passport(data={"ids": "y", "file": "b"}, prompt={"hash": "q"}, seed=2, software={"torch": "2"})
    assert [(d.key, d.weight) for d in differences(one, two)] == [
        ("data.ids", "breaks"),
        ("prompt.hash", "explains"),
        ("data.file", "notes"),
        ("seed", "notes"),
        ("software.torch", "notes"),
    ]


def passport(config: Any, **data: Any) -> Passport:
    task = build_task(config, load_tokenizer(Path(config.model.path)), split="train")
    sampling = eval_sampling(config, task.core)
    made = run_passport(config, task, split="train", sampling=sampling, dialogue="inline")
    return replace(made, **data) if data else made


def test_a_run_s_passport_names_what_it_depends_on(make_config: Callable[..., Any], bed: Any) -> None:
    found = passport(make_config())
    assert found.data["questions"] == 24
    assert len(found.data["sha256"]) == 64
    assert found.scoring["normalizer"].startswith("squad/")
    assert found.search["index"]
    assert found.prompt["grammar"]
    assert found.prompt["hash"]
    assert found.model["weights"] == weights_hash(bed.model) != ""
    assert {"turntree", "torch", "numpy", "commit"} <= found.software.keys()
    assert passport(make_config()) == found


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("search.args.k1=0.5", "search.index"),
        ("search.top_k=2", "search.top_k"),
        ("env.normalizer=unicode", "scoring.normalizer"),
        ("env.max_turns=3", "rules.max_turns"),
        ("sampling.eval_temperature=0.5", "sampling.temperature"),
        ("seed=4", "seed"),
        ("env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "prompt.grammar"),
    ],
)
def test_each_option_that_matters_is_seen(make_config: Callable[..., Any], override: str, key: str) -> None:
    assert key in [d.key for d in differences(passport(make_config()), passport(make_config(override)))]


def test_the_hash_of_weights_follows_their_bytes(tmp_path: Path) -> None:
    assert weights_hash("") == weights_hash(tmp_path) == ""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a" * 3_000_000)
    before = weights_hash(tmp_path)
    file.write_bytes(b"a" * 2_999_999 + b"b")
    assert weights_hash(tmp_path) != before


def test_encoders_are_found_behind_whatever_stands_in_front(make_config: Callable[..., Any]) -> None:
    class Encoder:
        fingerprint = "enc"

    class Dense:
        fingerprint, encoder = "dense", Encoder()

    class Hybrid:
        fingerprint, parts = "hybrid", {"dense": Dense(), "words": object()}

    class Front:
        fingerprint, backend = "front", Hybrid()

    config = make_config()
    task = build_task(config, load_tokenizer(Path(config.model.path)), split="train")
    core: Any = task.core
    core.tools = {**core.tools, "search": replace(core.tools["search"], backend=Front())}
    made = make_passport(config, core, data={}, sampling={}, model={})
    assert (made.search["index"], made.search["encoder"]) == ("front", "enc")
