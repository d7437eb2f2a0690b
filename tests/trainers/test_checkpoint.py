"""Checkpoints restore bit for bit, and nothing that goes wrong while one is written costs an older one."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from turntree.errors import CheckpointError
from turntree.trainers import checkpoint
from turntree.trainers.checkpoint import (
    best_checkpoint,
    config_fingerprint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    save_checkpoint,
)
from turntree.trainers.tensor_json import decode, encode


class Bench:
    """A small run: dropout draws from torch's global stream, data from its own two generators."""

    def __init__(self, make_optimizer: Callable[[Any], torch.optim.Optimizer], *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        groups = [{"params": self.first.parameters(), "lr": 0.01}, {"params": self.model[3].parameters()}]
        self.optimizer = make_optimizer(groups)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.torch_rng = torch.Generator().manual_seed(seed)
        self.numpy_rng = np.random.default_rng(seed)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            data = torch.randn(6, 4, generator=self.torch_rng) + float(self.numpy_rng.normal())
            loss = self.model(data).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    @property
    def generators(self) -> dict[str, torch.Generator | np.random.Generator]:
        return {"data": self.torch_rng, "shift": self.numpy_rng}

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        options = {"state": {"step": step}, **options}
        return save_checkpoint(
            folder,
            step,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            generators=self.generators,
            **options,
        )

    def load(self, path: Path) -> checkpoint.Loaded:
        return load_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            generators=self.generators,
        )


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), weight_decay=0.01, amsgrad=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_equals_never_stopped(tmp_path: Path, name: str) -> None:
    run = Bench(OPTIMIZERS[name])
    run.train(3)
    path = run.save(tmp_path, 3)
    expected = run.train(5)
    resumed = Bench(OPTIMIZERS[name], seed=99)
    resumed.train(1)
    assert resumed.load(path).step == 3
    assert resumed.train(5) == expected
    for (key, a), b in zip(run.model.state_dict().items(), resumed.model.state_dict().values()):
        assert torch.equal(a, b), key


def test_files_are_safetensors_and_json(tmp_path: Path) -> None:
    run = Bench(adamw)
    path = run.save(tmp_path, 3)
    assert path.name == "step-00000003"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(run.model.state_dict())
    assert set(json.loads((path / "manifest.json").read_bytes())["files"]) == {
        "model.safetensors",
        "state.json",
        "state.safetensors",
    }


# State of any shape ---------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(
            st.text() | st.integers() | st.sampled_from(["$tuple", "$dict", "$tensor"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(values)
def test_any_plain_state_comes_back_with_its_types(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = json.loads(json.dumps(encode(value, "", tensors), allow_nan=False))
    assert repr(decode(encoded, tensors)) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 2),
        torch.tensor([float("nan"), -0.0]),
        torch.arange(6).reshape(2, 3).T,
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ],
)
def test_tensors_in_state_keep_shape_type_and_bits(tmp_path: Path, tensor: torch.Tensor) -> None:
    run = Bench(adamw)
    path = run.save(tmp_path, 1, state={"a": tensor, "b": [tensor]})
    state = load_checkpoint(path).state
    for back in (state["a"], state["b"][0]):
        assert back.dtype == tensor.dtype
        assert torch.equal(torch.nan_to_num(back), torch.nan_to_num(tensor))
        assert back.shape == tensor.shape


def test_arrays_and_numpy_scalars(tmp_path: Path) -> None:
    run = Bench(adamw)
    array = np.arange(4, dtype=np.int32)[::-1]
    state = load_checkpoint(run.save(tmp_path, 1, state={"a": array, "n": np.float64(0.1)})).state
    assert isinstance(state["a"], np.ndarray)
    np.testing.assert_array_equal(state["a"], array)
    assert state["n"] == 0.1


def test_what_cannot_be_stored_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    run = Bench(adamw)
    with pytest.raises(CheckpointError, match=r"/state/a/1 is a object"):
        run.save(tmp_path, 1, state={"a": [1, object()]})
    assert list(tmp_path.iterdir()) == []


