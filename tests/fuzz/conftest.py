"""Says how many inputs each surface saw."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz.material import SEEN


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SEEN:
        terminalreporter.section("fuzz: inputs seen")
        for surface, count in sorted(SEEN.items()):
            terminalreporter.write_line(f"{surface:<12}{count:>12,}")
        terminalreporter.write_line(f"{'all':<12}{sum(SEEN.values()):>12,}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Of pytest-xdist's workers: what they saw goes to the process that reports."""
    output: Any = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["fuzz"] = dict(SEEN)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    SEEN.update(getattr(node, "workeroutput", {}).get("fuzz", {}))
