"""What a checkpoint of a training run holds, which one is marked best, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.trainers.checkpoint import (
    best_checkpoint,
    load_checkpoint,
    load_weights,
    mark_best,
    resumable_checkpoint,
    save_checkpoint,
)
from turntree.trainers.distributed.strategy import Gathered, Strategy
from turntree.trainers.progress import Progress

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RunCheckpoints"]


@dataclass(slots=True)
class RunCheckpoints:
    """The checkpoints of a run in ``folder``.

    ``policy`` is what is trained of the model, ``modules`` what else moves (a reference that follows, a value head).
    ``metric`` is what validations measure, None for a run without any. ``fingerprint`` holds the options that a resumed
    run must share, ``keep`` is how many checkpoints stay. ``saved_step`` is the step of the last one.
    """

    folder: Path
    policy: nn.Module
    strategy: Strategy
    modules: Mapping[str, nn.Module]
    fingerprint: Mapping[str, Any]
    keep: int
    metric: str | None
    saved_step: int = 0

    def newest(self) -> Path | None:
        """What the main rank found to go on from, on every rank; None where there is no checkpoint.

        Raises :class:`CheckpointError` where there are some and none is whole.
        """
        return self.strategy.ranks.main(lambda: resumable_checkpoint(self.folder))

    def load(self, path: Path) -> Progress:
        """Restore policy, modules and moments, and return how far the run had come; on every rank.

        Raises :class:`CheckpointError` where the checkpoint belongs to other options; nothing is changed then.
        """
        loaded = load_checkpoint(path, model=self.policy, optimizer=self.strategy, fingerprint=self.fingerprint)
        progress = Progress(**loaded.state["progress"])
        for name, module in self.modules.items():
            module.load_state_dict(loaded.state[name])
        self.strategy.adopt()
        self.saved_step = progress.step
        self.strategy.ranks.main(lambda: self._mark(path, progress))  # killed between a checkpoint and its mark
        return progress

    def save(self, progress: Progress) -> None:
        """Write where the run is now; every rank takes part, the main one writes."""
        moments = Gathered(self.strategy.state_dict())
        self.saved_step = progress.step
        self.strategy.ranks.main(lambda: self._write(progress, moments))

    def load_best(self) -> bool:
        """Copy the weights marked best into the policy; False where none are.

        Raises :class:`CheckpointError` where the mark points to a checkpoint that is gone.
        """
        best = best_checkpoint(self.folder)
        if best is not None:
            load_weights(best, self.policy)
        return best is not None

    def _write(self, progress: Progress, moments: Gathered) -> None:
        modules = {name: dict(module.state_dict()) for name, module in self.modules.items()}
        path = save_checkpoint(
            self.folder,
            progress.step,
            model=self.policy,
            optimizer=moments,
            state={"progress": asdict(progress), **modules},
            fingerprint=self.fingerprint,
            keep=self.keep,
        )
        self._mark(path, progress)

    def _mark(self, path: Path, progress: Progress) -> None:
        """Mark the checkpoint of the step that was just saved or loaded, if it is the best one so far."""
        if progress.best_step == progress.step and progress.best_score is not None and self.metric is not None:
            mark_best(path, metric=self.metric, value=progress.best_score)