# Tied weights ---------------------------------------------------------------------------------------------------------


def tiny_llama(*, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    make: Any = LlamaForCausalLM
    return make(config)


def test_tied_weights_are_saved_once_under_the_hugging_face_name(tmp_path: Path) -> None:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=optimizer, state={})
    with safe_open(path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    other = tiny_llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    load_checkpoint(path, model=other)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dict(other.named_parameters())[name]), name
    assert other.lm_head.weight is other.model.embed_tokens.weight


def test_transformers_reads_the_model_file(tmp_path: Path) -> None:
    model = tiny_llama()
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), state={})
    model.config.save_pretrained(path)
    back = type(model).from_pretrained(path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key


def test_views_of_one_storage_that_are_not_tied(tmp_path: Path) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            storage = torch.arange(6.0)
            self.register_buffer("front", storage[:3])
            self.register_buffer("back", storage[2:])
            self.register_buffer("line", storage)
            self.register_buffer("grid", storage.view(2, 3))
            self.weight = nn.Parameter(torch.ones(1))

    model = Views()
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), state={})
    other = Views()
    other.get_buffer("line").zero_()
    load_checkpoint(path, model=other)
    assert other.get_buffer("grid").tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = Bench(adamw).save(tmp_path, 1)
    other = nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 1))
    before = {key: tensor.clone() for key, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError, match="another model"):
        load_checkpoint(path, model=other)
    assert all(torch.equal(before[key], tensor) for key, tensor in other.state_dict().items())


def test_a_generator_that_was_not_saved(tmp_path: Path) -> None:
    path = Bench(adamw).save(tmp_path, 1)
    other = Bench(adamw, seed=5)
    before = other.first.weight.clone()
    with pytest.raises(CheckpointError, match="'new'"):
        load_checkpoint(path, model=other.model, generators={"new": torch.Generator()})
    assert torch.equal(before, other.first.weight)


def test_another_optimizer_or_a_scheduler_too_many(tmp_path: Path) -> None:
    run = Bench(adamw)
    path = save_checkpoint(tmp_path, 1, model=run.model, optimizer=run.optimizer, state={})
    with pytest.raises(CheckpointError, match="no scheduler"):
        load_checkpoint(path, scheduler=run.scheduler)
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        load_checkpoint(path, optimizer=torch.optim.SGD(run.model.parameters()))


# Newest, best, kept ---------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir())


def test_keep_removes_the_oldest_but_never_the_best(tmp_path: Path) -> None:
    run = Bench(adamw)
    mark_best(run.save(tmp_path, 1, keep=2), metric="em", value=0.5)
    for step in (2, 3, 4):
        run.save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000001", "step-00000003", "step-00000004"]
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert load_checkpoint(best).step == 1
    mark_best(tmp_path / "step-00000004", metric="em", value=0.6)
    run.save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_line_that_was_given_up_goes_first(tmp_path: Path) -> None:
    run = Bench(adamw)
    for step in (10, 20, 30):
        run.save(tmp_path, step)
    run.save(tmp_path, 11, keep=2)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]


def test_without_keep_everything_stays(tmp_path: Path) -> None:
    run = Bench(adamw)
    for step in range(3):
        run.save(tmp_path, step)
    assert len(names(tmp_path)) == 3
    with pytest.raises(CheckpointError, match="at least 1"):
        run.save(tmp_path, 4, keep=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    run = Bench(adamw)
    run.save(tmp_path, 2)
    run.save(tmp_path, 3, state={"try": 1})
    run.save(tmp_path, 3, state={"try": 2})
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).state == {"try": 2}
    assert len(names(tmp_path)) == 2


