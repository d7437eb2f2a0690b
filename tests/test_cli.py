"""The command line through the real console script."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.commands import Stopped, resumable, run_evaluate, run_train
from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.compose import config_groups
from turntree.trainers.config import documented_options
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import read_metrics

SCRIPT = Path(sys.executable).with_name("turntree")
COMMANDS = ("coldstart", "doctor", "evaluate", "model", "quickstart", "sft", "train", "view", "world")
WORLD_GRAMMAR = "env.grammar=turntree.envs.worlds.grammar:WorldGrammar"


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **variables}


def turntree(*arguments: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [SCRIPT, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(**variables),
    )
    assert done.returncode == code, f"exit code {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


# Help -----------------------------------------------------------------------------------------------------------------


def test_help_is_immediate_and_imports_no_torch() -> None:
    probe = (
        "import sys; sys.argv = ['turntree', '--help']\n"
        "from turntree.cli import main; main()\n"
        "print(sorted({'torch', 'transformers', 'hydra', 'torchrl'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.endswith("[]\n")
    assert all(re.search(rf"^  {name} ", done.stdout, re.MULTILINE) for name in COMMANDS)
    seconds = []
    for _ in range(3):  # the best of three: others use the machine too
        start = time.monotonic()
        turntree("--help")
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 1.0


def test_train_help_lists_every_option_with_its_doc() -> None:
    done = turntree("train", "--help")
    text = "".join(done.stdout.split())  # lines also break after a hyphen
    for key, _, doc in documented_options():
        assert f"{key}=" in text
        assert "".join(doc.split()) in text, key
    for group, choices in config_groups().items():
        assert f"{group}{','.join(choices)}" in text


def test_the_list_of_commands_cuts_no_sentence() -> None:
    text = turntree("-h").stdout
    assert "question by question." in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = turntree(command, "-h")
    assert done.stdout.startswith(f"Usage: turntree {command}")
    assert len(done.stdout) > 200


# Mistakes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["trian"], 2, ["No such command 'trian'", "train"]),
        (["world"], 2, ["--out"]),
        (["world", "--out", "w", "--split", "tset"], 2, ["tset", "test"]),
        (["world", "--out", "w", "--questions", "-3"], 1, ["ConfigError", "-3"]),
        (["model", "huge", "--out", "m"], 2, ["huge", "tiny"]),
        (["model", "tiny", "--out", "m", "--head-dim", "33"], 1, ["head_dim", "even"]),
        (["train", "trainer.stepz=3"], 1, ["ConfigError", "trainer.stepz", "Did you mean 'trainer.steps'"]),
        (["train", "algorithm=gpro"], 1, ["ConfigError", "gpro", "grpo"]),
        (["train", "trainer.steps=many"], 1, ["ConfigError", "trainer.steps"]),
        (["evaluate", "seed=[1"], 1, ["ConfigError", "seed=[1"]),
        (["view", "not-there"], 2, ["not-there"]),
        (["view", "."], 1, ["CheckpointError", "not a run folder"]),
    ],
)
def test_mistakes_are_one_message(arguments: list[str], code: int, words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment()
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], r"model\.path is empty.*turntree model tiny"),
        (["model.path=nowhere/at/all"], "nowhere/at/all"),
        (["model.path={model}"], r"env\.questions is empty"),
        (["model.path={model}", "env.questions=nowhere.jsonl"], r"nowhere\.jsonl"),
    ],
)
def test_what_is_missing_is_named(bed: Any, overrides: list[str], words: str) -> None:
    with pytest.raises(TurnTreeError, match=words):
        run_train([o.format(model=bed.model) for o in overrides])


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = turntree("world", "--out", tmp_path / "file" / "world", code=1)
    assert "NotADirectoryError" in done.stderr


# Worlds and models ----------------------------------------------------------------------------------------------------


def test_worlds_are_equal_to_the_byte(tmp_path: Path) -> None:
    for name, hashing in (("a", "1"), ("b", "2")):
        turntree("world", "--out", tmp_path / name, "--seed", "7", "--questions", "20", PYTHONHASHSEED=hashing)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == ["corpus.jsonl", "meta.json", "questions.jsonl"]
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    turntree("world", "--out", tmp_path / "c", "--seed", "8", "--questions", "20")
    assert (tmp_path / "c" / "corpus.jsonl").read_bytes() != (tmp_path / "a" / "corpus.jsonl").read_bytes()


# The whole way --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_a_new_model_to_a_picture(bed: Any, tmp_path: Path) -> None:
    """model, sft, train, evaluate, view, as in the README, with very small numbers."""
    turntree("model", "tiny", "--out", tmp_path / "tiny", "--seed", "0")
    for file in (tmp_path / "tiny").iterdir():
        assert file.read_bytes() == (bed.model / file.name).read_bytes(), "equal seeds give equal bytes"
    common = [
        f"env.questions={bed.world}",
        WORLD_GRAMMAR,
        "search.top_k=1",
        "sampling.max_turn_tokens=16",
        "sampling.max_context_tokens=400",
        "trainer.threads=1",
    ]
    cold = tmp_path / "cold [1]"  # brackets are no markup and no grammar
    small = ["sft.steps=3", "sft.demonstrations=8", "sft.batch_size=4"]
    done = turntree("sft", f"model.path={tmp_path / 'tiny'}", *common, *small, f"out={cold}")
    assert f"model: {cold / 'model'}" in done.stdout

    run = tmp_path / "run"
    small = ["algorithm=at2po", "algorithm.chains=2", "algorithm.rounds=1", "algorithm.expansions=2", "trainer.steps=2"]
    dev = [f"env.dev_questions={bed.world}", "trainer.eval_every=1", "trainer.eval_questions=4"]
    arguments = [*small, f"model.path={cold / 'model'}", *common, *dev, "trainer.prompts_per_step=2", f"out={run}"]
    said = turntree("train", *arguments).stdout.splitlines()
    assert said[0].split()[:5] == ["step", "reward", "right", "valid.", "turns"], "a row a step, also when piped"
    assert [line.split()[0] for line in said[1:3]] == ["1", "2"]
    for name in ("config.yaml", "metrics.jsonl", "report.html", "curve.png", "tree.html", "model/config.json"):
        assert (run / name).is_file(), name
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2]

    questions = f"env.test_questions={bed.world}"
    done = turntree("evaluate", f"model.path={run / 'model'}", questions, *common, f"out={tmp_path / 'eval'}")
    assert re.search(r"EM \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]  F1 .* n=24 failed=0", done.stdout)
    saved = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert (saved["n"], saved["sampling"]["temperature"]) == (24, 0.0)
    assert saved["dialogue"].startswith("dialogue: inline")

    listing = turntree("view", run, "--list").stdout.splitlines()
    assert len(listing) == 4
    assert listing[0].startswith("step 1  --prompt 0  leaves 4  rewards [")
    turntree("view", run, "--step", "1", "--prompt", "1", "--out", tmp_path / "one.html")
    assert "<html" in (tmp_path / "one.html").read_text()
    assert "--prompt 9" in turntree("view", run, "--prompt", "9", code=1).stderr


def small_evaluation(bed: Any, questions: Path) -> list[str]:
    return [f"model.path={bed.model}", f"env.test_questions={questions}", WORLD_GRAMMAR, "sampling.max_turn_tokens=4"]


def test_evaluations_do_not_replace_each_other(bed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        run_evaluate(small_evaluation(bed, bed.world))
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["evaluation", "evaluation-2"]


def test_evaluate_searches_the_corpus_that_is_named(bed: Any, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_bytes((bed.world / "questions.jsonl").read_bytes())
    arguments = [*small_evaluation(bed, questions), f"out={tmp_path / 'out'}"]
    with pytest.raises(ConfigError, match=r"search\.corpus"):
        run_evaluate(arguments)
    run_evaluate([*arguments, f"search.corpus={bed.world / 'corpus.jsonl'}"])
    assert (tmp_path / "out" / "evaluation.json").is_file()


def test_the_hint_to_go_on_can_be_pasted(bed: Any, tmp_path: Path) -> None:
    out = tmp_path / "it's [1]"
    overrides = [*bed.args, f"out={out}", "resume=true", "trainer.steps=1"]
    with pytest.raises(Stopped) as stop, resumable("train", overrides):
        raise KeyboardInterrupt
    words = shlex.split(str(stop.value).partition("go on with: ")[2])
    assert words == ["turntree", "train", *bed.args, f"out={out}", "trainer.steps=1", "resume=true"]


# A user's own rules ---------------------------------------------------------------------------------------------------

OWN = {
    "grammar": ["env.grammar=users_rules:OnlySearch"],
    "reward": ["env.grammar=users_rules:Babble", "reward.name=users_rules:busy"],
    "scorer": ["reward.scorer=users_rules:constant"],
    "credit": ["env.grammar=users_rules:Babble", "reward.name=users_rules:busy", "algorithm.credit=users_rules:halved",
               "algorithm.credit_args.factor=0"],
    "expansion": ["algorithm.expansion=users_rules:root_only", "algorithm.trees=1"],
    "loss": ["env.grammar=users_rules:Babble", "algorithm.objective=users_rules:flat", "algorithm.entropy_coef=0",
             "algorithm.kl_coef=0"],
}  # fmt: skip

CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "grammar": lambda row: row["total/tool_calls"] > 0 == row["tree/answered"],
    "reward": lambda row: 0 < row["critic/rewards/mean"] < 1,
    "scorer": lambda row: row["critic/rewards/mean"] == 0.25,
    "credit": lambda row: row["actor/pg_loss"] == 0 < row["tree/mixed_groups"],
    "expansion": lambda row: row["budget/trajectories"] == 4 * 3,
    "loss": lambda row: row["actor/pg_loss"] >= 7 and row["actor/grad_norm"] == 0,
}


@pytest.mark.parametrize("rule", OWN)
def test_rules_by_import_path(bed: Any, tmp_path: Path, rule: str) -> None:
    base = [a for a in bed.args if not a.startswith(("env.grammar", "reward.name"))]
    run_train([*base, *OWN[rule], "trainer.steps=1", f"out={tmp_path / 'run'}"])
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert CHECKS[rule](row)


def test_a_module_on_the_path_is_all_that_a_rule_needs(bed: Any, tmp_path: Path) -> None:
    """In a process of its own: nothing is edited, installed or registered."""
    base = [a for a in bed.args if not a.startswith(("env.grammar", "reward.name"))]
    own = [*OWN["credit"], *OWN["expansion"], *OWN["scorer"], "trainer.steps=1", f"out={tmp_path / 'run'}"]
    turntree("train", *base, *own, PYTHONPATH=str(bed.rules))
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert CHECKS["scorer"](row)
    assert CHECKS["expansion"](row)


# Ctrl-C and kill ------------------------------------------------------------------------------------------------------


def start(*arguments: str | Path, rules: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=str(rules)),
    )


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def test_ctrl_c_leaves_a_resumable_run_and_says_how_to_go_on(bed: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*bed.args, "trainer.steps=5000", f"out={run}"]
    process = start("train", *arguments, rules=bed.rules)
    wait_for(lambda: lines(run / "metrics.jsonl") >= 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Ctrl-C: stopping after this training step" in errors
    done = read_metrics(run / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {done}; go on with: turntree train " in errors
    assert errors.rstrip().endswith(" resume=true")
    assert "Traceback" not in errors
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    assert load_checkpoint(found).step == done
    run_train([*arguments, "resume=true", f"trainer.steps={done + 1}"])
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, done + 2))


def test_ctrl_c_in_a_cold_start(bed: Any, tmp_path: Path) -> None:
    run = tmp_path / "cold"
    data = [f"model.path={bed.model}", f"env.questions={bed.world}", WORLD_GRAMMAR, "search.top_k=1"]
    small = ["sft.steps=100000", "sft.batch_size=4", "sft.save_every=2", "trainer.threads=1"]
    process = start("sft", *data, *small, f"out={run}", rules=bed.rules)
    wait_for(lambda: any((run / "checkpoints").glob("step-*")), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped; go on with: turntree sft model.path={bed.model}" in errors
    assert errors.rstrip().endswith(" resume=true")
    assert not (run / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_and_resume_is_never_stopped(bed: Any, tmp_path: Path, seed: int) -> None:
    def arguments(out: Path) -> list[str | Path]:
        return [*bed.args, "trainer.steps=8", "trainer.save_every=3", "trainer.epochs=2", f"seed={seed}", f"out={out}"]

    run_train([str(a) for a in arguments(tmp_path / "straight")])
    run = tmp_path / "run"
    process = start("train", *arguments(run), rules=bed.rules)
    wait_for(lambda: lines(run / "metrics.jsonl") >= 2 * seed, process)
    time.sleep(0.05 * seed)
    process.kill()
    process.communicate()
    run_train([*map(str, arguments(run)), "resume=true"])

    def measured(folder: Path) -> list[dict[str, Any]]:
        read = read_metrics(folder / "metrics.jsonl")
        return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read]

    assert measured(run) == measured(tmp_path / "straight")
    for file in ("model/model.safetensors", "trees/step-00000008.jsonl.zst"):
        assert (run / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


@pytest.mark.slow
def test_ctrl_c_in_each_stage_of_the_quickstart(tmp_path: Path) -> None:
    sft = ["sft.steps=20", "sft.save_every=2", "sft.demonstrations=40"]
    rl = ["trainer.steps=3", "trainer.prompts_per_step=4", "trainer.eval_every=0", "trainer.save_every=1"]
    small = [*sft, *rl, "seed=3"]
    run = tmp_path / "run"
    for reached in (
        lambda: any((run / "cold-start" / "checkpoints").glob("step-*")),
        lambda: lines(run / "metrics.jsonl") >= 1,
    ):
        process = start("quickstart", *small, f"out={run}", "resume=true", rules=tmp_path)
        wait_for(reached, process, seconds=300)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "go on with: turntree quickstart " in errors
        assert not (run / "summary.json").exists()
    for out in (run, tmp_path / "straight"):
        done = subprocess.run(
            [SCRIPT, "quickstart", *small, f"out={out}", "resume=true"],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    summaries = [json.loads((out / "summary.json").read_text()) for out in (run, tmp_path / "straight")]
    for key in ("em_before", "em_after", "f1_after", "generated_tokens", "tool_calls", "trajectories"):
        assert summaries[0][key] == summaries[1][key], key
