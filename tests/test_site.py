"""The documentation as a site: every public name is documented, and the build has no warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def hooks() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_documented(hooks: types.ModuleType) -> None:
    found = {module: (file, names) for module, file, names in hooks.public_modules()}
    assert {"turntree.envs.core", "turntree.trainers.credit", "turntree.agents", "turntree.search_backend"} <= set(
        found
    )
    assert len(found) > 100
    bad = {module: hooks.undocumented(file, names) for module, (file, names) in found.items()}
    assert not {module: names for module, names in bad.items() if names}


def test_what_is_not_documented_is_named(hooks: types.ModuleType, tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import json\n__all__ = ['A', 'B', 'C', 'f', 'g', 'json']\n\n"
        'A = 1\nB = 2\n"""Said."""\n# Said too.\nC = 3\n'
        'def f(): ...\ndef g():\n    """Said."""\nclass _Private: ...\n'
    )
    names = hooks.exported(module)
    assert names == ["A", "B", "C", "f", "g", "json"]
    assert hooks.undocumented(module, names) == ["A", "f"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("mkdocs")),
            "build",
            "--quiet",
            "--strict",
            "--site-dir",
            str(tmp_path / "site"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONSAFEPATH": "1", "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    built = (tmp_path / "site" / "reference" / "trainers" / "credit.html").read_text(encoding="utf-8")
    assert "shrunk_loo" in built
    assert "Equal rewards give exactly zero" in built
    loads = r"<(?:script|img|iframe|link rel=\W?(?:stylesheet|icon|preload)\W?)"
    elsewhere = re.compile(loads + r"[^>]*?(?:src|href)=\W?https?:")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 100
    assert not [page for page in pages if elsewhere.search(page.read_text(encoding="utf-8"))]
