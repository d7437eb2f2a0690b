"""Benchmark scripts write the agreed JSON and print a table that names missed targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"

SCRIPT = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from _common import Figure, run

def measure(args):
    scale = 2.0 if args.quick else 1.0
    return [
        Figure("rate", 3.0 * scale, "1/s", "higher", 5),
        Figure("wait", 9.0, "s", "lower", 5.0),
        Figure("lost", float("nan"), "", "lower"),
    ]

run(measure, description="Numbers")
"""


def script(folder: Path, *arguments: str) -> str:
    (folder / "numbers.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "numbers.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_has_exactly_the_agreed_keys(tmp_path: Path) -> None:
    script(tmp_path, "--quick", "--json", "out/figures.json")
    data = json.loads((tmp_path / "out/figures.json").read_text())
    assert list(data) == ["command", "machine", "versions", "figures"]
    assert data["command"] == "python numbers.py --quick --json out/figures.json"
    assert data["figures"] == [
        {"name": "rate", "value": 6.0, "unit": "1/s", "better": "higher", "target": 5},
        {"name": "wait", "value": 9.0, "unit": "s", "better": "lower", "target": 5.0},
        {"name": "lost", "value": None, "unit": "", "better": "lower", "target": None},
    ]
    assert data["machine"]["cores"] >= 1
    assert data["versions"]["python"].startswith("3.")


def test_the_table_says_which_targets_are_missed(tmp_path: Path) -> None:
    lines = script(tmp_path).splitlines()
    rows = {cells[1]: cells[2:] for line in lines if len(cells := [c.strip() for c in line.split("|")]) > 2}
    assert rows["rate"][:4] == ["3", "1/s", "\u2265 5", "missed"]
    assert rows["wait"][3] == "missed"
    assert rows["lost"][3] == ""


SCRIPTS = sorted(FOLDER.glob("[!_]*.py"))
HELP = """
import contextlib, io, json, runpy, sys
found = {}
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            found[path] = [end.code, said.getvalue()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str]]:
    """Exit code and ``--help`` of every script, all in one process: most of their time is the import of torch."""
    env = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", HELP, *map(str, SCRIPTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return {path: (int(code or 0), text) for path, (code, text) in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_quick_and_json(path: Path, helps: dict[str, tuple[int, str]]) -> None:
    code, said = helps[str(path)]
    assert code == 0
    assert "--quick" in said
    assert "--json" in said