def test_no_checkpoint(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    assert best_checkpoint(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        load_checkpoint(tmp_path)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = Bench(adamw)
    good, newest = run.save(tmp_path, 1), run.save(tmp_path, 2)
    damage(newest / name)
    if name == "manifest.json" and damage is not Path.unlink:
        (newest / name).write_bytes((newest / name).read_bytes()[:40])
    with pytest.warns(UserWarning, match="step-00000002"):
        assert latest_checkpoint(tmp_path) == good
    with pytest.raises(CheckpointError):
        load_checkpoint(newest)


def test_partial_folders_are_ignored_silently(tmp_path: Path) -> None:
    run = Bench(adamw)
    good = run.save(tmp_path, 1)
    shutil.copytree(good, tmp_path / ".step-00000002.tmp")
    (tmp_path / ".deleted-step-00000000").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_checkpoint(tmp_path) == good
    run.save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = Bench(adamw).save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema": 9}))
    with pytest.raises(CheckpointError, match="schema 9, this version reads 1"):
        load_checkpoint(path)


# The configuration ----------------------------------------------------------------------------------------------------


def test_a_changed_configuration_is_refused_key_by_key(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "algorithm": {"name": "at2po", "clip": 0.2, "layers": (1, 2)},
        "model": {"path": "m", "dtype": "bf16"},
    }
    sections = ["algorithm", "model.path", "absent"]
    fingerprint = config_fingerprint(config, sections)
    assert fingerprint == {
        "algorithm.name": "at2po",
        "algorithm.clip": 0.2,
        "algorithm.layers": [1, 2],
        "model.path": "m",
    }
    run = Bench(adamw)
    path = run.save(tmp_path, 1, fingerprint=fingerprint)
    load_checkpoint(path, fingerprint=fingerprint)
    changed = {"algorithm": {**config["algorithm"], "clip": 0.3, "kl": 0.1}, "model": {"path": "m", "dtype": "fp32"}}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, fingerprint=config_fingerprint(changed, sections))
    message = str(error.value)
    assert "algorithm.clip: 0.2 there, 0.3 now" in message
    assert "algorithm.kl: None there, 0.1 now" in message
    assert "dtype" not in message


# Violence -------------------------------------------------------------------------------------------------------------

KILLER = """
import os, signal, sys, time
import torch
from torch import nn
from turntree.trainers.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint

torch.set_num_threads(1)
folder = sys.argv[1]
model = nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 300)).sum().backward()
optimizer.step()


def save(step):
    with torch.no_grad():
        model.weight.fill_(step)
    save_checkpoint(folder, step, model=model, optimizer=optimizer, state={"step": step}, keep=1)


save(1)
for i, moment in enumerate(map(float, sys.argv[2:])):
    start = load_checkpoint(latest_checkpoint(folder)).step
    saved, report = os.pipe()
    child = os.fork()
    if child == 0:
        for step in range(start + 1, start + 10_000):
            save(step)
            os.write(report, b".")
    os.close(report)
    if i % 2:  # in every other round the first save is over, however slow the machine
        os.read(saved, 1)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(saved)
    loaded = load_checkpoint(latest_checkpoint(folder), model=model, optimizer=optimizer)
    whole = bool((model.weight == loaded.step).all()) and loaded.state == {"step": loaded.step}
    print(start, loaded.step, whole)
"""


def test_kill_leaves_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    """Kill -9 at seeded moments, between and inside saves, with only one checkpoint kept."""
    moments = np.random.default_rng(8).uniform(0.001, 0.08, size=12)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", KILLER, str(tmp_path), *map(str, moments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert all(int(step) >= int(start) and whole == "True" for start, step, whole in rows)
    assert all(int(step) > int(start) for start, step, _ in rows[1::2])


def test_the_fingerprint_of_floats_survives_json() -> None:
    fingerprint = config_fingerprint({"a": {"x": 0.1 + 0.2, "y": math.inf}}, ["a"])
    saved = json.loads(json.dumps(fingerprint, allow_nan=False))
    checkpoint.check_fingerprint(saved, fingerprint, source=Path())
