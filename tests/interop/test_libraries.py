"""Other libraries' environments here, and ours there: each in a virtual environment of its own, with the real package.

``TURNTREE_TEST_VENVS`` names a folder to keep these environments in from run to run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
COMMON = ("pytest", "gymnasium", "bm25s", "PyStemmer", "cloudpickle", "jinja2", "numpy")
# verifiers and gem-llm pin packages that we pin otherwise; trl wants torch and transformers, which are here already.
LIBRARIES = {
    "in_gem": ("gem-llm==0.1.0", *COMMON),
    "in_verifiers": ("verifiers==0.4.0", *COMMON),
    "in_skyrl": ("skyrl-gym==0.4.0", *COMMON),
    "in_trl": ("pytest", "trl==1.16.0"),
    "in_trl_exchange": ("pytest", "trl==1.16.0"),
}


def environment(folder: Path, packages: tuple[str, ...], *, on_top_of_ours: bool) -> Path:
    """The interpreter of a virtual environment with ``packages`` and this checkout."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=120)
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        paths = [str(SOURCE), *([sysconfig.get_path("purelib")] if on_top_of_ours else [])]
        (site / "turntree_checkout.pth").write_text("\n".join(paths) + "\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(install, check=True, timeout=900)
        (folder / "ready").touch()
    return python


@pytest.mark.slow
@pytest.mark.parametrize("script", LIBRARIES)
def test_the_real_package(script: str, tmp_path: Path) -> None:
    kept = os.environ.get("TURNTREE_TEST_VENVS")
    folder = (Path(kept) if kept else tmp_path) / script
    python = environment(folder, LIBRARIES[script], on_top_of_ours=script.startswith("in_trl"))
    done = subprocess.run(
        [python, HERE / f"{script}.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("ok")
