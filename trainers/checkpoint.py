"""Checkpoints: atomic folders of safetensors and JSON, checked before they are trusted.

A checkpoint ``step-00000010/`` holds ``model.safetensors`` (the model's own parameter names), ``state.safetensors``
and ``state.json`` (optimizer, scheduler, generators, the caller's state) and ``manifest.json`` (sizes and sha256 of the
others). It is written beside, flushed to disk and renamed, so a folder of that name is always complete; nothing in it
is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from turntree.errors import CheckpointError
from turntree.trainers.atomic import sync_file, sync_folder, write_json
from turntree.trainers.fingerprint import check_fingerprint, config_fingerprint
from turntree.trainers.tensor_json import decode, encode
from turntree.trainers.tied_weights import without_copies

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "SCHEMA",
    "Loaded",
    "best_checkpoint",
    "check_fingerprint",
    "config_fingerprint",
    "latest_checkpoint",
    "load_checkpoint",
    "load_state",
    "load_weights",
    "mark_best",
    "resumable_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]

SCHEMA = 1
"""Version of the folder's layout."""

Generators: TypeAlias = "Mapping[str, torch.Generator | np.random.Generator]"

_WITHOUT_DIGEST = {"schema", "step", "files", "tied", "fingerprint"}
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_MODEL, _STATE, _TENSORS, _MANIFEST, _BEST = (
    "model.safetensors",
    "state.json",
    "state.safetensors",
    "manifest.json",
    "best.json",
)


class Stateful(Protocol):
    """What an optimizer or scheduler offers."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a checkpoint gave back beside the objects restored in place."""

    path: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: Stateful,
    state: Mapping[str, Any],
    scheduler: Stateful | None = None,
    generators: Generators | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a complete checkpoint of ``step`` into ``folder`` and return its path.

    ``state`` holds JSON-able data, tuples, tensors and arrays; ``generators`` the random streams to continue (torch's
    global CPU and CUDA streams, which dropout draws from, are always kept). ``fingerprint``: see
    :func:`config_fingerprint`. ``keep``: how many of the newest to keep; older ones go only once the new one is
    complete, and the one marked best never goes.

    Raises :class:`CheckpointError` when it cannot be written (disk full); older checkpoints are then untouched.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(f"keep must be at least 1, found {keep}; None keeps every checkpoint")
    folder = Path(folder)
    payload = {
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "generators": _generator_states(generators or {}),
        "state": dict(state),
    }
    temporary = folder / f".step-{step:08d}.tmp"
    try:
        _write_files(temporary, step, model, payload, fingerprint)
        final = _free_name(folder, step)
        temporary.rename(final)
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder} ({error}); older checkpoints are untouched. "
            "Free some space or choose another folder, then resume"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, final, keep)
    return final


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint that is whole, or None. Damaged ones are skipped with a warning that names them."""
    for path in reversed(_checkpoints(Path(folder))):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
        else:
            return path
    return None


def resumable_checkpoint(folder: str | Path) -> Path | None:
    """As :func:`latest_checkpoint`, but None only where there is no checkpoint at all.

    Raises :class:`CheckpointError` where there are some and none is whole: to start over would drop what the run has.
    """
    found = latest_checkpoint(folder)
    damaged = [] if found is not None else _checkpoints(Path(folder))
    if damaged:
        raise CheckpointError(
            f"expected a whole checkpoint in {folder}, found only damaged ones ({', '.join(p.name for p in damaged)}); "
            "nothing was changed. Restore one of them, delete them all to start the run over, or start another run"
        )
    return found


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    generators: Generators | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Loaded:
    """Restore the given objects in place, bit for bit, and return step and state.

    Torch's global random streams are restored too; for the weights alone use :func:`load_weights`. Raises
    :class:`CheckpointError` when the checkpoint is damaged or was made with another ``fingerprint`` (the message
    lists the keys that differ), before anything is changed, or when it does not fit the objects.
    """
    path = Path(path)
    manifest = verify_checkpoint(path)
    if fingerprint is not None:
        check_fingerprint(manifest["fingerprint"], fingerprint, source=path)
    payload = _read_payload(path)
    _check_present(payload, scheduler, generators or {}, path)
    try:
        if optimizer is not None:
            optimizer.load_state_dict(payload["optimizer"])
        if scheduler is not None:
            scheduler.load_state_dict(payload["scheduler"])
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the optimizer or scheduler ({error}); resume with those that it was saved with"
        ) from error
    if model is not None:
        load_weights(path, model)
    _restore_generators(payload["generators"], generators or {})
    return Loaded(path=path, step=manifest["step"], state=payload["state"])


def load_state(path: str | Path) -> dict[str, Any]:
    """The ``state`` that a checkpoint was saved with; nothing else is restored.

    Raises :class:`CheckpointError` when the checkpoint is damaged.
    """
    verify_checkpoint(path)
    state: dict[str, Any] = _read_payload(Path(path))["state"]
    return state


def load_weights(path: str | Path, model: nn.Module) -> None:
    """Copy only the weights of a checkpoint into ``model``, whose parameter names and shapes must match."""
    tensors = _load_tensors(Path(path) / _MODEL)
    for dropped, kept in _read_manifest(Path(path))["tied"].items():
        if kept not in tensors:
            raise CheckpointError(f"{path}: {_MANIFEST} ties {dropped} to {kept}, which is not there; use an older one")
        tensors[dropped] = tensors[kept]
    _match_weights(tensors, model, Path(path))
    model.load_state_dict(tensors)


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Check every file against the manifest and return it. Raises :class:`CheckpointError`, naming the file."""
    path = Path(path)
    manifest = _read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; the checkpoint is incomplete, use an older one")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, expected {expected['bytes']}; use an older checkpoint")
        if _sha256(file) != expected["sha256"]:
            raise CheckpointError(f"{file} does not match its checksum: it is corrupt; use an older checkpoint")
    return manifest


