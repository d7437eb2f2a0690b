"""The whole job with a scripted teacher: stopped anywhere and gone on with, faults, what may change, what may not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.coldstart.conftest import QUESTIONS, Accident, Stop
from turntree.errors import CheckpointError, ConfigError, DataError
from turntree.trainers.coldstart import Selection, coldstart, read_kept
from turntree.trainers.coldstart.job import Plan
from turntree.trainers.compose import compose
from turntree.trainers.task import Task

MakePlan = Callable[..., Plan]
Run = Callable[..., Selection]

FILES = ("trajectories.jsonl", "kept.jsonl", "dropped.jsonl", "statistics.json", "turns.jsonl")
JUDGE = "coldstart.criterion_args.checker_args={model: x, base_url: 'http://127.0.0.1:9/v1'}"
OPTIONS = ("coldstart.samples=4", "coldstart.keep=2", "coldstart.criterion=f1", "coldstart.min_score=0.1",
           "coldstart.filters.format.corrections=1")  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def asked(engine: Accident) -> Counter[tuple[Any, ...]]:
    return Counter((request.key, request.seed, tuple(request.prefix.token_ids())) for request in engine.requests)


@pytest.fixture
def straight(plan: MakePlan, played_by: Run, tmp_path: Path) -> tuple[dict[str, bytes], Accident]:
    """The files of a run that nothing happened to, and its engine."""
    engine = Accident()
    played_by(engine, plan(*OPTIONS), tmp_path / "straight")
    return files(tmp_path / "straight"), engine


def test_what_is_kept_and_what_is_not(plan: MakePlan, played_by: Run, tmp_path: Path) -> None:
    done = played_by(Accident(), plan(*OPTIONS), tmp_path)
    kept, dropped = rows(tmp_path / "kept.jsonl"), rows(tmp_path / "dropped.jsonl")
    document = json.loads((tmp_path / "statistics.json").read_text())
    assert len(kept) + len(dropped) == document["generated"] == 16
    assert (document["kept"], document["dropped"]) == (len(kept), len(dropped))
    assert document["reasons"] == dict(sorted(Counter(row["reason"] for row in kept + dropped).items()))
    assert {"kept", "min_score"} <= set(document["reasons"])
    assert all(row["score"] >= 0.1 and row["reason"] == "kept" for row in kept)
    assert [(r["question_id"], r["sample"]) for r in kept] == sorted((r["question_id"], r["sample"]) for r in kept)
    assert sum(row["passed"] for row in document["by_question"]) == sum(
        (row["score"] or 0) >= 0.1 for row in kept + dropped
    )
    assert document["numbers"]["tokens"]["all"]["sum"] == document["usage"]["completion_tokens"]
    assert document["usage"]["requests"] == document["numbers"]["turns"]["all"]["sum"]
    assert all(turn["ids"][: len(turn["text"])] == list(turn["text"].encode()) for r in kept for turn in r["turns"])
    assert read_kept(tmp_path) == kept
    assert done.statistics.kept == len(kept)


@pytest.mark.parametrize("at", [1, 2, 5, 9, 14, 20, 26, 30])
def test_a_run_that_ended_anywhere_goes_on_to_the_same_bytes(
    plan: MakePlan, played_by: Run, straight: tuple[dict[str, bytes], Accident], tmp_path: Path, at: int
) -> None:
    wanted, engine = straight
    assert len(engine.requests) > 30
    first = Accident(at)
    with pytest.raises(Stop):
        played_by(first, plan(*OPTIONS), tmp_path / "run")
    second = Accident()
    played_by(second, plan(*OPTIONS), tmp_path / "run")
    assert files(tmp_path / "run") == wanted
    assert asked(first) + asked(second) == asked(engine), "every turn is asked for once, in either of the two"


def test_a_torn_line_is_played_again_and_nothing_else(
    plan: MakePlan, played_by: Run, straight: tuple[dict[str, bytes], Accident], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    played_by(Accident(), plan(*OPTIONS), run)
    for name in ("trajectories.jsonl", "turns.jsonl"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-5])
    again = Accident()
    played_by(again, plan(*OPTIONS), run)
    assert len({request.key[0] for request in again.requests}) == 1
    assert {name: data for name, data in files(run).items() if name not in ("turns.jsonl", "statistics.json")} == {
        name: data for name, data in straight[0].items() if name not in ("turns.jsonl", "statistics.json")
    }


def test_more_samples_and_other_selections_play_only_what_is_new(
    plan: MakePlan, played_by: Run, straight: tuple[dict[str, bytes], Accident], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    few = Accident()
    played_by(few, plan("coldstart.samples=2", "coldstart.questions=3"), run)
    more = Accident()
    played_by(more, plan(*OPTIONS), run)
    assert asked(few) + asked(more) == asked(straight[1])
    assert {n: d for n, d in files(run).items() if n != "turns.jsonl"} == {
        n: d for n, d in straight[0].items() if n != "turns.jsonl"
    }
    none = Accident()
    done = played_by(none, plan("coldstart.samples=4", "coldstart.criterion=format"), run)
    assert not none.requests
    assert done.statistics.criterion == "format"


def test_other_conditions_and_changed_questions_are_refused(plan: MakePlan, played_by: Run, tmp_path: Path) -> None:
    made = plan("coldstart.samples=2")
    played_by(Accident(), made, tmp_path)
    with pytest.raises(CheckpointError, match=r"coldstart\.temperature: 1\.0 there, 0\.5 now"):
        played_by(Accident(), plan("coldstart.samples=2", "coldstart.temperature=0.5"), tmp_path)
    with pytest.raises(CheckpointError, match="seed: 0 there, 5 now"):
        played_by(Accident(), plan("coldstart.samples=2", "seed=5"), tmp_path)
    other = tuple(dataclasses.replace(q, question=f"{q.question} Now?") for q in QUESTIONS)
    slots = tuple(dataclasses.replace(slot, task=other[0]) for slot in made.slots[:2])
    changed = dataclasses.replace(made, task=Task(other, made.core, "questions"), slots=slots)
    with pytest.raises(DataError, match="the questions changed"):
        played_by(Accident(), changed, tmp_path)


def test_failures_are_dropped_counted_and_played_again(plan: MakePlan, played_by: Run, tmp_path: Path) -> None:
    engine = Accident(abort=lambda request: request.key[0].startswith("coldstart/q1/"))
    done = played_by(engine, plan(*OPTIONS), tmp_path)
    assert (done.statistics.failed, done.statistics.generated) == (4, 16)
    failed = [row for row in rows(tmp_path / "dropped.jsonl") if row["reason"] == "failed"]
    assert [row["question_id"] for row in failed] == ["q1"] * 4
    assert all(row["detail"].startswith("abort: ") and row["score"] is None for row in failed)
    again = Accident()
    done = played_by(again, plan(*OPTIONS), tmp_path)
    assert done.statistics.failed == 0
    assert {request.key[0].split("/")[1] for request in again.requests} == {"q1"}


def test_a_dead_engine_leaves_what_was_played(plan: MakePlan, played_by: Run, tmp_path: Path) -> None:
    def fail(request: Any) -> bool:
        return not request.key[0].startswith("coldstart/q0/")

    many = plan("coldstart.samples=40")
    done = played_by(Accident(fail=fail), many, tmp_path)
    assert re.search(r"^Accident failed \d+ requests in a row", done.statistics.stopped)
    assert done.statistics.missing.endswith(f" trajectories were not played, {done.statistics.failed} failed")
    assert done.statistics.unplayed > 0
    assert done.statistics.generated + done.statistics.unplayed == 160
    document = json.loads((tmp_path / "statistics.json").read_text())
    assert document["stopped"] == done.statistics.stopped


def test_the_oracle_gives_the_same_in_a_folder_as_in_memory(make_config: Any, tmp_path: Path) -> None:
    options = ("env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "coldstart.samples=5", "coldstart.keep=2",
               "coldstart.criterion=completeness", "coldstart.filters.duplicate_calls=true")  # fmt: skip
    from turntree.trainers.coldstart.job import make_in_memory, prepare

    config = make_config(*options, f"out={tmp_path / 'run'}")
    written = coldstart(config)
    memory = make_in_memory(prepare(config))
    assert list(memory.rows) == rows(tmp_path / "run" / "kept.jsonl")
    assert list(memory.dropped) == rows(tmp_path / "run" / "dropped.jsonl")
    assert memory.statistics.to_json()["by_question"] == written.statistics.to_json()["by_question"]
    counts = Counter(row["question_id"] for row in memory.rows)
    assert max(counts.values()) == 2, "samples of the oracle differ"
    with pytest.raises(CheckpointError, match="resume=true"):
        coldstart(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["coldstart.keep=2"], r"coldstart\.keep=2 of coldstart\.samples=1"),
        (["coldstart.teacher=engine", "coldstart.samples=2", "coldstart.temperature=0"], "greedy"),
        (["coldstart.model=x"], r"coldstart\.model=x is for coldstart\.teacher=engine"),
        (["coldstart.teacher=nobody"], r"coldstart\.teacher='nobody'"),
        (["coldstart.samples=0"], r"coldstart\.samples=0"),
        (["sft.unfit=skip"], r"sft\.unfit='skip'"),
    ],
)
def test_options_that_do_not_fit(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["coldstart.criterion=completness"], "did you mean 'completeness'"),
        (["coldstart.criterion=em", "coldstart.criterion_args.votes=3"], "votes"),
        (["coldstart.criterion=format", "coldstart.criterion_args.votes=3"], "takes no arguments"),
        (["coldstart.criterion=completeness", "coldstart.criterion_args.vote=3"], "vote"),
        (["coldstart.filters.nothing=true"], "unknown filter"),
        (["coldstart.criterion=completeness", "coldstart.criterion_args.votes=x"], "votes='x'"),
        *(
            (["coldstart.criterion=completeness", "coldstart.criterion_args.checker=llm", *more], message)
            for more, message in (
                ([], "model is empty"),
                (["coldstart.criterion_args.checker_args.model=no/such/folder"], "found none at no/such/folder"),
                (["coldstart.criterion_args.checker_args.modle=x"], "did you mean 'model'"),
                ([JUDGE, "coldstart.criterion_args.votes=0"], "votes=0"),
                ([JUDGE, "coldstart.criterion_args.checker_args.retires=3"], "did you mean 'retries'"),
                ([JUDGE, "coldstart.criterion_args.checker_args.language=fr"], "language of the checker"),
                ([JUDGE, "coldstart.criterion_args.checker_args.prompt=no-such-file"], "no-such-file"),
                ([JUDGE, "coldstart.criterion_args.checker_args.temperature=-1"], "temperature=-1"),
            )
        ),
    ],
)
def test_mistakes_show_before_anything_is_written(
    make_config: Any, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        coldstart(make_config(*options, f"out={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()
