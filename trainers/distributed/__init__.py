"""Several processes train one model: ranks, what each of them does, DeepSpeed.

Every rank rolls out its share of the prompts; then all know all trees, so that groups, credit and packs are those of
one process; each rank scores and back-propagates its share of the packs. Importing this package imports neither torch
nor DeepSpeed.
"""

from __future__ import annotations

from turntree.trainers.distributed.ranks import ALONE, Ranks, join

__all__ = ["ALONE", "Ranks", "join"]
