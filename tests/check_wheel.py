"""Build the wheel, install it outside the checkout, import every subpackage, run the console script.

Run by ``make wheel``. Third-party packages are borrowed from the running environment; turntree itself is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PROBE = """
import importlib, pkgutil, sys
import turntree
home = sys.argv[1]
assert turntree.__file__.startswith(home), f"imported {turntree.__file__}, not the installed wheel below {home}"
names = [m.name for m in pkgutil.walk_packages(turntree.__path__, "turntree.")]
rooms = {n.split(".")[1] for n in names if n.count(".") >= 1}
missing = {"search_backend", "envs", "agents", "trainers", "configs", "cli", "errors"} - rooms
assert not missing, f"not in the wheel: {missing}"
for name in names:
    importlib.import_module(name)
from importlib.resources import files
assert (files("turntree.configs") / "config.yaml").is_file(), "YAML files are not in the wheel"
assert (files("turntree.configs") / "algorithm" / "at2po.yaml").is_file(), "YAML groups are not in the wheel"
assert (files("turntree") / "py.typed").is_file(), "py.typed is not in the wheel"
import gymnasium
assert "turntree/SearchQA-v0" in gymnasium.registry, "the gymnasium entry point did not register"
print(f"wheel: {len(names)} modules imported from {home}")
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=cwd, env=env)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="turntree-wheel-") as tmp:
        folder = Path(tmp).resolve()
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--disable-pip-version-check",
            "-w",
            folder,
            ROOT,
            cwd=folder,
        )
        (wheel,) = folder.glob("turntree-*.whl")
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        site = Path(
            subprocess.check_output(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
            ).strip()
        )
        run(
            sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--disable-pip-version-check",
            wheel, cwd=folder,
        )  # fmt: skip
        # A plain path line, after the wheel's own folder: third-party packages only, editable hooks do not load from it.
        (site / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run(python, "-c", PROBE, site, cwd=folder, env=env)
        run(folder / "venv" / "bin" / "turntree", "--help", cwd=folder, env=env)
        run(
            folder / "venv" / "bin" / "turntree", "world", "--out", folder / "world", "--seed", "1", cwd=folder, env=env
        )


if __name__ == "__main__":
    main()
