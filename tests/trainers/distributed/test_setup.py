"""Options of several ranks: what goes together, what is said of what does not, what is started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from turntree.errors import ConfigError, MissingExtraError
from turntree.trainers.compose import compose
from turntree.trainers.deepspeed_config import DeepSpeedConfig
from turntree.trainers.distributed import ALONE, launch, setup
from turntree.trainers.distributed.launch import is_first_rank, starts_ranks
from turntree.trainers.distributed.ranks import world_size
from turntree.trainers.distributed.setup import join_run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.ranks=2"], "trainer.ranks=2 needs trainer.strategy=deepspeed"),
        (["trainer.strategy=depspeed"], "Did you mean 'deepspeed'"),
        (["trainer.strategy=deepspeed", "trainer.ranks=0"], "trainer.ranks=0 is out of range"),
        (["deepspeed.stage=4"], "deepspeed.stage=4: expected 1, 2 or 3"),
        (["deepspeed.offload_params=true"], "set it to 3"),
        (["deepspeed.timeout_s=0"], "seconds above 0"),
        (["deepspeed.args.gradient_clipping=1"], "decided by trainer.max_grad_norm"),
        (["deepspeed.args.bf16.enabled=true"], "decided by model.dtype"),
        (["deepspeed.args.zero_optimization.stage=3"], "decided by deepspeed.stage"),
    ],
)
def test_options_that_do_not_fit_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


def test_one_process_without_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    config = compose([])
    assert join_run(config) == (config, ALONE)
    assert world_size({}) == 1
    with pytest.raises(ConfigError, match="WORLD_SIZE='two': expected a number"):
        world_size({"WORLD_SIZE": "two"})


def test_several_processes_need_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"2 processes were started, but trainer.strategy=single"):
        join_run(compose([]))
    spread = "trainer.strategy=deepspeed"
    with pytest.raises(ConfigError, match=r"trainer.ranks=4, but this process is one of 2"):
        join_run(compose([spread, "trainer.ranks=4"]))
    with pytest.raises(ConfigError, match=r"2 ranks, and engine=vllm_server would be sent the weights by every rank"):
        join_run(compose([spread, "engine=vllm_server"]))
    with pytest.raises(ConfigError, match=r"2 ranks, and algorithm.adaptive moves budgets"):
        join_run(compose([spread, "algorithm.adaptive=0.5", "algorithm.budget_leaves=8"]))


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turntree\[deepspeed\]'"):
        join_run(compose(["trainer.strategy=deepspeed"]))


def test_a_command_starts_ranks_only_where_no_launcher_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert [starts_ranks(n) for n in (None, 1, 2)] == [False, False, True]
    assert is_first_rank()
    monkeypatch.setenv("RANK", "1")
    assert not starts_ranks(2)
    assert not is_first_rank()


def test_packages_of_ranks_are_light() -> None:
    """The command line imports the launcher: neither torch nor DeepSpeed may come with it."""
    check = "import sys, turntree.cli; sys.exit(any(m in sys.modules for m in ('torch', 'deepspeed', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_the_obituary_has_the_last_words(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("\n".join(f"line {i}" for i in range(40)))
    failing = [sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(failing, stdin=subprocess.PIPE) as process:
        process.wait(timeout=60)
    said = launch._obituary(launch._Rank(1, process, log), 2)
    assert "rank 1 of 2" in said
    assert "exit code 7" in said
    assert "line 39" in said
    assert "line 20" not in said


def test_deepspeeds_own_configuration() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("deepspeed")
    from turntree.trainers.distributed.deepspeed import deepspeed_config

    options = DeepSpeedConfig(
        stage=3, offload_optimizer=True, offload_params=True, args={"zero_optimization": {"overlap_comm": True}}
    )
    made = deepspeed_config(options, ranks=4, clip=0.5, dtype=torch.bfloat16, device="cpu", parameters=1500)
    assert (made["train_batch_size"], made["gradient_accumulation_steps"], made["gradient_clipping"]) == (4, 1, 0.5)
    assert made["bf16"] == {"enabled": True}
    zero = made["zero_optimization"]
    assert (zero["stage"], zero["overlap_comm"], zero["reduce_bucket_size"]) == (3, True, 2048)
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
