"""The model folder: weights that are whole, a configuration, a tokenizer, enough positions; without torch."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

from turntree.agents.engines.choose import Machine
from turntree.search_backend.machine import available_memory
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor.check import Check, Level

__all__ = ["model", "model_problem"]

_ACTIVATIONS = 4.0
"""Weights, gradients and the two moments of AdamW: what training keeps, in sizes of the weights."""

_MAKE = "turntree model tiny|smollm2 --out DIR"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_MAX_HEADER = 100_000_000
_POSITIONS = "max_position_embeddings"


def model(config: RunConfig, machine: Machine, size: float | None, *, local: bool) -> Check:
    """``model.path`` against what a run loads from it, and against the memory."""
    path = config.model.path
    if not path:
        return Check("model", "ok", "no model.path", "nothing to check" if local else "the server has the model")
    folder = Path(path)
    level: Level = "fail" if local else "note"
    if not folder.exists() and _looks_like_hub(path):
        return _hub(path, fails=local)
    if not folder.is_dir():
        return Check("model", level, path, "no folder with weights", f"correct model.path, or {_MAKE}")
    if problem := model_problem(folder, positions=config.sampling.max_context_tokens):
        return Check("model", level, path, *problem)
    if size is None:
        return Check("model", level, path, "no folder with weights", f"correct model.path, or {_MAKE}")
    return _room(config, machine, size, local=local)


def _room(config: RunConfig, machine: Machine, size: float, *, local: bool) -> Check:
    on_gpu = config.trainer.device.startswith("cuda")
    room = machine.gpu_memory_gb if on_gpu else min(machine.memory_gb, available_memory() / 1e9)
    found = f"{config.model.path}: {size:.3g} GB of weights, {room:.3g} GB of memory"
    smaller = "use a smaller model, or a server"
    if local and room and size > room:
        return Check("model", "fail", found, "larger than the memory", smaller)
    if room and size * _ACTIVATIONS > room:
        do = "`turntree plan` says what fits: model.lora_rank, a smaller model, several GPUs"
        return Check("model", "note", found, "fits for evaluation; training keeps about 4 times as much", do)
    return Check("model", "ok", found, "fits, for training too")


def _looks_like_hub(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def _hub(name: str, *, fails: bool) -> Check:
    """A name at the hub: found among what was downloaded before, or to be downloaded."""
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    there = cache.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    if any(there.glob("*/config.json")):
        return Check("model", "ok", name, f"a name at the hub, downloaded before to {there.parent}")
    offline = any(os.environ.get(v, "").upper() in ("1", "TRUE", "YES", "ON") for v in ("HF_HUB_OFFLINE",))
    if offline:
        do = f"correct model.path, unset HF_HUB_OFFLINE, or {_MAKE}"
        return Check(
            "model", "fail" if fails else "note", name, "no such folder, and HF_HUB_OFFLINE forbids the hub", do
        )
    do = f"correct model.path if a folder was meant; {_MAKE} needs no hub"
    return Check("model", "note", name, "no such folder: read as a name at the hub, which the run downloads", do)


def model_problem(folder: Path, *, positions: int = 0) -> tuple[str, str] | None:
    """What is wrong with a model folder, and what to do; None for one that can be loaded."""
    again = "copy or download the folder again"
    options = _json(folder / "config.json")
    if options is None:
        what = "is damaged" if (folder / "config.json").is_file() else "is missing"
        return f"config.json {what}", f"correct model.path, or {again}"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        pickled = sorted(f.name for kind in ("*.bin", "*.pt", "*.pth") for f in folder.glob(kind))
        if pickled:
            do = "convert them once with model.save_pretrained(folder)"
            return f"{', '.join(pickled[:3])}: pickled weights can run code and are not loaded", do
        return "no folder with weights", f"correct model.path, or {_MAKE}"
    for file in weights:
        if damage := _damage(file):
            return f"{file.name} {damage}", again
    if missing := _missing_shards(folder):
        return f"{', '.join(missing[:3])} of the weights are missing", again
    if "auto_map" in options and not options.get("model_type"):
        return "it brings code of its own, which is never run", "use a model that transformers knows"
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return f"no tokenizer: expected one of {', '.join(_TOKENIZERS)}", "copy it from the model's original folder"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file() and _json(folder / name) is None:
            return f"{name} is damaged", again
    inner = options.get("text_config")
    limit = options.get(_POSITIONS, inner.get(_POSITIONS) if isinstance(inner, dict) else None)
    if isinstance(limit, int) and positions > limit:
        do = f"set it to at most {limit}, or use another model"
        return f"has {limit} positions, fewer than sampling.max_context_tokens={positions}", do
    return None


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _damage(file: Path) -> str:
    """Why a safetensors file is not whole, by its header; '' where it is as long as that says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > min(_MAX_HEADER, size):
                return f"has {size} bytes and no header of safetensors"
            header = json.loads(handle.read(length))
        ends = [row["data_offsets"][1] for name, row in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return f"has {size} bytes and no header of safetensors"
    return "" if size == expected else f"has {size} bytes, expected {expected}: it is cut off or damaged"


def _missing_shards(folder: Path) -> list[str]:
    index = _json(folder / "model.safetensors.index.json")
    names = (index or {}).get("weight_map", {})
    return sorted({str(n) for n in names.values() if not _is_file(folder / str(n))}) if isinstance(names, dict) else []


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, say
        return False
