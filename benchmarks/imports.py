"""How long a user waits for `import turntree.envs` and for `turntree --help`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

# The folder of a script is not on the path under PYTHONSAFEPATH.
sys.path.insert(0, str(Path(__file__).parent))

from _common import Figure, run

IMPORT = """
import sys, time
start = time.perf_counter()
import turntree.envs
print(time.perf_counter() - start, int("torch" in sys.modules))
"""


def measure(args: argparse.Namespace) -> list[Figure]:
    repeats = 3 if args.quick else 15
    imports = [_import() for _ in range(repeats)]
    helps = [_help() for _ in range(repeats)]
    return [
        Figure("import turntree.envs, fresh process, best", min(s for s, _ in imports), "s", "lower", 0.5),
        Figure("imports of turntree.envs that loaded torch", sum(torch for _, torch in imports), "", "lower", 0),
        Figure("turntree --help, whole command, best", min(helps), "s", "lower", 1.0),
    ]


def _import() -> tuple[float, int]:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    seconds, torch = done.stdout.split()
    return float(seconds), int(torch)


def _help() -> float:
    command = Path(sys.executable).with_name("turntree")
    start = time.perf_counter()
    subprocess.run([command, "--help"], capture_output=True, check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    run(measure, description="Start-up times")
