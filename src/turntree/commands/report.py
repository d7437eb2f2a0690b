"""``turntree report``: runs as one static page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turntree.commands.console import say

__all__ = ["run_report"]


def run_report(runs: Sequence[Path], *, out: Path | None, ignore: Sequence[str]) -> None:
    """One run: its page, written anew. Several: an overlay."""
    from turntree.trainers.report.overlay import find_runs

    folders = find_runs(runs)
    if len(folders) == 1:
        from turntree.trainers.report.run_page import write_run_page

        say(f"report: {write_run_page(folders[0], out=out)}")
        return
    from turntree.trainers.report.overlay_page import write_runs_page

    target = out or Path("report.html")
    for warning in write_runs_page(folders, target, ignore=ignore):
        say(f"warning: {warning}")
    say(f"report of {len(folders)} runs: {target}")
