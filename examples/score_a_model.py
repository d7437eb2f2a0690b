"""Score a Hugging Face model folder on a questions file, from Python.

    python examples/score_a_model.py MODEL_FOLDER QUESTIONS CORPUS [OUT]

Without arguments an untrained tiny model plays a few questions of a generated world.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from turntree.agents import Dialogue, load_model
from turntree.agents.engines import HFEngine, SamplingParams
from turntree.envs import Limits as EnvLimits
from turntree.envs import SearchQACore
from turntree.envs.datasets import load_questions
from turntree.envs.worlds import generate_world
from turntree.search_backend import BM25Backend
from turntree.trainers.evaluate import Evaluation, evaluate
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.rollout import Limits


def score(model_folder: Path, questions: Path, corpus: Path, *, turn_tokens: int = 128) -> Evaluation:
    """Greedy, one trajectory a question, four turns, three passages a search."""
    model, tokenizer = load_model(model_folder)
    core = SearchQACore(BM25Backend.from_corpus(corpus), limits=EnvLimits(max_turns=4, top_k=3, on_length="correct"))
    return evaluate(
        load_questions(questions),
        core=core,
        engine=HFEngine(model, tokenizer),
        dialogue=Dialogue(tokenizer),
        sampling=SamplingParams(max_tokens=turn_tokens, temperature=0.0, stop=core.grammar.stop),
        limits=Limits(max_turn_tokens=turn_tokens, max_context_tokens=2048),
    )


def report(result: Evaluation, out: Path) -> None:
    summary = result.summary()
    result.save(out)
    for key in ("em", "f1"):
        print(f"{key} {summary[key]:.3f} [{summary[f'{key}_low']:.3f}, {summary[f'{key}_high']:.3f}]")
    print(f"{summary['n']} questions, {summary['failed']} failed -> {out / 'evaluation.json'}")


def main(arguments: list[str]) -> None:
    if len(arguments) not in (0, 3, 4):
        sys.exit(__doc__)
    if arguments:
        model, questions, corpus, *out = map(Path, arguments)
        report(score(model, questions, corpus), out[0] if out else Path("runs/score"))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world = generate_world("quickstart", seed=0, questions=4).save(folder / "world")
        model = write_tiny_model(folder / "model", seed=0)
        result = score(model, world / "questions.jsonl", world / "corpus.jsonl", turn_tokens=16)
        report(result, folder / "score")


if __name__ == "__main__":
    main(sys.argv[1:])
