"""README, docs and examples say what is true: code runs, commands and options exist, links lead somewhere.

In Markdown, a ``python`` block is executed (all blocks of a page in one namespace, in order), a ``python no-run`` block
is only compiled, and a ``text output`` block is what the block before it prints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from turntree.cli import cli
from turntree.cli_help import Configured
from turntree.envs.check import FORK_LAWS
from turntree.trainers.compose import compose, config_groups
from turntree.trainers.config import documented_options
from turntree.trainers.metrics import NAMES
from turntree.trainers.tally import RolloutStats

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SECTIONS = "model|agent|eval|rltr|env|search|reward|engine|openai|sampling|algorithm|trainer|watch|cluster|sft"
OPTION = re.compile(rf"`((?:{SECTIONS})\.[a-z_][a-z_0-9.]*)(?:=[^`]*)?`")


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the line of its first line of text, its info string and its text."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [Block(page, source.count("\n", 0, m.start(2)) + 1, m[1].strip(), m[2]) for m in FENCE.finditer(source)]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- code ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("docs_page")  # dataclasses and import paths look their module up by name
    monkeypatch.setitem(sys.modules, module.__name__, module)
    printed = ""
    for block in blocks(page):
        if block.info == "text output":
            assert printed.rstrip() == block.text.rstrip(), f"{block.where}: the block before prints something else"
        elif block.info.split()[:1] == ["python"]:
            # Line numbers of a traceback are then those of the page.
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as out:
                if block.info == "python":
                    exec(code, module.__dict__)
            printed = out.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_says_what_it_is(page: Path) -> None:
    known = {"python", "python no-run", "text output", "text", "bash", "yaml", "json"}
    assert not [f"{b.where}: {b.info!r}" for b in blocks(page) if b.info not in known]


def run_example(script: Path, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, f"{script.name} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder that examples/custom_credit.py leaves behind."""
    folder = tmp_path_factory.mktemp("custom_credit")
    run_example(ROOT / "examples" / "custom_credit.py", str(folder), cwd=folder)
    return folder / "run"


def test_example_fork_and_grow(tmp_path: Path) -> None:
    out = run_example(ROOT / "examples" / "fork_and_grow.py", cwd=tmp_path)
    assert "the fork earned 1, the guess 0, the restored episode 1" in out
    assert "6 trajectories" in out
    assert "V(tree 0, root)" in out


def test_example_custom_task_keeps_every_law(tmp_path: Path) -> None:
    out = run_example(ROOT / "examples" / "custom_task.py", cwd=tmp_path)
    laws = ", ".join(law for law in FORK_LAWS if law != "interface")
    assert f"laws that hold: {laws}" in out


def test_example_custom_task_is_as_short_as_the_docs_say() -> None:
    source = (ROOT / "examples" / "custom_task.py").read_text(encoding="utf-8")
    task = source[source.index("@dataclass") : source.index("def main")]
    assert len([line for line in task.splitlines() if line.strip()]) <= 60


def test_example_custom_credit_trains_with_its_rule(tiny_run: Path) -> None:
    config = (tiny_run / "config.yaml").read_text(encoding="utf-8")
    assert ":depth_weighted" in config
    assert [row["step"] for row in rows(tiny_run / "metrics.jsonl")] == [1, 2]
    assert (tiny_run / "model" / "config.json").is_file()


def test_example_score_a_model(tmp_path: Path) -> None:
    out = run_example(ROOT / "examples" / "score_a_model.py", cwd=tmp_path)
    assert re.search(r"em 0\.\d{3} \[.*\]\nf1 .*\n4 questions, 0 failed", out)


def test_example_custom_loop_updates_the_model(tmp_path: Path) -> None:
    out = run_example(ROOT / "examples" / "custom_loop.py", cwd=tmp_path)
    norms = re.findall(r"^step (\d): 16 trajectories, gradient norm (\d+\.\d+)$", out, re.MULTILINE)
    assert [step for step, _ in norms] == ["1", "2"]
    assert all(float(norm) > 0 for _, norm in norms)


def test_example_custom_loop_is_as_short_as_the_docs_say() -> None:
    source = (ROOT / "examples" / "custom_loop.py").read_text(encoding="utf-8")
    loop = source[source.index("    core = SearchQACore") : source.index("def main")]
    assert len([line for line in loop.splitlines() if line.strip()]) <= 30


def test_every_example_is_tested_and_listed() -> None:
    tested = (Path(__file__)).read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in EXAMPLES:
        assert f'"{script.name}"' in tested
        assert f"examples/{script.name}" in readme


# -- commands, options, files ------------------------------------------------------------------------------------


