from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.search_backend.dense_models import WORDS, write_bert
from turntree.errors import ConfigError, DataError, RetrievalError
from turntree.search_backend import BM25Backend, Passage, SearchBackend
from turntree.search_backend.rerank import CrossEncoderReranker, RerankBackend, RerankSettings, load_reranker

PASSAGES = [Passage(f"d{i}", WORDS[i], f"word0 {WORDS[i + 20]} {WORDS[i + 40]}") for i in range(12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("cross") / "tiny-cross-encoder", head=True)


@pytest.fixture(scope="module")
def reranker(model: Path) -> CrossEncoderReranker:
    return load_reranker(model)


def logit(model: Path, query: str, text: str) -> float:
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    scorer: Any = transformers.AutoModelForSequenceClassification.from_pretrained(model)
    with torch.inference_mode():
        return float(scorer.eval()(**tokenizer(query, text, return_tensors="pt")).logits[0, 0].sigmoid())


def test_scores_are_the_models_for_each_pair(model: Path, reranker: CrossEncoderReranker) -> None:
    found = reranker.score(["word1", "word2 word3"], [PASSAGES[:3], PASSAGES[5:6]])
    assert [len(scores) for scores in found] == [3, 1]
    for query, passages, scores in zip(["word1", "word2 word3"], [PASSAGES[:3], PASSAGES[5:6]], found):
        wanted = [logit(model, query, f"{p.title}\n{p.text}") for p in passages]
        assert scores == pytest.approx(wanted, abs=1e-5)
    assert reranker.score(["a", "b"], [[], []]) == [[], []]
    assert reranker.score([], []) == []
    with pytest.raises(RetrievalError, match="passages for each of 2 queries"):
        reranker.score(["a", "b"], [[]])


def test_a_backend_ranks_the_depth_and_keeps_k(model: Path, reranker: CrossEncoderReranker) -> None:
    inner = BM25Backend.from_passages(PASSAGES)
    backend = RerankBackend(inner, reranker, depth=8)
    assert isinstance(backend, SearchBackend)
    first, again = backend.search(["word0", "word0"], k=3)
    pool = inner.search(["word0"], k=8)[0]
    scores = dict(zip([p.id for p in pool], reranker.score(["word0"], [pool])[0]))
    assert [p.id for p in first] == sorted(scores, key=lambda id: -scores[id])[:3]
    assert [p.score for p in first] == [scores[p.id] for p in first]
    assert first == again
    assert len(backend.search(["word0"], k=12)[0]) == 12
    assert backend.search(["nothing"], k=3) == [[]]
    assert RerankBackend(inner, reranker, depth=9).fingerprint != backend.fingerprint
    twin = pickle.loads(pickle.dumps(backend))
    assert twin.fingerprint == backend.fingerprint
    with ThreadPoolExecutor(4) as pool_of_threads:
        queries = [f"word0 {word}" for word in WORDS[:8]]
        found = list(pool_of_threads.map(lambda q: twin.search([q], k=1)[0][0].id, queries))
    assert found == [backend.search([q], k=1)[0][0].id for q in queries]
    with pytest.raises(ConfigError, match="depth of at least 1"):
        RerankBackend(inner, reranker, depth=0)


class Constant:
    fingerprint = "constant"

    def score(self, queries: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        return [[1.0 for _ in mine] for mine in passages]


def test_equal_scores_keep_the_order_of_the_search() -> None:
    inner = BM25Backend.from_passages(PASSAGES)
    found = RerankBackend(inner, Constant()).search(["word0 word3"], k=5)[0]
    assert [p.id for p in found] == [p.id for p in inner.search(["word0 word3"], k=5)[0]]


def test_models_without_a_scoring_head_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a sequence classifier .* found \['BertModel'\]"):
        load_reranker(write_bert(tmp_path / "encoder"))
    with pytest.raises(ConfigError, match="expected a model folder"):
        load_reranker(tmp_path / "nowhere")
    three = tmp_path / "three"
    shutil.copytree(model, three)
    config = json.loads((three / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    (three / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"one output .* found 3 labels"):
        load_reranker(three)
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(DataError, match="safetensors weights"):
        load_reranker(broken)
    with pytest.raises(ConfigError, match="reranker: expected dtype"):
        RerankSettings(str(model), dtype="int4")


def test_settings_are_part_of_the_fingerprint(model: Path, reranker: CrossEncoderReranker) -> None:
    half = load_reranker(RerankSettings(str(model), dtype="bfloat16", max_length=32, batch_size=2))
    assert half.fingerprint != reranker.fingerprint
    assert half.score(["word1"], [PASSAGES])[0] == pytest.approx(reranker.score(["word1"], [PASSAGES])[0], abs=0.02)
    assert half.describe()["max_length"] == 32
