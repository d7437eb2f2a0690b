"""``turntree rltr``: ways to train an agent, compared in one table."""

from __future__ import annotations

from collections.abc import Sequence

from turntree.commands.console import Stopped, resumable, resume_hint, say, stage_bars
from turntree.trainers.compose import compose

__all__ = ["run_rltr"]


def run_rltr(overrides: Sequence[str]) -> None:
    """``turntree rltr``."""
    own = any(o.startswith(("experiment=", "model.path=")) for o in overrides)
    config = compose(overrides if own else ["experiment=rltr", *overrides])  # before the heavy imports
    from turntree.trainers.build import run_path
    from turntree.trainers.rltr import Interrupted, compare_arms

    folder = run_path(config, "rltr")
    # Where it goes on is said in full: without out the next call would choose the next free folder.
    again = [*(o for o in overrides if not o.startswith("out=")), f"out={folder}"]
    with resumable("rltr", again):
        try:
            with stage_bars() as report:
                found = compare_arms(config, report)
        except Interrupted as stop:
            raise Stopped(f"{stop}; {resume_hint('rltr', again)}") from None
    say(found.markdown())
    say(f"table: {folder / 'comparison.md'}, comparison.csv, comparison.json")
