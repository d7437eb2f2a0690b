"""The tiny tokenizer and model: exact round trips, determinism, model folders."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.models import count_parameters, load_model, load_tokenizer, save_model
from turntree.agents.tiny import TAGS, build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import decode, encode, end_ids, special_tokens
from turntree.errors import ConfigError

WORDS = ["the", "director", "of", "is", "film", "中国", "Doc"]
SYLLABLES = ["mar", "tel", "qui"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(WORDS, SYLLABLES)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trips(text: str) -> None:
    tokenizer = _cached()
    assert decode(tokenizer, encode(tokenizer, text)) == text


@cache
def _cached() -> Any:
    return build_tokenizer(WORDS, SYLLABLES)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  a  b\n\n\n c ",
        "\ttab\r\n",
        "中文字",
        "🤗👩‍👩‍👧",
        "e\u0301\u200b\u0000",
        "▁x",
        "<|end|>",
        "don't",
        "<unk>",
    ],
)
def test_hard_texts_round_trip(tokenizer: Any, text: str) -> None:
    assert decode(tokenizer, encode(tokenizer, text)) == text
    assert tokenizer.eos_token_id not in encode(tokenizer, text)


def test_words_names_and_tags(tokenizer: Any) -> None:
    def pieces(text: str) -> list[str]:
        return [decode(tokenizer, [i]) for i in encode(tokenizer, text)]

    assert pieces("the director of Martelqui") == ["the", " director", " of", " Mar", "tel", "qui"]
    assert pieces("中国 中国") == ["中国", " 中国"]
    assert pieces("\n\nDoc 1") == ["\n\n", "Doc", " 1"]
    for tag in TAGS:
        assert pieces(tag) == [tag]
        assert tag not in special_tokens(tokenizer)
    assert pieces("<search>film</search>") == ["<search>", "film", "</search>"]


def test_specials(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == 0
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert end_ids(tokenizer) == {tokenizer.eos_token_id}


def test_vocabulary_is_deterministic() -> None:
    first = build_tokenizer(WORDS, SYLLABLES)
    second = build_tokenizer([*reversed(WORDS), "the", " "], [*reversed(SYLLABLES), "MAR"])
    assert first.get_vocab() == second.get_vocab()
    assert sorted(first.get_vocab().values()) == list(range(len(first)))


def test_model_is_seeded_and_leaves_the_global_state_alone(tokenizer: Any) -> None:
    before = torch.random.get_rng_state()
    first, second, other = (build_tiny_model(tokenizer, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [m.model.layers[0].mlp.up_proj.weight for m in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert count_parameters(first) == 221_664 + 96 * len(tokenizer)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    with pytest.raises(ConfigError, match="multiple"):
        build_tiny_model(tokenizer, hidden=30, heads=4)


def test_model_folder_round_trip(tokenizer: Any, tmp_path: Path) -> None:
    model = build_tiny_model(tokenizer, hidden=32, layers=1)
    folder = save_model(model, tokenizer, tmp_path / "a" / "model")
    save_model(model, tokenizer, folder)  # Replaces itself.
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    assert not list(folder.glob("*.bin"))
    loaded, loaded_tokenizer = load_model(folder)
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value)
    text = "<think>Martel 中 é</think>\n\n the"
    assert encode(loaded_tokenizer, text) == encode(tokenizer, text)
    assert decode(loaded_tokenizer, encode(tokenizer, text)) == text
    assert loaded_tokenizer.chat_template == tokenizer.chat_template
    assert (loaded_tokenizer.pad_token_id, loaded_tokenizer.eos_token_id) == (0, tokenizer.eos_token_id)
    assert load_model(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


class _Trap:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_pickled_weights_are_never_read(tokenizer: Any, tmp_path: Path) -> None:
    folder = save_model(build_tiny_model(tokenizer, hidden=32, layers=1), tokenizer, tmp_path / "model")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap(tmp_path / "mark")))
    load_model(folder)  # beside safetensors they are ignored
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected safetensors.*found pytorch_model\.bin"):
        load_model(folder)
    assert not (tmp_path / "mark").exists()


def test_the_size_of_heads_is_free(tokenizer: Any) -> None:
    model = build_tiny_model(tokenizer, hidden=96, layers=1, head_dim=32)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (4 * 32, 96)
    for wrong in (0, -2, 33):
        with pytest.raises(ConfigError, match="head_dim must be even"):
            build_tiny_model(tokenizer, hidden=96, layers=1, head_dim=wrong)


def test_bad_model_folders(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found none at"):
        load_model(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="dtype"):
        load_model(tmp_path, dtype="float8")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path)
    whole = save_model(build_tiny_model(tokenizer, hidden=32, layers=1), tokenizer, tmp_path / "whole")
    for device in ("gpu", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device '{device}'"):
            load_model(whole, device=device)
    (whole / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(whole)
    (whole / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot load"):
        load_model(whole)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        save_model(build_tiny_model(tokenizer, hidden=32, layers=1), tokenizer, tmp_path / "notes")
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_further_tokens_are_one_token_each_and_ordinary_text() -> None:
    plain, own = build_tokenizer(WORDS, SYLLABLES), build_tokenizer(WORDS, SYLLABLES, ["<finish>", "1843"])
    text = "in 1843 <finish></finish>"
    assert len(encode(own, text)) < len(encode(plain, text))
    assert [len(encode(own, token)) for token in ("<finish>", "1843")] == [1, 1]
    assert decode(own, encode(own, text)) == text
    assert "<finish>" not in special_tokens(own)
