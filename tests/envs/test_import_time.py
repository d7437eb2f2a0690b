"""`import turntree.envs` is cheap and brings no deep-learning library."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import json, sys, time
start = time.perf_counter()
import turntree.envs
seconds = time.perf_counter() - start
print(json.dumps([seconds, [m for m in ("torch", "transformers", "torchrl", "tensordict") if m in sys.modules]]))
"""


def test_importing_envs_is_fast_and_brings_no_torch() -> None:
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-P", "-c", CODE], capture_output=True, text=True, check=True, timeout=60
        )
        elapsed, heavy = json.loads(done.stdout)
        assert heavy == []
        seconds.append(elapsed)
    assert min(seconds) < 0.5, f"import turntree.envs took {seconds} s"
