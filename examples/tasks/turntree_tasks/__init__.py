"""Three tasks for turntree; ``gymnasium.envs`` names :func:`register`, so installing the package is enough."""

from __future__ import annotations

import gymnasium

__all__ = ["register"]

ENTRY_POINTS = {
    "turntree_tasks/Calculator-v0": "turntree_tasks.calculator:make",
    "turntree_tasks/Cave-v0": "turntree_tasks.cave:make",
    "turntree_tasks/Database-v0": "turntree_tasks.database:make",
}


def register() -> None:
    """Register what is not registered yet."""
    for name, entry_point in ENTRY_POINTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(id=name, entry_point=entry_point)
