"""Tables: readable on a terminal, plain in a pipe, aligned with wide characters."""

from __future__ import annotations

import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from turntree.trainers.report.tables import Column, StepTable, format_value, markdown_table

COLUMNS = [Column("step", "step", "d", 5), Column("em", "EM", ".1%", 6), Column("tokens", "tokens", ",d", 9)]


def test_a_pipe_gets_plain_aligned_lines() -> None:
    out = io.StringIO()
    table = StepTable(COLUMNS, file=out)
    table.row({"step": 1, "em": 0.25, "tokens": 1234567.0})
    table.note("validation")
    table.row({"step": 2, "em": math.nan, "other": 1}, style="green")
    assert out.getvalue() == (
        " step      EM     tokens\n    1   25.0%  1,234,567\nvalidation\n    2       -          -\n"
    )


def test_long_lines_are_not_wrapped_in_a_pipe() -> None:
    out = io.StringIO()
    table = StepTable([Column(str(i), str(i)) for i in range(40)], file=out)
    table.row({"39": 1.0})
    assert len(out.getvalue().splitlines()) == 2
    assert out.getvalue().rstrip().endswith("1.000")


def test_a_terminal_gets_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "13")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    StepTable(COLUMNS, file=out).row({"step": 1, "em": 0.25, "tokens": 9})
    assert "\x1b[1m" in out.getvalue()
    assert "EM" in out.getvalue()
    assert "tokens" not in out.getvalue()


@pytest.mark.parametrize(
    ("value", "spec", "expected"),
    [
        (None, ".3f", "-"),
        (math.nan, "d", "-"),
        (math.inf, "d", "inf"),
        (2.5, ".2f", "2.50"),
        (7.0, "d", "7"),
        (True, ".3f", "True"),
        ("甲", ".3f", "甲"),
    ],
)
def test_format_value(value: object, spec: str, expected: str) -> None:
    assert format_value(value, spec) == expected


def test_markdown_is_aligned_and_escaped() -> None:
    text = markdown_table(["name", "EM"], [["a|b\nc", 0.5], ["算法", None], ["x", 12]])
    lines = text.splitlines()
    assert lines[1] == "| ------ | ----: |"
    assert lines[2] == "| a\\|b c | 0.500 |"
    assert len({cell_len(line) for line in lines}) == 1
    assert markdown_table(["only"], []) == "| only |\n| ---- |"


def test_markup_in_values_is_not_interpreted() -> None:
    out = io.StringIO()
    StepTable([Column("a", "a", width=12)], file=out).row({"a": "[red]x[/red]"})
    assert "[red]x[/red]" in out.getvalue()
    assert Console(file=io.StringIO()).is_terminal is False
