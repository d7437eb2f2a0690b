"""Trees, expansion, credit, packing, objectives, learner. ``train(config)`` is the whole loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turntree.trainers.learner import TrainResult, train

__all__ = ["TrainResult", "train"]


def __getattr__(name: str) -> Any:
    """Imported when asked for: configurations and the command line's help need no torch."""
    if name in __all__:
        from turntree.trainers import learner

        return getattr(learner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
