"""Commands that bring things in and out: data, export, import-trees, import-config. Imports happen inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli_help import Listed

__all__ = ["COMMANDS"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_unanswerable = click.option(
    "--unanswerable", type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True,
    help="Blank questions and those without an answer: an error, or left out and counted.",
)  # fmt: skip
_json = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


@click.group(cls=Listed)
def data() -> None:
    """Question files and published question sets."""


@data.command("list")
@_json
def data_list(as_json: bool) -> None:
    """The published sets by name: split, questions, language, scoring, where they come from."""
    from turntree.commands.data import run_data_list

    run_data_list(as_json=as_json)


@data.command("show")
@click.argument("name", metavar="NAME|FILE")
@click.option("--split", default=None, help="Split of a published set (default: the one it is evaluated on).")
@click.option("--source", default=None, help="File or folder of a published set, or hub (default: TURNTREE_DATA, hub).")
@click.option("--questions", type=int, default=3, show_default=True, help="Questions to print.")
@_unanswerable
@_json
def data_show(**options: Any) -> None:
    """Read a published set or any question file; say what it is, its hash and its first questions."""
    from turntree.commands.data import run_data_show

    run_data_show(**options)


@data.command("convert")
@click.argument("names", metavar="NAME|FILE...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write to.")
@click.option("--split", default=None, help="Split of published sets (default: the one they are evaluated on).")
@click.option("--source", default=None, help="File or folder of a published set, or hub (default: TURNTREE_DATA, hub).")
@click.option(
    "--corpus/--no-corpus", default=None, help="Write corpus.jsonl of the contexts (default: if there are any)."
)
@click.option("--limit", type=int, default=None, help="Questions of each set, from the beginning (no corpus then).")
@_unanswerable
def data_convert(**options: Any) -> None:
    """Write questions.jsonl (FlashRAG's layout), and corpus.jsonl where questions bring their passages."""
    from turntree.commands.data import run_data_convert

    run_data_convert(**options)


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--format", type=click.Choice(["trees-jsonl", "pairs", "messages", "tokens", "verl-parquet"]), required=True,
    help="See docs/exchange.md.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File; .gz and .zst are compressed.")
@click.option("--step", "steps", type=int, multiple=True, help="Training step; repeatable (default: all stored).")
@click.option("--min-reward", type=float, default=None, help="Trajectories worth at least this (default: all scored).")
@click.option(
    "--shared-turns", type=click.Choice(["per_leaf", "once"]), default="per_leaf", show_default=True,
    help="Train a turn that several trajectories share in each of them, or in the first.",
)  # fmt: skip
@click.option("--role", type=click.Choice(["user", "tool"]), default="user", show_default=True, help="Of observations.")
@click.option(
    "--form",
    type=click.Choice(["messages", "implicit", "text"]),
    default="messages",
    show_default=True,
    help="Of pairs.",
)
@click.option("--min-margin", type=float, default=0.0, show_default=True, help="Pairs whose values differ by more.")
@click.option("--max-pairs", type=int, default=None, help="Pairs of one parent, widest first (default: all).")
@click.option("--tokenizer", default="", help="Folder of the run's tokenizer, for --form text (default: its model).")
@click.option("--prompts", "prompts_only", is_flag=True, help="verl-parquet: one row a question, without trajectories.")
@click.option("--data-source", default="turntree", show_default=True, help="verl-parquet: its column data_source.")
@click.option("--ability", default="fact-reasoning", show_default=True, help="verl-parquet: its column ability.")
def export(**options: Any) -> None:
    """Write a run's stored trees for other tools: trees, preference pairs, messages, tokens, verl's parquet."""
    from turntree.commands.exchange import run_export

    run_export(**options)


@click.command("import-trees")
@click.argument("file", type=_FILE)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Run folder to make.")
@click.option("--check/--no-check", default=True, show_default=True, help="Hold every line against the schema.")
def import_trees(file: Path, out: Path, check: bool) -> None:
    """Make a run folder of exported trees, for view, explain and export."""
    from turntree.commands.exchange import run_import_trees

    run_import_trees(file, out, check=check)


@click.command("import-config")
@click.argument("file", type=_FILE)
@click.option("--base", type=_FILE, multiple=True, help="YAML with the defaults that FILE goes by; repeatable.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the options as YAML too.")
@_json
def import_config(file: Path, base: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Translate a launch script or YAML of verl, Search-R1, Tree-GRPO or AT2PO, and say what became of every line.

    Exit code 1 where the options do not go together.
    """
    from turntree.commands.exchange import run_import_config

    run_import_config(file, base=base, out=out, as_json=as_json)


COMMANDS: tuple[click.Command, ...] = (data, export, import_trees, import_config)
