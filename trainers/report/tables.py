"""Tables: one line a step while a run goes on, and Markdown for reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

__all__ = ["Column", "StepTable", "format_value", "markdown_table", "steps_table"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a :class:`StepTable`: the metric's key, its heading, a format and a width in cells.

    ``format`` is a format spec for numbers (``".3f"``, ``",d"``). Keys that a row lacks stay empty.
    """

    key: str
    heading: str
    format: str = ".3f"
    width: int = 9


class StepTable:
    """Prints one line a step, as it happens: coloured on a terminal, plain when piped.

    Columns that do not fit the terminal's width are left out from the right; a pipe gets all of them.
    """

    def __init__(
        self, columns: Sequence[Column], *, file: IO[str] | None = None, console: Console | None = None
    ) -> None:
        """``console``: a shared one, such as that of progress bars; without it ``file`` (stdout) gets its own."""
        self.console = console or Console(file=file)
        limit = self.console.width if self.console.is_terminal else math.inf
        self.columns = _fitting(columns, limit)
        self._headed = False

    def row(self, metrics: Mapping[str, Any], *, style: str = "") -> None:
        """Print one line; the headings go before the first."""
        if not self._headed:
            self._headed = True
            self._print([c.heading for c in self.columns], "bold")
        self._print([format_value(metrics.get(c.key), c.format) for c in self.columns], style)

    def note(self, text: str) -> None:
        """A line between the rows."""
        self._say(Text(text, style="dim" if self.console.is_terminal else ""))

    def _print(self, cells: Sequence[str], style: str) -> None:
        line = "  ".join(_right(cell, column.width) for cell, column in zip(cells, self.columns))
        self._say(Text(line.rstrip(), style=style if self.console.is_terminal else ""))

    def _say(self, line: Text) -> None:
        self.console.print(line, soft_wrap=True, highlight=False)


_STEPS = (
    Column("step", "step", "d", 6),
    Column("critic/rewards/mean", "reward", ".3f", 7),
    Column("right", "right", ".3f", 6),
    Column("validation", "valid.", ".3f", 6),
    Column("num_turns/mean", "turns", ".2f", 5),
    Column("total/generated_tokens", "tokens", ",d", 11),
    Column("total/tool_calls", "calls", ",d", 8),
    Column("timing_s/step", "seconds", ".1f", 7),
    Column("tree/entropy", "entropy", ".3f", 7),
    Column("tree/mixed_groups", "mixed", ".0%", 5),
    Column("response_length/mean", "length", ",d", 6),
    Column("actor/grad_norm", "grad", ".3g", 8),
)


def steps_table(console: Console) -> Callable[[int, Mapping[str, Any]], None]:
    """``show(step, metrics)``: a row a training step on ``console``; those with a validation stand out.

    ``right`` is the share of right rollouts, ``valid.`` the task's metric on the validation tasks.
    """
    table = StepTable(_STEPS, console=console)

    def show(step: int, metrics: Mapping[str, Any]) -> None:
        right = next((metrics[k] for k in ("tree/reward/em", "tree/reward/success") if k in metrics), None)
        validated = next((value for key, value in metrics.items() if key.startswith("validation/")), None)
        row = {**metrics, "step": step, "right": right, "validation": validated}
        table.row(row, style="" if validated is None else "bold")

    return show


def format_value(value: Any, spec: str = ".3f") -> str:
    """A number as ``spec`` says, NaN and None as a dash, anything else as text."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if spec.endswith("d"):
        return format(round(value), spec) if math.isfinite(value) else str(value)
    return format(value, spec)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], *, format: str = ".3f") -> str:
    """A Markdown table, columns padded so that it reads as text too; columns of numbers are right-aligned.

    Integers are printed as they are, other numbers with ``format``. Pipes and line breaks in cells are escaped.
    """
    cells = [[_markdown_cell(value, format) for value in row] for row in rows]
    head = [_markdown_cell(heading, format) for heading in headings]
    numeric = [_is_numeric([row[i] for row in rows]) for i in range(len(head))]
    widths = [max(3, *(cell_len(line[i]) for line in [head, *cells])) for i in range(len(head))]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric)]
    lines = [head, rule, *cells]
    return "\n".join(
        "| " + " | ".join(_pad(cell, w, right=r) for cell, w, r in zip(line, widths, numeric)) + " |" for line in lines
    )


def _fitting(columns: Sequence[Column], limit: float) -> tuple[Column, ...]:
    used, kept = 0, []
    for column in columns:
        used += column.width + 2
        if used - 2 > limit:
            break
        kept.append(column)
    return tuple(kept)


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + (text if cell_len(text) <= width else set_cell_size(text, width))


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def _is_numeric(values: Sequence[Any]) -> bool:
    numbers = [v for v in values if v is not None]
    return bool(numbers) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers)


def _markdown_cell(value: Any, spec: str) -> str:
    text = str(value) if isinstance(value, int) else format_value(value, spec)
    return " ".join(text.replace("|", "\\|").split())
