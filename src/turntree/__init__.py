"""Forkable multi-turn QA environments and tree-based policy optimisation for search agents.

Rooms: :mod:`turntree.search_backend`, :mod:`turntree.envs`, :mod:`turntree.agents`, :mod:`turntree.trainers`.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["__version__"]
__version__ = "0.1.0"

for _room in ("search_backend", "envs", "agents", "trainers", "configs"):
    if not (Path(__file__).parent / _room / "__init__.py").is_file():
        raise ImportError(
            f"turntree/{_room} should be a link to the folder {_room}/ of the repository, but it is missing or a plain "
            "file. A zip download or a checkout without symlinks drops such links: clone with git on Linux, macOS or "
            "WSL (git config core.symlinks true), or install a wheel."
        )
