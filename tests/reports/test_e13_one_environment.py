"""Retriever and trainer share an environment: the core needs neither FAISS nor Java, and errors name the extra."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from turntree.errors import ConfigError, MissingExtraError
from turntree.search_backend.encoder import EncoderSettings, load_encoder
from turntree.search_backend.faiss_index import import_faiss, make_index, on_gpus

WITHOUT = """
import sys
for name in ("faiss", "sentence_transformers", "vllm", "pyserini", "jnius"):
    sys.modules[name] = None
from turntree.search_backend import BM25Backend, Passage
import turntree.search_backend.dense, turntree.search_backend.hybrid, turntree.search_backend.rerank
print(BM25Backend.from_passages([Passage("1", "Paris", "capital of France")]).search(["France"], k=1)[0][0].id)
"""


def test_e13_the_core_declares_and_needs_no_faiss_java_or_vllm() -> None:
    core = [line.lower() for line in requires("turntree") or [] if "extra ==" not in line]
    assert core
    assert not [line for line in core if any(name in line for name in ("faiss", "pyserini", "vllm", "jnius"))]
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "1", done.stderr


def test_e13_what_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "e5").mkdir()
    (tmp_path / "e5" / "config.json").write_text('{"model_type": "bert"}')
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turntree\[dense\]', or a faiss-gpu package"):
        import_faiss()
    with pytest.raises(MissingExtraError, match=r"pip install 'turntree\[dense\]'"):
        load_encoder(EncoderSettings(str(tmp_path / "e5")))


def test_e13_a_cpu_build_of_faiss_says_so_when_a_gpu_is_asked_for() -> None:
    faiss = pytest.importorskip("faiss")
    if faiss.get_num_gpus():
        pytest.skip("this FAISS sees a GPU")
    with pytest.raises(ConfigError, match=r"get_num_gpus\(\) = 0 \(FAISS .*\); install faiss-gpu"):
        on_gpus(make_index("Flat", 8), gpus="shard", half=False)
