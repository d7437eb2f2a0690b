"""When a collapse watch rings."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.errors import ConfigError
from turntree.trainers.options import at_least, finite, opt

__all__ = ["WatchConfig"]


@dataclass(frozen=True)
class WatchConfig:
    """Alarms of a training run that collapses: a warning and a metric ``alarm/...``; they never stop the run."""

    entropy: float | None = opt(0.1, "entropy: tree/entropy below this share of the run's highest (null: off).")
    ratio: float | None = opt(100.0, "ratio: a token's ratio above this, or not finite (null: off).")
    format: float | None = opt(0.3, "format: tree/valid_actions this far below the run's highest (null: off).")
    repetition: float | None = opt(0.5, "repetition: tree/repetition above this (null: off).")
    ngram: int = opt(4, "tokens of the n-grams that tree/repetition counts.")

    def __post_init__(self) -> None:
        finite("watch", self)
        at_least("watch.ngram", self.ngram, 1)
        at_least("watch.ratio", self.ratio, 1)
        for name in ("entropy", "format", "repetition"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError(f"watch.{name}={value} is not a share; expected 0..1 or null")