# The best one ---------------------------------------------------------------------------------------------------------


def mark_best(path: str | Path, *, metric: str, value: float) -> None:
    """Point ``best.json`` beside the checkpoint at it. It is then never deleted until another one is marked."""
    path = Path(path)
    write_json(path.parent / _BEST, {"checkpoint": path.name, "metric": metric, "value": value})


def best_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint marked best, or None when none was."""
    path = _best_pointer(Path(folder))
    if path is not None and not path.is_dir():
        raise CheckpointError(f"{_BEST} in {folder} points to {path.name}, which is not there; delete the pointer")
    return path


def _best_pointer(folder: Path) -> Path | None:
    pointer = folder / _BEST
    if not pointer.is_file():
        return None
    try:
        return folder / Path(json.loads(pointer.read_bytes())["checkpoint"]).name
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{pointer} is not a pointer to a checkpoint ({error}); delete it") from error


# Writing --------------------------------------------------------------------------------------------------------------


def _write_files(
    folder: Path, step: int, model: nn.Module, payload: dict[str, Any], fingerprint: Mapping[str, Any] | None
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    weights, tied = without_copies(model)
    # transformers' loader wants to know the framework.
    _save_tensors(weights, folder / _MODEL, {"format": "pt"})
    tensors: dict[str, torch.Tensor] = {}
    structure = encode(payload, "", tensors)
    _save_tensors(tensors, folder / _TENSORS, None)
    write_json(folder / _STATE, structure)
    files = {name: _describe(folder / name) for name in (_MODEL, _TENSORS, _STATE)}
    manifest = {"schema": SCHEMA, "step": step, "files": files, "tied": tied, "fingerprint": dict(fingerprint or {})}
    write_json(folder / _MANIFEST, {**manifest, "sha256": _digest(manifest)})
    sync_folder(folder)


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    sync_file(path)


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of all entries but the digest itself: a manifest that was damaged must not pass for one of another run."""
    kept = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


# The folder -----------------------------------------------------------------------------------------------------------


