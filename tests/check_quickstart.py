"""Run a shrunken quickstart through the console script and check what it leaves behind. Run by ``make smoke``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL = [
    "sft.steps=30",
    "sft.demonstrations=64",
    "trainer.steps=3",
    "trainer.prompts_per_step=8",
    "trainer.eval_every=1",
    "trainer.eval_questions=16",
    "trainer.save_every=1",
]
KEYS = {
    "em_before", "em_after", "f1_before", "f1_after", "n_questions", "generated_tokens", "tool_calls",
    "seconds_total", "seconds_cold_start", "seconds_rl", "seed", "algorithm",
}  # fmt: skip
FILES = ("config.yaml", "metrics.jsonl", "curve.png", "tree.html", "summary.json", "model/config.json")


def turntree(*arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("turntree")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"quickstart smoke: {message}")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="turntree-quickstart-") as tmp:
        run = Path(tmp) / "run"
        turntree("quickstart", f"out={run}", "seed=3", *SMALL)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        check(set(summary) >= KEYS, f"summary.json lacks {KEYS - set(summary)}")
        check(summary["generated_tokens"] > 0 and summary["n_questions"] > 0, f"nothing was generated: {summary}")
        missing = [name for name in FILES if not (run / name).is_file()]
        check(not missing, f"missing files: {missing}")
        check(any((run / "trees").glob("*.jsonl.zst")), "no rollout store")
        check(any((run / "tensorboard").glob("events*")), "no TensorBoard events")
        check(any((run / "checkpoints").glob("step-*")), "no checkpoint")
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        check(steps == [1, 2, 3], f"metrics.jsonl has steps {steps}, expected 1, 2, 3")
        again = turntree("view", str(run), "--list")
        check("step" in again, "`turntree view --list` lists nothing")
        print(f"quickstart smoke passed: EM {summary['em_before']:.3f} -> {summary['em_after']:.3f}")


if __name__ == "__main__":
    main()
