# mypy: ignore-errors
# pyright: reportMissingImports=false
# What this imports is installed where it runs, not here.
"""Run in an environment that has trl: its trainers take our pairs and tokens for a step, with the masks as written."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import load_dataset

sys.path.insert(0, str(Path(__file__).parent))

from in_trl import tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from turntree.trainers.exchange import IGNORED, Export, export_run
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree


def stored_run(folder: Path, words: Any) -> Path:
    """A search that a right and a wrong answer share, in tokens of ``words``."""

    def ids(text: str) -> tuple[int, ...]:
        return tuple(words(text)["input_ids"])

    def turn(text: str, **options: Any) -> Node:
        return Node(text=text, turn_ids=ids(text), logprobs=(-1.0,) * len(ids(text)), **options)

    root = Node(observation="Who?", observation_ids=ids("Who?"))
    search = root.add_child(turn("<search>x</search>", observation="found", observation_ids=ids("found")))
    search.add_child(turn("<answer>me</answer>", status="answered", reward=1.0))
    search.add_child(turn("<answer>you</answer>", status="answered", reward=0.0, ordinal=1))
    run = RunFolder.create(folder / "run", {})
    TreeStore(run.trees).write(1, [Group("p", [Tree(root, "p")])])
    return run.path


def model(words: Any) -> Any:
    size: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_key_value_heads=2, head_dim=8, **size))


def main() -> None:
    words = tokenizer()
    common: Any = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": [], "use_cpu": True}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = stored_run(folder, words)
        for form in ("messages", "implicit"):
            export_run(run, folder / f"{form}.jsonl", Export("pairs", form=form))
            rows = load_dataset("json", data_files=str(folder / f"{form}.jsonl"), split="train")
            arguments = trl.DPOConfig(output_dir=str(folder / "dpo"), **common)
            made = trl.DPOTrainer(
                model(words), ref_model=model(words), args=arguments, train_dataset=rows, processing_class=words
            )
            row = made.train_dataset[0]
            # The template adds what it likes (Qwen3: an empty thought), so the turn is in it, not all of it.
            assert "<answer>me</answer>" in words.decode(row["chosen_ids"])
            assert "found" in words.decode(row["prompt_ids"])
            made.train()
        export_run(run, folder / "tokens.jsonl", Export("tokens"))
        rows = load_dataset("json", data_files=str(folder / "tokens.jsonl"), split="train")
        arguments = trl.SFTConfig(output_dir=str(folder / "sft"), **common)
        made = trl.SFTTrainer(model(words), args=arguments, train_dataset=rows, processing_class=words)
        batch = made.data_collator([made.train_dataset[0]])
        trained = [
            i for i, label in zip(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) if label != IGNORED
        ]
        assert words.decode(trained) == "<search>x</search><answer>me</answer>", words.decode(trained)
        assert batch["input_ids"][0].tolist() == rows[0]["input_ids"]
        made.train()
        export_run(run, folder / "messages.jsonl", Export("messages"))
        rows = load_dataset("json", data_files=str(folder / "messages.jsonl"), split="train")
        arguments = trl.SFTConfig(output_dir=str(folder / "sft"), **common)
        trl.SFTTrainer(model(words), args=arguments, train_dataset=rows, processing_class=words).train()
    print("trl", trl.__version__, "ok")


if __name__ == "__main__":
    main()