def _checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first. ``step-00000010.1`` replaces ``step-00000010``."""
    if not folder.is_dir():
        return []
    found = [(m, p) for p in folder.iterdir() if p.is_dir() and (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(((int(m[1]), int(m[2] or 0)), path) for m, path in found)]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _free_name(folder: Path, step: int) -> Path:
    """A name after every checkpoint of this step: the old one stays until the new one is there."""
    taken = [int(path.name.partition(".")[2] or 0) for path in _checkpoints(folder) if _step(path) == step]
    return folder / (f"step-{step:08d}.{max(taken) + 1}" if taken else f"step-{step:08d}")


def _prune(folder: Path, new: Path, keep: int | None) -> None:
    best = _best_pointer(folder)
    others = [path for path in _checkpoints(folder) if path != new]
    replaced = [path for path in others if _step(path) == _step(new)]
    # A later step than the one just saved belongs to a line that was given up: it goes before any older one.
    ranked = sorted((path for path in others if path not in replaced), key=lambda path: _step(path) < _step(new))
    surplus = ranked[: max(0, len(ranked) - (keep - 1))] if keep is not None else []
    for path in replaced + surplus:
        if path != best:
            # Renamed first: a deletion that is interrupted must not look like a checkpoint.
            shutil.rmtree(path.rename(folder / f".deleted-{path.name}"), ignore_errors=True)
    for leftover in folder.glob(".deleted-*"):
        shutil.rmtree(leftover, ignore_errors=True)


# Reading --------------------------------------------------------------------------------------------------------------


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: {_MANIFEST} is missing; use an older one")
    try:
        manifest: dict[str, Any] = json.loads(file.read_bytes())
        found = manifest["schema"]
        complete = {"files", "fingerprint", "step", "tied"} <= manifest.keys()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is corrupt ({error}); use an older checkpoint") from error
    if found != SCHEMA:
        raise CheckpointError(f"{path} has schema {found}, this version reads {SCHEMA}; use the turntree that wrote it")
    # Checkpoints of earlier versions have no digest.
    if manifest.get("sha256", "") != _digest(manifest) and not (manifest.keys() == _WITHOUT_DIGEST):
        raise CheckpointError(f"{file} does not match its checksum: it is corrupt; use an older checkpoint")
    if not complete:
        raise CheckpointError(f"{file} lacks entries; use an older checkpoint")
    return manifest


def _read_payload(path: Path) -> dict[str, Any]:
    tensors = _load_tensors(path / _TENSORS)
    try:
        payload: dict[str, Any] = decode(json.loads((path / _STATE).read_bytes()), tensors)
        missing = {"state", "optimizer", "scheduler", "generators"} - payload.keys()
        if missing:
            raise KeyError(sorted(missing)[0])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path / _STATE} is no state of a checkpoint ({type(error).__name__}: {error}); use an older one"
        ) from error
    return payload


def _load_tensors(file: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} holds no safetensors ({error}); use an older checkpoint") from error


def _check_present(payload: Mapping[str, Any], scheduler: Stateful | None, generators: Generators, path: Path) -> None:
    if scheduler is not None and payload["scheduler"] is None:
        raise CheckpointError(f"{path} holds no scheduler state, but a scheduler was given; resume without one")
    saved = payload["generators"]["own"]
    if absent := sorted(generators.keys() - saved.keys()):
        raise CheckpointError(f"{path} holds no generators {absent}, only {sorted(saved)}; resume with the same ones")


def _match_weights(tensors: Mapping[str, torch.Tensor], model: nn.Module, path: Path) -> None:
    """Names and shapes must agree; checked before anything is copied."""
    own = model.state_dict()
    missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    shapes = [
        f"{name} {tuple(tensors[name].shape)} there, {tuple(own[name].shape)} here"
        for name in own.keys() & tensors.keys()
        if tensors[name].shape != own[name].shape
    ]
    if missing or unknown or shapes:
        raise CheckpointError(
            f"{path} holds another model: missing {missing[:5]}, unknown {unknown[:5]}, other shapes {shapes[:5]}; "
            "load it into the architecture that it was saved from"
        )


# Random streams -------------------------------------------------------------------------------------------------------


def _generator_states(generators: Generators) -> dict[str, Any]:
    import torch

    states: dict[str, Any] = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["torch_cuda"] = torch.cuda.get_rng_state_all()
    own = {
        name: g.bit_generator.state if isinstance(g, np.random.Generator) else g.get_state()
        for name, g in generators.items()
    }
    return {**states, "own": own}


def _restore_generators(states: Mapping[str, Any], generators: Generators) -> None:
    import torch

    for name, generator in generators.items():
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = states["own"][name]
        else:
            generator.set_state(states["own"][name])
    torch.set_rng_state(states["torch_cpu"])
    if torch.cuda.is_available() and len(states.get("torch_cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["torch_cuda"])
