"""What the benchmark scripts share: arguments, the table, and the JSON file of figures."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "document", "machine", "run", "versions"]

PACKAGES = ("turntree", "torch", "torchrl", "tensordict", "transformers", "gymnasium", "numpy", "bm25s")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. ``better`` says which direction is good; ``target`` is the number to reach, if any."""

    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def run(
    measure: Callable[[argparse.Namespace], Sequence[Figure]],
    *,
    description: str,
    options: Callable[[argparse.ArgumentParser], None] | None = None,
) -> None:
    """The main function of a script: parse ``--quick``, ``--json`` and its own options, measure, print, write."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller measurement, under two minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    if options is not None:
        options(parser)
    args = parser.parse_args()
    figures = list(measure(args))
    print_figures(figures, title=description)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document(figures), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_figures(figures: Sequence[Figure], *, title: str) -> None:
    """One line a figure: drawn on a terminal, plain columns in a pipe."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    table = Table(title=title, title_justify="left", box=box.SIMPLE if console.is_terminal else box.ASCII2)
    for heading in ("figure", "value", "unit", "target", ""):
        table.add_column(heading, justify="right" if heading in ("value", "target") else "left")
    for figure in figures:
        sign = "\u2265" if figure.better == "higher" else "\u2264"
        target = "" if figure.target is None else f"{sign} {figure.target:g}"
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[figure.met]
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, target, verdict)
    console.print(table)


def document(figures: Sequence[Figure]) -> dict[str, Any]:
    """The JSON file's content. Values that are not finite become null."""
    rows = [asdict(figure) for figure in figures]
    for row in rows:
        row["value"] = row["value"] if math.isfinite(row["value"]) else None
    return {"command": _command(), "machine": machine(), "versions": versions(), "figures": rows}


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, cores that may be used, memory, system, accelerator."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "accelerator": _accelerator(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _command() -> str:
    return shlex.join(["python", *sys.argv])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"


def _accelerator() -> str | None:
    """Only a script that uses torch can have used an accelerator."""
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
