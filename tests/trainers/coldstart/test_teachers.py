"""Real teachers: a server over loopback, the policy itself, the oracle; killed, out of money, and learnt from."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turntree.agents.models import load_model
from turntree.errors import ConfigError, EngineError
from turntree.trainers.coldstart import cold_start, coldstart, demonstrations, read_kept
from turntree.trainers.learner import train
from turntree.trainers.rollout import Prompt
from turntree.trainers.run_folder import read_metrics

SCRIPT = Path(sys.executable).with_name("turntree")
WORLD = "env.grammar=turntree.envs.worlds.grammar:WorldGrammar"
FILES = ("trajectories.jsonl", "kept.jsonl", "dropped.jsonl")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def served(server: Any, *more: str) -> list[str]:
    return ["coldstart.teacher=engine", "engine=openai", f"engine.base_url={server.url}", "engine.model=tiny",
            "engine.max_concurrent_requests=2", "coldstart.questions=8", "coldstart.samples=2", *more]  # fmt: skip


def killed_after(lines: int, arguments: list[str], run: Path, rules: Path) -> None:
    """``turntree coldstart`` in a process of its own, killed once its journal has so many lines."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(rules)}
    command = [str(SCRIPT), "coldstart", *arguments, f"out={run}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    journal, deadline = run / "trajectories.jsonl", time.monotonic() + 120
    while not (journal.is_file() and journal.read_bytes().count(b"\n") >= lines):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "nothing was played"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, "it was done before it could be killed"


def asked(server: Any) -> Counter[str]:
    return Counter(json.dumps(request["body"], sort_keys=True) for request in server.log())


def check_kill(bed: Any, make_config: Any, openai_server: Any, tmp_path: Path, *, lines: int) -> None:
    options = served(openai_server)
    openai_server.faults()
    coldstart(make_config(*options, f"out={tmp_path / 'straight'}"))
    wanted = asked(openai_server)
    run = tmp_path / "run"
    openai_server.faults()
    killed_after(lines, [*bed.args, *options], run, bed.rules)
    done = coldstart(make_config(*options, f"out={run}", "resume=true"))
    found = asked(openai_server)
    assert set(found) == set(wanted)
    assert found.total() - wanted.total() <= 2, "only what was in flight is asked for again"
    for name in FILES:
        assert (run / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name
    usage = done.statistics.usage
    assert wanted.total() <= usage["requests"] <= found.total()


def test_kill_9_and_go_on_with_a_server_as_teacher(
    bed: Any, make_config: Any, openai_server: Any, tmp_path: Path
) -> None:
    check_kill(bed, make_config, openai_server, tmp_path, lines=3)


@pytest.mark.slow
@pytest.mark.parametrize("lines", [1, 6, 10, 14])
def test_kill_9_at_other_times(bed: Any, make_config: Any, openai_server: Any, tmp_path: Path, lines: int) -> None:
    check_kill(bed, make_config, openai_server, tmp_path, lines=lines)


def test_a_cost_limit_stops_and_going_on_pays_the_rest(make_config: Any, openai_server: Any, tmp_path: Path) -> None:
    prices = ["openai.prompt_price=1000", "openai.completion_price=1000", f"out={tmp_path / 'run'}"]
    openai_server.faults()
    config = make_config(*served(openai_server, *prices, "openai.max_cost=1.0"))
    some = coldstart(config).statistics
    assert "max_cost=1" in some.stopped
    assert 0 < some.generated < 16
    assert some.unplayed == 16 - some.generated
    assert some.usage["cost"] >= 1.0
    assert some.usage["requests"] == len(openai_server.log())
    priced = some.usage["prompt_tokens"] + some.usage["completion_tokens"]
    assert some.usage["cost"] == pytest.approx(priced / 1000)
    same = coldstart(dataclasses.replace(config, resume=True)).statistics
    assert same.usage["requests"] == some.usage["requests"], "what was spent counts when it goes on"
    richer = dataclasses.replace(config, resume=True, openai=dataclasses.replace(config.openai, max_cost=1e6))
    done = coldstart(richer).statistics
    assert (done.stopped, done.unplayed, done.generated) == ("", 0, 16)
    assert done.usage["requests"] == len(openai_server.log())


def test_the_student_learns_a_chat_teachers_texts_in_its_own_tokens(
    bed: Any, make_config: Any, openai_server: Any, tmp_path: Path
) -> None:
    openai_server.faults(*[{"kind": "say", "text": "<think> so </think> <answer> Remo Kenu </answer>"}] * 4)
    options = served(openai_server, WORLD, "coldstart.questions=2", "coldstart.criterion=format", "sft.steps=2",
                     "sft.batch_size=2", "sft.warmup_steps=0", f"out={tmp_path / 'run'}")  # fmt: skip
    done = cold_start(make_config(*options))
    assert done.demonstrations == 2
    kept = read_kept(tmp_path / "run")
    assert {turn["text"] for row in kept for turn in row["turns"]} == {
        "<think> so </think> <answer> Remo Kenu </answer>"
    }
    assert "vocabulary" not in kept[0], "a chat server gives no token ids"
    model = load_file(done.model / "model.safetensors")
    assert any(not torch.equal(t, model[n]) for n, t in load_file(bed.model / "model.safetensors").items())
    dropped = rows(tmp_path / "run" / "coldstart" / "dropped.jsonl")
    assert [row["reason"] for row in dropped] == ["same", "same"]


def test_the_policy_teaches_itself_with_its_own_tokens(bed: Any, make_config: Any, tmp_path: Path) -> None:
    options = ["coldstart.teacher=engine", "coldstart.samples=4", "coldstart.keep=2", "coldstart.questions=6",
               "sft.steps=2", "sft.batch_size=2", "coldstart.filters.length.max_turns=3"]  # fmt: skip
    done = cold_start(make_config(*options, f"out={tmp_path / 'run'}"))
    kept = read_kept(tmp_path / "run")
    assert done.demonstrations == len(kept) > 0
    _, tokenizer = load_model(bed.model)
    assert all(tokenizer.decode(turn["ids"]).startswith(turn["text"]) for row in kept for turn in row["turns"])
    from turntree.agents.dialogue import Dialogue
    from turntree.trainers.coldstart.student import Student

    student = Student.of(make_config(), Dialogue(tokenizer))
    group = student.group(kept[0], uid="x")
    learnt = [node.turn_ids for node in group.trees[0].leaves()[0].trajectory()]
    assert learnt == [tuple(turn["ids"]) for turn in kept[0]["turns"] if turn["action"] != "invalid"]
    # The same trajectories from their file give the same model.
    again = cold_start(make_config("sft.steps=2", "sft.batch_size=2", f"sft.data={tmp_path / 'run'}",
                                   f"out={tmp_path / 'file'}", "env.questions=''"))  # fmt: skip
    first, second = (load_file(one.model / "model.safetensors") for one in (done, again))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_another_model_is_the_teacher(bed: Any, make_config: Any, tmp_path: Path) -> None:
    from turntree.trainers.quickstart import write_tiny_model

    other = write_tiny_model(tmp_path / "other", seed=5)
    asks = ["coldstart.teacher=engine", "coldstart.questions=4", "model.path=''"]
    coldstart(make_config(*asks, f"coldstart.model={other}", f"out={tmp_path / 'other-run'}"))
    coldstart(make_config(*asks, f"coldstart.model={bed.model}", f"out={tmp_path / 'own-run'}"))
    texts = [[t["text"] for r in read_kept(tmp_path / f"{n}-run") for t in r["turns"]] for n in ("other", "own")]
    assert texts[0] != texts[1]


def test_a_stopped_teacher_is_not_learnt_from(make_config: Any, openai_server: Any, tmp_path: Path) -> None:
    openai_server.faults()
    options = served(openai_server, "openai.prompt_price=1000", "openai.max_cost=0.2", f"out={tmp_path / 'run'}")
    with pytest.raises(EngineError, match=r"were not played: .*max_cost.*sft\.data="):
        cold_start(make_config(*options))
    assert not (tmp_path / "run" / "model").exists()


# algorithm.source=teacher


def test_the_trainer_learns_from_a_kept_file(make_config: Any, bed: Any, tmp_path: Path) -> None:
    cold = ["coldstart.samples=3", "coldstart.criterion=completeness", "coldstart.min_score=1", "coldstart.keep=2"]
    coldstart(make_config(WORLD, *cold, f"out={tmp_path / 'cold'}"))
    kept = {row["question_id"] for row in read_kept(tmp_path / "cold")}
    file = f"sft.data={tmp_path / 'cold' / 'kept.jsonl'}"
    result = train([*bed.args, WORLD, "algorithm=sft", file, "trainer.steps=2", f"out={tmp_path / 'run'}",
                    "trainer.prompts_per_step=24", "reward.name=em"])  # fmt: skip
    assert result.progress.updates == 2
    (first, _) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert first["budget/dropped_groups"] == 24 - len(kept), "questions of which nothing is kept teach nothing"
    assert first["budget/generated_tokens"] == 0


def test_rejection_sampling_of_the_policy_by_a_criterion(bed: Any, tmp_path: Path) -> None:
    """``algorithm=rft`` with best of N: the policy's present weights play, the criterion chooses."""
    result = train([*bed.args, "algorithm=rft", "algorithm.source=teacher", "algorithm.chains=1",
                    "coldstart.teacher=engine", "coldstart.samples=4", "coldstart.keep=2",
                    "coldstart.filters.answered=true", f"out={tmp_path / 'run'}"])  # fmt: skip
    assert result.progress.updates >= 1
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert row["budget/trajectories"] == 16
        assert row["budget/generated_tokens"] > 0
    assert result.progress.generated_tokens > 0


def test_another_teacher_does_not_play_inside_a_training(make_config: Any, bed: Any) -> None:
    from turntree.trainers.build import build_bench
    from turntree.trainers.task import build_task

    config = make_config("coldstart.teacher=engine", f"coldstart.model={bed.model}")
    bench = build_bench(make_config())
    task = build_task(make_config(), bench.tokenizer)
    with pytest.raises(ConfigError, match=r"samples from the policy itself.*sft\.data"):
        demonstrations([Prompt("0", task.questions[0])], task.core, bench.dialogue, config, engine=bench.engine)


# A split agent


def test_a_planner_is_taught_by_the_oracle_and_by_itself(make_config: Any, tmp_path: Path) -> None:
    split = [WORLD, "agent=planner_summarizer", "agent.summarizer=rule", "reward.name=em"]
    done = coldstart(make_config(*split, "coldstart.criterion=completeness", f"out={tmp_path / 'oracle'}"))
    assert done.statistics.kept == 24
    kept = read_kept(tmp_path / "oracle")
    assert all(row["turns"][-1]["action"] not in ("answer", "invalid") for row in kept), "a planner does not answer"
    own = [*split, "coldstart.teacher=engine", "coldstart.questions=4", f"out={tmp_path / 'own'}"]
    asked = coldstart(make_config(*own, "coldstart.criterion=f1"))
    assert asked.statistics.generated == 4
    assert asked.statistics.reasons["unscored"] == 0, "the summariser wrote the answers that F1 reads"
    learnt = cold_start(
        make_config(*split, f"sft.data={tmp_path / 'oracle'}", "sft.steps=1", f"out={tmp_path / 'sft'}")
    )
    assert learnt.demonstrations == 24
