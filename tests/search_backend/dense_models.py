"""Encoders for tests: real ones, tiny, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WORDS = [f"word{i}" for i in range(400)]


def write_static(folder: Path, *, dimension: int = 32, seed: int = 0, layout: str = "sentence-transformers") -> Path:
    """A static encoder over whole words, in the layout of sentence-transformers or of model2vec."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder.mkdir(parents=True)
    tokenizer: Any = Tokenizer(WordLevel({w: i for i, w in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    table = np.random.default_rng(seed).standard_normal((len(WORDS) + 1, dimension)).astype(np.float32)
    table[0] = 0
    if layout == "model2vec":
        save_file({"embeddings": table}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"model_type": "model2vec"}))
    else:
        save_file({"embedding.weight": table}, folder / "model.safetensors")
        rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}]
        (folder / "modules.json").write_text(json.dumps(rows))
    return folder


def write_bert(folder: Path, *, head: bool = False, seed: int = 0) -> Path:
    """A plain Hugging Face folder of a BERT of one layer; with ``head`` a sequence classifier with one output."""
    import torch
    import transformers as library

    transformers: Any = library
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", "query", "passage", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = transformers.BertForSequenceClassification if head else transformers.BertModel
        kind(config).eval().save_pretrained(folder)
    return folder
