# mypy: ignore-errors
# pyright: reportMissingImports=false
# What this imports is installed where it runs, not here.
"""Run in an environment that has trl: its trainer takes our environment for a step, and its tools play episodes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turntree.envs import Question
from turntree.errors import RetrievalError, ToolError
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "interop"))

from trl_environment import SearchEnvironment

QUESTIONS = [Question("a", "Who wrote Hamlet?", ("Shakespeare",)), Question("b", "谁写了《红楼梦》？", ("曹雪芹",))]
BACKEND = BM25Backend.from_passages([Passage("1", "Hamlet", "Shakespeare wrote it"), Passage("2", "红楼梦", "曹雪芹")])
HELLO = [{"role": "user", "content": "Hello"}]
REWARD = "rewards/SearchEnvironment/mean"


class Flaky:
    """The search, until it is switched off."""

    fingerprint = "flaky"
    down = False

    def search(self, queries: Any, *, k: int) -> Any:
        if self.down:
            raise RetrievalError("refused")
        return BACKEND.search(queries, k=k)


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens of Qwen's chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = (Path(str(trl.__file__)).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


def trainer(search: Flaky, folder: str) -> Any:
    words = tokenizer()
    size: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(words), num_key_value_heads=2, head_dim=8, **size))
    return trl.GRPOTrainer(
        model=model,
        processing_class=words,
        environment_factory=SearchEnvironment.of(questions=QUESTIONS, search=search, tool_retries=0, max_turns=3),
        train_dataset=Dataset.from_list([{"prompt": HELLO, "index": i % 2} for i in range(4)]),
        args=trl.GRPOConfig(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=8,
            report_to=[],
            use_cpu=True,
        ),
    )


def main() -> None:
    search = Flaky()
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(search, folder)
        made.train()
    assert [tool.__name__ for tool in made.tools] == ["answer", "search"], made.tools
    shown = made.processing_class.apply_chat_template(HELLO, tools=made.tools, tokenize=False)
    assert "Find passages about something." in shown
    assert "What to look for." in shown
    logged = [row[REWARD] for row in made.state.log_history if REWARD in row]
    assert set(logged) == {0.0}, made.state.log_history
    tools = made._sync_tool_dicts[0]
    environment = made.environments[0]
    assert "Hamlet" in environment.reset(index=0, prompt="a column of the data set")
    assert "Shakespeare wrote it" in tools["search"](query="Hamlet")
    assert tools["answer"](text="Shakespeare") == "The task is over."
    assert tools["search"](query="more") == "The task is over."
    assert environment.get_reward() == 1.0
    environment.reset(index=1)
    assert environment.get_reward() == 0.0
    environment.reset(index=1)
    search.down = True
    with pytest.raises(ToolError, match="refused"):
        tools["search"](query="红楼梦")
    assert environment.get_reward() is None
    print("trl", trl.__version__, "ok")


if __name__ == "__main__":
    main()
