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
PIP = (sys.executable, "-m", "pip")
QUIETLY = ("-q", "--no-deps", "--disable-pip-version-check")

PROBE = """
import importlib, pkgutil, sys
import turntree
home = sys.argv[1]
assert turntree.__file__.startswith(home), f"imported {turntree.__file__}, not the installed wheel below {home}"
import gymnasium
import turntree.envs  # Gymnasium loads no entry points by itself: the import registers.
assert "turntree/SearchQA-v0" in gymnasium.registry, "importing turntree.envs did not register its environments"
from importlib.metadata import entry_points
(entry,) = entry_points(group="gymnasium.envs", name="turntree")
assert entry.load() is turntree.envs.register_envs, f"the entry point names {entry.value}"
names = [m.name for m in pkgutil.walk_packages(turntree.__path__, "turntree.")]
rooms = {n.split(".")[1] for n in names if n.count(".") >= 1}
missing = {"search_backend", "envs", "agents", "trainers", "configs", "cli", "errors"} - rooms
assert not missing, f"not in the wheel: {missing}"
for name in names:
    importlib.import_module(name)
from importlib.resources import files
assert (files("turntree.configs") / "config.yaml").is_file(), "YAML files are not in the wheel"
assert (files("turntree.configs") / "algorithm" / "at2po.yaml").is_file(), "YAML groups are not in the wheel"
assert (files("turntree.agents") / "prompts" / "completeness_zh.txt").is_file(), "prompts are not in the wheel"
assert (files("turntree.envs") / "prompts" / "planner_tags_zh.txt").is_file(), "planner prompts are not in the wheel"
assert (files("turntree.trainers.studio") / "static" / "vendor" / "vendor.js").is_file(), "no studio in the wheel"
assert (files("turntree") / "py.typed").is_file(), "py.typed is not in the wheel"
print(f"wheel: {len(names)} modules imported from {home}")
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(c) for c in command], check=True, cwd=cwd, env=env)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="turntree-wheel-") as tmp:
        folder = Path(tmp).resolve()
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        run(*PIP, "wheel", *QUIETLY, "-w", folder, ROOT, cwd=folder)
        (wheel,) = folder.glob("turntree-*.whl")
        venv.create(folder / "venv", with_pip=False)
        python = folder / "venv" / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(subprocess.check_output([python, "-c", where], text=True).strip())
        run(*PIP, "--python", python, "install", *QUIETLY, wheel, cwd=folder)
        # A plain path after the wheel's own folder: third-party packages only, no editable hook loads from it.
        (site / "zz_borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
        run(python, "-c", PROBE, site, cwd=folder, env=env)
        turntree = folder / "venv" / "bin" / "turntree"
        run(turntree, "--help", cwd=folder, env=env)
        run(turntree, "world", "--out", folder / "world", "--seed", "1", cwd=folder, env=env)


if __name__ == "__main__":
    main()
