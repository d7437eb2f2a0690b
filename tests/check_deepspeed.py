"""One short run in two ranks against the same run in one process. Run by ``make smoke``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from turntree.agents.models import load_model
from turntree.envs.worlds import generate_world
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model

RULES = """
import zlib

from turntree.envs.core import Action
from turntree.envs.grammar import ParsedTurn
from turntree.envs.worlds.grammar import WorldGrammar


class Babble(WorldGrammar):
    fingerprint = "babble"
    stop = ("e", "a")

    def parse(self, text):
        answers = zlib.crc32(text.encode()) % 8 < 3
        return ParsedTurn(Action("answer", "yes") if answers else Action("search", text.strip() or "who"))


def busy(outcome):
    return len(outcome.observations) / 4
"""
"""A model with random weights searches and answers by these, and some of its trajectories are worth more."""

OPTIONS = (
    "algorithm=tree_grpo", "env.grammar=smoke_rules:Babble", "reward.name=smoke_rules:busy", "search.top_k=1",
    "sampling.max_turn_tokens=12", "sampling.max_context_tokens=400", "trainer.prompts_per_step=4", "trainer.steps=2",
    "trainer.prompts_per_update=2", "trainer.max_pack_tokens=300", "trainer.learning_rate=1e-3", "trainer.threads=1",
)  # fmt: skip


def check(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"deepspeed smoke: {message}")


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    logging.disable(logging.WARNING)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="turntree-deepspeed-smoke-") as tmp:
        folder = Path(tmp)
        generate_world("quickstart", seed=1, split="train", entities=80, questions=20).save(folder / "world")
        write_tiny_model(folder / "model", seed=0)
        (folder / "smoke_rules.py").write_text(RULES, encoding="utf-8")
        sys.path.insert(0, tmp)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": tmp}
        options = [*OPTIONS, f"model.path={folder / 'model'}", f"env.questions={folder / 'world'}"]
        spread = ["trainer.strategy=deepspeed", "trainer.ranks=2", "deepspeed.stage=3", f"out={folder / 'two'}"]
        command = [sys.executable, "-m", "turntree", "train", *options, *spread]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as ranks:
            train([*options, f"out={folder / 'one'}"])  # meanwhile
            said = ranks.communicate(timeout=300)[0]
        check(ranks.returncode == 0, f"the ranks ended with exit code {ranks.returncode}:\n{said}")
        one, two = (load_file(folder / name / "model" / "model.safetensors") for name in ("one", "two"))
        gap = max(float((one[name] - two[name]).abs().max()) for name in one)
        check(gap < 2e-4, f"weights of two ranks are off by {gap}")
        for a, b in zip(rows(folder / "one"), rows(folder / "two"), strict=True):
            for key in ("actor/loss", "actor/grad_norm", "critic/score/mean", "budget/generated_tokens"):
                check(abs(a[key] - b[key]) <= 1e-4 * max(1.0, abs(a[key])), f"{key}: {a[key]} in one, {b[key]} in two")
        check(rows(folder / "one")[-1]["actor/grad_norm"] > 0.01, "there was nothing to learn")
        model, _ = load_model(folder / "two" / "model")
        check(bool(torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()), "the exported model does not run")
    print(f"deepspeed smoke passed in {time.monotonic() - started:.0f} s: weights of two ranks within {gap:.1g} of one")


if __name__ == "__main__":
    main()