def command_lines() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in blocks(page):
            if block.info == "bash":
                for line in block.text.replace("\\\n", " ").splitlines():
                    words = shlex.split(line, comments=True)
                    if words:
                        yield block.where, words


def test_commands_and_their_options_exist() -> None:
    seen: set[str] = set()
    for where, (program, *words) in command_lines():
        if Path(program).name == "turntree":
            check_turntree(where, words)
            seen.update(words[:1])
        elif program == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            targets = [w for w in words if "=" not in w]
            assert all(re.search(rf"^{t}:", makefile, re.MULTILINE) for t in targets), f"{where}: make {targets}"
        elif Path(program).name == "python":
            scripts = [w for w in words if w.endswith(".py")]
            assert all((ROOT / s).is_file() for s in scripts), f"{where}: {scripts}"
    assert seen - {"--help", "--version"} == set(cli.commands), "the pages must show every command once"


def check_turntree(where: str, words: list[str]) -> None:
    if words[0].startswith("-"):
        return
    command = cli.commands[words[0]]
    context = click.Context(command)
    command.make_parser(context).parse_args([w for w in words[1:] if w != "--help"])
    if isinstance(command, Configured) and "--help" not in words:
        try:
            compose([w for w in words[1:] if "=" in w])
        except Exception as error:
            pytest.fail(f"{where}: turntree {' '.join(words)}: {error}")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_that_are_mentioned_exist(page: Path) -> None:
    options = {key: default for key, default, _ in documented_options()}
    free = tuple(f"{key}." for key, default in options.items() if isinstance(default, dict))
    mentioned = OPTION.findall(prose(page))
    assert not [key for key in mentioned if key not in options and not key.startswith(free)]


def test_presets_are_described() -> None:
    text = prose(ROOT / "docs" / "algorithms.md")
    for preset in config_groups()["algorithm"]:
        (row,) = [line.split("|") for line in text.splitlines() if line.startswith(f"| `algorithm={preset}` |")]
        algorithm = compose([f"algorithm={preset}"]).algorithm
        assert row[3].strip(" `") == algorithm.expansion.partition(":")[2]
        assert row[4].strip(" `") == algorithm.credit.partition(":")[2]
        if algorithm.objective:
            assert row[5].strip(" `") == algorithm.objective.partition(":")[2]
        else:
            assert row[5].split()[0].strip(",") == algorithm.ratio
            assert f"{algorithm.clip_low:g} / {algorithm.clip_high:g}, {algorithm.aggregation}" in row[5]
        assert row[6].split()[0] == (f"{algorithm.kl_coef:g}" if algorithm.kl_coef else "none")
        grown = algorithm.trees * (algorithm.kept_leaves or algorithm.chains + algorithm.rounds * algorithm.expansions)
        assert int(row[7]) == (algorithm.budget_leaves or grown)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file.suffix == ".png":  # drawn by the quickstart
            continue
        assert file.exists(), f"{name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(file), f"{name(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def general_key(key: str) -> str:
    """A metric as the page names it: kinds, depths and parts stand for all of theirs."""
    key = re.sub(r"/(error|truncated|tool_calls)/[^/]+/count", r"/\1/<kind>/count", key)
    key = re.sub(r"^(tree/\w+_depth)/\d+$", r"\1/<depth>", key)
    key = re.sub(r"^(tree/\w+)_(token|turn|sequence)$", r"\1_<level>", key)
    return re.sub(r"^tree/reward/.+$", "tree/reward/<part>", key)


def test_every_metric_of_a_run_is_explained(tiny_run: Path) -> None:
    text = prose(ROOT / "docs" / "running.md")
    written = {key for row in rows(tiny_run / "metrics.jsonl") for key in row}
    general = {general_key(key) for key in written}
    assert not sorted(key for key in general if f"`{key}`" not in text)


def test_metrics_that_a_small_run_lacks_are_explained_too() -> None:
    text = prose(ROOT / "docs" / "running.md")
    keys = {*NAMES.values(), *(f"budget/{key}" for key in RolloutStats().as_dict())}
    assert not sorted(key for key in map(general_key, keys) if f"`{key}`" not in text)


def test_the_run_folder_holds_what_the_page_lists(tiny_run: Path) -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    assert not sorted(p.name for p in tiny_run.iterdir() if p.name not in text)


def test_every_public_report_has_its_test() -> None:
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    folder = ROOT / "tests" / "reports"
    patterns = re.findall(r"`(test_[a-f]\d\d_\*\.py)`", text)
    assert not [p for p in patterns if not list(folder.glob(p))]
    listed = {p.name for pattern in patterns for p in folder.glob(pattern)}
    assert {p.name for p in folder.glob("test_[abc]*.py")} <= listed
