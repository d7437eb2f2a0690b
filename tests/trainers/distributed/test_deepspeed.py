"""DeepSpeed in real processes: what two ranks do is what one does, and what becomes of a run that loses one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from turntree.errors import CheckpointError
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import read_metrics

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

MakeConfig = Callable[..., RunConfig]
LIMIT_S = 300

WHOLE = (
    "trainer.steps=5",
    "trainer.epochs=2",
    "trainer.prompts_per_update=2",
    "trainer.max_pack_tokens=300",
    "trainer.warmup_steps=3",
    "trainer.eval_every=5",
    "trainer.eval_questions=5",
    "trainer.save_every=1",
    "trainer.max_grad_norm=0.5",
    "algorithm.kl_coef=0.05",
)


@pytest.fixture
def environment(bed: Any) -> dict[str, str]:
    """Of processes that find the bed's rules."""
    return {**os.environ, "PYTHONPATH": str(bed.rules), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def turntree(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "turntree", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)


def assert_near(a: Path, b: Path) -> None:
    """Equal weights, but for the order of additions.

    AdamW divides a gradient by its own size: where that is about its epsilon of 1e-8, rounding shows. So no weight is
    off by more than a fifth of one step of 1e-3, and on the whole they are off by a ten-thousandth of it.
    """
    one, two = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert one.keys() == two.keys()
    gaps = torch.cat([(one[name] - two[name]).abs().flatten() for name in one])
    assert float(gaps.max()) < 2e-4
    assert float(gaps.mean()) < 1e-7


def metrics(run: Path) -> list[dict[str, Any]]:
    # Equal calls of one batch of tools are executed once, and batches are smaller on two ranks.
    clock = (*TIMING, "budget/tool_attempts")
    return [{k: v for k, v in row.items() if not k.startswith(clock)} for row in read_metrics(run / "metrics.jsonl")]


def assert_same(one: Path, two: Path) -> None:
    """Equal counts, equal numbers to 1e-4, equal weights."""
    for a, b in zip(metrics(one), metrics(two), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():  # a mean of nothing is None, and names are lists
            number = isinstance(value, (int, float))
            assert b[key] == (pytest.approx(value, rel=1e-4, abs=1e-4) if number else value), (a["step"], key)
    assert_near(one, two)


# Steps ----------------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "zero-1": {"deepspeed": {"stage": 1}, "head": True},
    "zero-2": {"deepspeed": {"stage": 2}, "max_pack_tokens": 100, "poison": 2},
    "zero-3": {"deepspeed": {"stage": 3}, "head": True, "max_pack_tokens": 100, "poison": 2},
    "offload-2": {"deepspeed": {"stage": 2, "offload_optimizer": True}, "recompute": True, "piece": 7},
    "offload-3": {
        "deepspeed": {"stage": 3, "offload_optimizer": True, "offload_params": True},
        "recompute": True,
        "piece": 7,
        "max_pack_tokens": 100,
    },
    "fewer packs than ranks": {"deepspeed": {"stage": 3}, "trees": 1, "max_pack_tokens": 500},
}


def five_steps(tmp_path: Path, env: dict[str, str], **options: Any) -> dict[str, Any]:
    (tmp_path / "options.json").write_text(json.dumps(options))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(Path(__file__).with_name("steps.py")), str(tmp_path / "options.json"), str(tmp_path / "out.json")]
    done = subprocess.run([*launcher, *script], capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert result["ranks"] == 2
    return result


@pytest.mark.parametrize("name", VARIANTS)
def test_five_steps_of_two_ranks_are_those_of_a_plain_optimiser(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """In float32, with a learning rate of 1e-3; for the bounds see :func:`assert_near`."""
    options = VARIANTS[name]
    found = five_steps(tmp_path, environment, **options)
    assert found["loss"] < 2e-6
    assert found["norm"] < 1e-5
    assert found["weights"] < 2e-4
    assert found["weights_mean"] < 1e-7
    assert found["moments"] < 1e-6
    assert found["skipped"] == ([options["poison"]] if "poison" in options else [])
    assert found["steps"] == 5 - len(found["skipped"])
    assert found["packs"] == {60: 10, 100: 5, 500: 1}[options.get("max_pack_tokens", 60)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_steps_stay_near_a_plain_optimiser(stage: int, tmp_path: Path, environment: dict[str, str]) -> None:
    """DeepSpeed keeps float32 weights beside the bfloat16 ones, so that small steps add up; a plain run rounds them."""
    found = five_steps(tmp_path, environment, deepspeed={"stage": stage}, bf16=True, head=True)
    assert found["loss"] < 0.05
    assert found["weights"] < 0.02


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(bed: Any, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps in one process without DeepSpeed."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(make_config(*WHOLE, f"env.dev_questions={bed.world}", f"out={out}"))
    return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_in_two_ranks_is_the_run_in_one(
    stage: int, straight: Path, bed: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    options = ["trainer.strategy=deepspeed", "trainer.ranks=2", f"deepspeed.stage={stage}", f"out={tmp_path / 'run'}"]
    done = turntree("train", *bed.args, *WHOLE, f"env.dev_questions={bed.world}", *options, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"run folder: {tmp_path / 'run'}" in done.stdout.replace("\n", "")
    assert sum(line.split()[:1] == ["5"] for line in done.stdout.splitlines()) == 1, "one rank speaks"
    assert_same(straight, tmp_path / "run")
    assert evaluation(straight) == evaluation(tmp_path / "run")


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_an_adapter_in_two_ranks_is_the_adapter_of_one(
    recompute: str, bed: Any, make_config: MakeConfig, tmp_path: Path, environment: dict[str, str]
) -> None:
    """LoRA with stage 3, the frozen weights spread over the ranks too; the reference is the model without it."""
    options = [
        "model.lora_rank=4", f"trainer.activation_checkpointing={recompute}", "trainer.steps=2",
        "algorithm.kl_coef=0.05", "trainer.prompts_per_update=2", "trainer.max_pack_tokens=300",
    ]  # fmt: skip
    train(make_config(*options, f"out={tmp_path / 'one'}"))
    spread = ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=3", f"out={tmp_path / 'two'}"]
    done = turntree("train", *bed.args, *options, *spread, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "model" / "adapter" / "adapter_config.json").is_file()


def evaluation(run: Path) -> str:
    return (run / "validation" / "step-000005" / "evaluation.jsonl").read_text()


def test_a_checkpoint_goes_on_with_any_stage_and_number_of_ranks(
    straight: Path, bed: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Two ranks with ZeRO-3, then one with ZeRO-1, then two with ZeRO-2, then a plain process."""
    out = f"out={tmp_path / 'run'}"
    parts: tuple[tuple[int, list[str]], ...] = (
        (2, ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=3"]),
        (3, ["trainer.strategy=deepspeed", "deepspeed.stage=1"]),
        (4, ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=2", "deepspeed.offload_optimizer=true"]),
        (5, []),
    )
    for steps, options in parts:
        arguments = [*bed.args, *WHOLE, f"env.dev_questions={bed.world}", *options, f"trainer.steps={steps}", out]
        done = turntree("train", *arguments, "resume=true", env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_near(straight, tmp_path / "run")
    one, other = moments(straight), moments(tmp_path / "run")
    assert one
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-6), name


def moments(run: Path) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint, without the states of generators."""
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return {name: t for name, t in load_file(found / "state.safetensors").items() if t.is_floating_point()}


def test_sft_in_two_ranks_is_sft_in_one(bed: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    options = [
        f"model.path={bed.model}", f"env.questions={bed.world}", "search.top_k=1", "sft.steps=4", "sft.batch_size=6",
        "env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "sft.demonstrations=12", "trainer.max_pack_tokens=400",
        "sampling.max_context_tokens=1000", "trainer.threads=1",
    ]  # fmt: skip
    spread = ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=3"]
    for name, more in (("one", []), ("two", spread)):
        done = turntree("sft", *options, *more, f"out={tmp_path / name}", env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_near(tmp_path / "one", tmp_path / "two")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[0]["loss_last"] == pytest.approx(summaries[1]["loss_last"], abs=1e-5)


# Ends -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(bed: Any, tmp_path: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A long run in two ranks that has written its first checkpoint."""
    options = ["trainer.strategy=deepspeed", "trainer.ranks=2", "trainer.steps=500", "trainer.save_every=1"]
    command = [sys.executable, "-m", "turntree", "train", *bed.args, *options, f"out={tmp_path / 'run'}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    deadline = time.monotonic() + LIMIT_S
    while latest(tmp_path) is None and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    yield process
    for pid in ranks_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=60)


def latest(tmp_path: Path) -> Path | None:
    return latest_checkpoint(tmp_path / "run" / "checkpoints")


def ranks_of(launcher: int) -> list[int]:
    """Processes of the ranks that a launcher started, in the order of the ranks."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    numbered = []
    for pid in pids:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        numbered += [(int(v[5:]), pid) for v in variables if v.startswith(b"RANK=")]
    return [pid for _, pid in sorted(numbered)]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, f"still there: {pids}"
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_run_with_words_and_it_goes_on_in_one_process(
    running: subprocess.Popen[str], bed: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    pids = ranks_of(running.pid)
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 3
    assert "RankError: rank 1 of 2" in errors
    assert "was killed by signal SIGKILL" in errors
    assert "go on with: turntree train" in errors
    assert "resume=true" in errors
    assert "Traceback" not in errors
    wait_until_gone(pids)
    found = latest(tmp_path)
    assert found is not None
    step = load_checkpoint(found).step
    result = train(make_config(f"trainer.steps={step + 1}", f"out={tmp_path / 'run'}", "resume=true"))
    assert result.progress.step == step + 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_ranks_do_not_outlive_a_killed_launcher(running: subprocess.Popen[str]) -> None:
    pids = ranks_of(running.pid)
    running.kill()
    running.wait(timeout=60)
    wait_until_gone(pids)


def test_ctrl_c_stops_all_ranks_after_the_step(running: subprocess.Popen[str], tmp_path: Path) -> None:
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 130, errors[-2000:]
    assert "go on with" in errors
    found = latest(tmp_path)
    assert found is not None
    assert load_checkpoint(found).step == len(read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_an_error_of_every_rank_is_said_once(bed: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    options = ["trainer.strategy=deepspeed", "trainer.ranks=2", f"out={tmp_path / 'run'}"]
    done = turntree("train", *bed.args, *options, env=environment)
    assert done.returncode == 1
    assert done.stderr.count(CheckpointError.__name__) == 1
    assert "Traceback" not in done.stderr
