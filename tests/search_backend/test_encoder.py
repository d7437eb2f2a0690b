from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.search_backend.dense_models import WORDS, write_bert, write_static
from turntree.errors import ConfigError, DataError
from turntree.search_backend import Passage
from turntree.search_backend.encoder import Encoder, EncoderSettings, TransformerEncoder, load_encoder, passage_text
from turntree.search_backend.families import FAMILIES, find_family, read_layout
from turntree.search_backend.static_encoder import StaticEncoder

TEXTS = ["word1 word2", "word3", "word4 word5 word6 word7 word8 word9", "word10 word11 word12"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "e5-tiny")


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> StaticEncoder:
    return StaticEncoder(EncoderSettings(str(write_static(tmp_path_factory.mktemp("static") / "words"))))


def hidden(folder: Path, text: str) -> Any:
    """States of the last layer, straight from transformers: ``[tokens, 32]``."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModel.from_pretrained(folder)
    with torch.inference_mode():
        return model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


# -- families -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("e5-base-v2", "e5"),
        ("intfloat_multilingual-e5-small", "e5"),
        ("multilingual-e5-large-instruct", "e5-instruct"),
        ("bge-small-en-v1.5", "bge-en"),
        ("bge-large-zh-v1.5", "bge-zh"),
        ("bge-m3", "bge-m3"),
        ("all-MiniLM-L6-v2", "minilm"),
    ],
)
def test_the_name_tells_the_family(tmp_path: Path, name: str, family: str) -> None:
    for folder, config in ((tmp_path / name, {}), (tmp_path / "model", {"_name_or_path": f"org/{name}"})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "bert", **config}))
        assert find_family(read_layout(folder), "auto") is FAMILIES[family]


def test_a_name_that_tells_nothing_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "some-bert-fine5"
    folder.mkdir()
    with pytest.raises(ConfigError, match="expected a folder with an encoder"):
        read_layout(folder)
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match=r"cannot tell the prefixes and pooling .* one of e5, e5-instruct, bge-en"):
        find_family(read_layout(folder), "auto")
    assert find_family(read_layout(folder), "bge-en").pooling == "cls"
    with pytest.raises(ConfigError, match="found 'bgee'"):
        find_family(read_layout(folder), "bgee")
    (folder / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    assert find_family(read_layout(folder), "auto").name == "plain"
    for name, text, message in (
        ("config_sentence_transformers.json", '{"prompts": ["query: "]}', "expected JSON objects in"),
        ("config.json", "[1]", "expected a dict in"),
        ("modules.json", '["a"]', "expected JSON objects in"),
        ("modules.json", '{"type": "b"}', "expected a list in"),
        ("modules.json", "[", "expected JSON in"),
    ):
        (folder / name).write_text(text)
        with pytest.raises(DataError, match=message):
            read_layout(folder)
    with pytest.raises(ConfigError, match="expected a folder with an encoder"):
        read_layout(folder / "config.json")


def test_a_reranker_is_no_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "bge-reranker-base"
    folder.mkdir()
    (folder / "config.json").write_text("{}\n")
    (folder / "config.json").write_text('{"model_type": "xlm-roberta"}')
    with pytest.raises(ConfigError, match="cross-encoder"):
        find_family(read_layout(folder), "auto")


# -- transformers ---------------------------------------------------------------------------------------------


def test_e5_gets_its_prefixes_mean_pooling_and_unit_length(bert: Path) -> None:
    encoder = load_encoder(str(bert))
    assert isinstance(encoder, TransformerEncoder)
    assert isinstance(encoder, Encoder)
    found = encoder.encode_queries(TEXTS)
    assert found.shape == (4, encoder.dimension) == (4, 32)
    assert found.dtype == np.float32
    for row, text in zip(found, TEXTS):
        np.testing.assert_allclose(row, unit(hidden(bert, f"query: {text}").mean(0)), atol=2e-6)
    passage = Passage("1", "word20", "word21 word22")
    wanted = unit(hidden(bert, "passage: word20\nword21 word22").mean(0))
    np.testing.assert_allclose(encoder.encode_passages([passage])[0], wanted, atol=2e-6)
    about = encoder.describe()
    assert about["family"] == "e5"
    assert (about["query_prefix"], about["pooling"], about["max_length"]) == ("query: ", "mean", 64)
    assert json.loads(json.dumps(about)) == about
    assert encoder.encode_queries([]).shape == (0, 32)
    again = pickle.loads(pickle.dumps(encoder))
    assert again.fingerprint == encoder.fingerprint


def test_bge_pools_the_first_token_behind_its_instruction(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bge-tiny-en"
    shutil.copytree(bert, folder)
    encoder = load_encoder(EncoderSettings(str(folder), normalize=False))
    prefix = "Represent this sentence for searching relevant passages: "
    np.testing.assert_allclose(
        encoder.encode_queries(["word1 word2"])[0], hidden(folder, f"{prefix}word1 word2")[0], atol=2e-6
    )
    np.testing.assert_allclose(
        encoder.encode_passages([Passage("1", "", "word1")])[0], hidden(folder, "word1")[0], atol=2e-6
    )


def test_settings_override_the_family_and_show_in_the_fingerprint(bert: Path) -> None:
    plain = EncoderSettings(str(bert), query_prefix="", pooling="cls", max_length=5, batch_size=2)
    encoder = load_encoder(plain)
    wanted = hidden(bert, "word1 word2 word3")
    np.testing.assert_allclose(encoder.encode_queries(["word1 word2 word3 word4"])[0], unit(wanted[0]), atol=2e-6)
    options: list[dict[str, Any]] = [
        {}, {"query_prefix": ""}, {"pooling": "cls"}, {"max_length": 5}, {"dtype": "bfloat16"},
    ]  # fmt: skip
    fingerprints = {load_encoder(EncoderSettings(str(bert), **given)).fingerprint for given in options}
    assert len(fingerprints) == 5
    assert load_encoder(EncoderSettings(str(bert), batch_size=3)).fingerprint in fingerprints


def test_half_precision_is_close_and_gives_float32(bert: Path) -> None:
    exact = load_encoder(str(bert)).encode_queries(TEXTS)
    for dtype in ("bfloat16", "float16"):
        found = load_encoder(EncoderSettings(str(bert), dtype=dtype)).encode_queries(TEXTS)
        assert found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        assert (found * exact).sum(1).min() > 0.999


def test_stored_prompts_are_used_unless_the_family_is_named(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e5-own"
    shutil.copytree(bert, folder)
    stored = {"prompts": {"query": "word9 ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(stored))
    from turntree.search_backend.encoder import choose_prefixes

    layout = read_layout(folder)
    auto, named = EncoderSettings(str(folder)), EncoderSettings(str(folder), family="e5")
    assert choose_prefixes(auto, layout, FAMILIES["e5"]) == ("word9 ", "passage: ")
    assert choose_prefixes(named, layout, FAMILIES["e5"]) == ("query: ", "passage: ")


def test_what_cannot_be_an_encoder_is_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_length=65 is more than the 64 tokens"):
        load_encoder(EncoderSettings(str(bert), max_length=65))
    with pytest.raises(DataError, match="a device that exists"):
        load_encoder(EncoderSettings(str(bert), device="cuda:77"))
    broken = tmp_path / "e5-broken"
    shutil.copytree(bert, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(DataError, match="safetensors weights"):
        load_encoder(str(broken))
    wrong: list[dict[str, Any]] = [{"pooling": "middle"}, {"dtype": "int8"}, {"batch_size": 0}]
    for bad in wrong:
        with pytest.raises(ConfigError, match="encoder: expected"):
            EncoderSettings(str(bert), **bad)


# -- static ---------------------------------------------------------------------------------------------------


def test_a_static_vector_is_the_mean_of_its_words(tmp_path: Path, static: StaticEncoder) -> None:
    table = static._table
    np.testing.assert_allclose(static.encode_queries(["word1 word3"])[0], unit(table[[2, 4]].mean(0)), atol=1e-6)
    assert not static.encode_queries([""]).any()
    twin = load_encoder(str(write_static(tmp_path / "m2v", layout="model2vec")))
    np.testing.assert_array_equal(twin.encode_queries(TEXTS), static.encode_queries(TEXTS))
    with pytest.raises(ConfigError, match="a static encoder averages"):
        load_encoder(EncoderSettings(str(tmp_path / "m2v"), pooling="cls"))


def test_static_vectors_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    import sentence_transformers

    folder = write_static(tmp_path / "words")
    theirs: Any = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    wanted = theirs.encode(TEXTS, normalize_embeddings=True)
    np.testing.assert_allclose(load_encoder(str(folder)).encode_queries(TEXTS), wanted, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(st.sampled_from("word 0123456789\ud800é中"), max_size=20), min_size=1, max_size=6))
def test_a_static_vector_does_not_depend_on_its_batch(static: StaticEncoder, texts: list[str]) -> None:
    together = static.encode_queries(texts)
    alone = np.concatenate([static.encode_queries([text]) for text in texts])
    np.testing.assert_array_equal(together, alone)
    assert np.isfinite(together).all()


def test_model2vec_mappings_and_weights_are_folded_in(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    folder = write_static(tmp_path / "m2v", layout="model2vec")
    table = load_file(folder / "model.safetensors")["embeddings"]
    mapping = np.arange(len(table))[::-1].astype(np.int32).copy()
    weights = np.linspace(0.5, 1.5, len(table))
    save_file({"embeddings": table, "mapping": mapping, "weights": weights}, folder / "model.safetensors")
    found = load_encoder(EncoderSettings(str(folder), normalize=False)).encode_queries([WORDS[4]])[0]
    np.testing.assert_allclose(found, table[mapping[5]] * weights[5], rtol=1e-6)
    save_file({"other": table}, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"embedding.weight or embeddings .* found \['other'\]"):
        load_encoder(str(folder))


def test_the_title_stands_on_its_own_line() -> None:
    assert passage_text(Passage("1", "T", "text")) == "T\ntext"
    assert passage_text(Passage("1", "", "text")) == "text"
