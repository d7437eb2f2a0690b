"""What is left behind of an update that could not be made: the batch, what in it is not finite, where to look.

``batch.safetensors`` holds every column of every pack (``0/tokens/ids``, ``0/occurrences/advantage``, ...), and
``diagnosis.json`` the counts. Neither needs anything to be unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.errors import DivergenceError
from turntree.trainers.atomic import sync_file, write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from turntree.trainers.packing import Pack

__all__ = ["Skipped", "diagnose", "stop_diverged"]

_COLUMNS = {
    "sampler_logp": "log-probs of the engine are not finite: look at the engine, its dtype and its weights",
    "old_logp": "log-probs of the trainer's own pass before the update are not finite: the model's logits are broken",
    "ref_logp": "log-probs of the reference are not finite: look at the reference model",
    "value": "values are not finite: look at the value head and algorithm.value_coef",
    "advantage": "advantages are not finite: look at the rewards (scorer, shaping) and at the credit rule",
    "ret": "returns are not finite: look at the rewards and the values",
}
"""Columns of a pack in the order in which they come to be, and what it means when one is broken."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """An update that was not made: its packs, what the loss reported of each pack, the norm of the gradient."""

    packs: Sequence[Pack]
    reports: Sequence[Mapping[str, Any]]
    norm: float


def diagnose(skipped: Skipped, model: nn.Module) -> dict[str, Any]:
    """What is not finite: counts by column, numbers of each pack, names of weights, and in words where to look.

    JSON data; numbers that are not finite are texts (``"nan"``, ``"inf"``).
    """
    columns = _broken_columns(skipped.packs)
    weights = [name for name, weight in model.named_parameters() if not _finite(weight)]
    reports = [_numbers(report) for report in skipped.reports]
    losses = sorted({key for report in reports for key, value in report.items() if isinstance(value, str)})
    return {
        "grad_norm": _number(skipped.norm),
        "look_at": _look_at(columns, weights, losses),
        "columns": columns,
        "weights": weights,
        "packs": [{"tokens": len(pack["tokens"]), "occurrences": len(pack["occurrences"])} for pack in skipped.packs],
        "reports": reports,
    }


def stop_diverged(
    folder: Path | None,
    skipped: Skipped,
    model: nn.Module,
    *,
    step: int,
    in_a_row: int,
    newest: Path | None,
    option: str = "trainer.max_skipped_updates",
) -> None:
    """Write ``batch.safetensors`` and ``diagnosis.json`` into ``folder`` (if any), then raise :class:`DivergenceError`.

    ``step``: the one whose updates were skipped. ``newest``: the checkpoint to go back to. ``option``: the one that set
    the limit. A disk that is full takes nothing from the message.
    """
    found = diagnose(skipped, model)
    kept = "The batch was not kept, for want of a run folder"
    try:
        if folder is not None:
            _save_batch(folder / "batch.safetensors", skipped.packs)
            write_json(folder / "diagnosis.json", {"step": step, "skipped_in_a_row": in_a_row, **found})
            kept = f"The batch and what is not finite in it are in {folder}"
    except OSError as error:
        kept = f"The batch could not be written to {folder} ({error})"
    back = f"the newest checkpoint is {newest}" if newest is not None else "there is no checkpoint yet"
    raise DivergenceError(
        f"expected finite gradients, found none in {in_a_row} updates in a row (step {step}; "
        f"{option}={in_a_row}). Look at: {'; '.join(found['look_at'])}. {kept}; {back}"
    )


def _look_at(columns: Mapping[str, Any], weights: Sequence[str], losses: Sequence[str]) -> list[str]:
    """The earliest cause first: what comes later is broken by it."""
    hints = [f"weights are not finite before the update ({', '.join(weights[:3])}): load an earlier checkpoint"]
    found = hints if weights else []
    found = found + [hint for name, hint in _COLUMNS.items() if any(key.endswith(f".{name}") for key in columns)]
    if not found and losses:
        found = [f"the batch is finite and the loss is not ({', '.join(losses[:4])}): look at the objective, and dtype"]
    return found or [
        "batch and loss are finite and the gradient is not: it overflows in the backward pass; try model.dtype=float32 "
        "or a lower learning rate, and look at roots, logarithms and divisions of a loss of your own"
    ]


def _broken_columns(packs: Sequence[Pack]) -> dict[str, int]:
    """``{"tokens.old_logp": 3}``: how many values are not finite, over all packs."""
    counts: dict[str, int] = {}
    for pack in packs:
        for name, column in _columns(pack):
            if column.is_floating_point() and (broken := int((~column.isfinite()).sum())):
                key = name.replace("/", ".")
                counts[key] = counts.get(key, 0) + broken
    return counts


def _columns(pack: Pack) -> Iterable[tuple[str, Tensor]]:
    import torch

    for table in sorted(map(str, pack.keys())):
        columns: Any = pack[table]
        for name, column in sorted(columns.items()):
            if isinstance(column, torch.Tensor):
                yield f"{table}/{name}", column


def _save_batch(path: Path, packs: Sequence[Pack]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}/{name}": column.detach().cpu().contiguous().clone()
        for number, pack in enumerate(packs)
        for name, column in _columns(pack)
    }
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise OSError(f"{path.name}: {error}") from error
    sync_file(path)


def _numbers(report: Mapping[str, Any]) -> dict[str, Any]:
    """The single numbers of what a loss reported; the sums and extremes of ratios are left out."""
    return {str(key): _number(float(value)) for key, value in report.items() if getattr(value, "ndim", 0) == 0}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _finite(weight: Tensor) -> bool:
    return bool(weight.isfinite().all())
