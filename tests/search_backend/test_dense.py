from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.search_backend.dense_models import WORDS, write_static
from turntree.errors import CapacityError, ConfigError, DataError, RetrievalError, SearchIndexError
from turntree.search_backend import Passage, SearchBackend, save_corpus
from turntree.search_backend.dense import DenseBackend, DenseSearch, open_faiss
from turntree.search_backend.embedding import VectorFile, embed_corpus
from turntree.search_backend.encoder import Encoder, load_encoder
from turntree.search_backend.faiss_index import (
    FlatHeader,
    import_faiss,
    index_shape,
    make_index,
    set_defaults,
    train_index,
)
from turntree.search_backend.index import build_index, check_fits, find_kind, open_index, open_store, read_manifest
from turntree.search_backend.store import CorpusStore
from turntree.search_backend.survey import Survey, survey

faiss: Any = pytest.importorskip("faiss")


def passages(count: int, seed: int = 0) -> list[Passage]:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 12)) for _ in range(count)]
    return [Passage(f"d{i}", WORDS[i % 400], text) for i, text in enumerate(texts)]


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 600 passages, its store and a static encoder."""
    root = tmp_path_factory.mktemp("dense")
    save_corpus(root / "corpus.jsonl", passages(600))
    CorpusStore.build(root / "corpus.jsonl", root / "store")
    write_static(root / "encoder")
    return root


def build(bed: Path, out: Path, **options: Any) -> DenseBackend:
    given = {"encoder": str(bed / "encoder"), **options}
    found = build_index(bed / "store", out, kind="dense", options=given)
    assert isinstance(found, DenseBackend)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def exact(bed: Path, queries: list[str], k: int) -> list[list[str]]:
    """Ids by numpy alone."""
    encoder, corpus = load_encoder(bed / "encoder"), list(CorpusStore.open(bed / "store"))
    scores = np.round((encoder.encode_queries(queries) @ encoder.encode_passages(corpus).T).astype(np.float64), 6)
    return [[corpus[i].id for i in np.argsort(-row, kind="stable")[:k]] for row in scores]


def ids(found: list[list[Passage]]) -> list[list[str]]:
    return [[p.id for p in row] for row in found]


# -- searching ------------------------------------------------------------------------------------------------


def test_a_flat_index_is_the_sorted_inner_product(bed: Path, tmp_path: Path) -> None:
    backend = build(bed, tmp_path / "flat")
    assert isinstance(backend, SearchBackend)
    queries = ["word1 word2 word3", "word77", "word1 word2 word3", "nothing known"]
    assert ids(backend.search(queries, k=7)) == exact(bed, queries, 7)
    assert ids(backend.search(["word5"], k=600)) == exact(bed, ["word5"], 600)
    assert len(backend.search(["word5"], k=5000)[0]) == len(backend) == 600
    scores = [p.score for p in backend.search(["word9 word10"], k=20)[0]]
    assert scores == sorted(scores, reverse=True)  # type: ignore[type-var]
    assert backend.search([], k=3) == []
    with pytest.raises(RetrievalError, match="a sequence of query strings"):
        backend.search("word1", k=3)
    with pytest.raises(RetrievalError, match="k >= 1"):
        backend.search(["word1"], k=0)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.sampled_from(WORDS[:6]), min_size=1, max_size=3), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_ties_keep_corpus_order_whatever_the_batch(
    bed: Path, texts: list[int], queries: list[list[str]], k: int
) -> None:
    """Corpora of few different texts: nearly everything is tied."""
    encoder = load_encoder(bed / "encoder")
    corpus = [Passage(str(i), "", WORDS[t]) for i, t in enumerate(texts)]
    index = make_index("Flat", encoder.dimension)
    index.add(encoder.encode_passages(corpus))
    backend = DenseBackend(corpus, index, encoder, identity={})
    asked = [" ".join(words) for words in queries]
    together = backend.search(asked, k=k)
    assert together == [backend.search([query], k=k)[0] for query in asked]
    for found in together:
        keys = [(-(p.score or 0.0), int(p.id)) for p in found]
        assert keys == sorted(keys)
        assert len(found) == min(k, len(corpus))
        worst = max(keys)
        everything = backend.search(asked[:1], k=len(corpus))[0] if found is together[0] else []
        assert all((-(p.score or 0.0), int(p.id)) > worst or p in found for p in everything)


@pytest.mark.parametrize(
    "factory", ["SQ8", "HNSW16", "IVF8,Flat", "IVF8,SQ8", "PCA16,Flat", "HNSW16,SQ8", "SQfp16", "IVF8,SQ4,RFlat"]
)
def test_other_indexes_find_what_the_exact_one_finds(bed: Path, tmp_path: Path, factory: str) -> None:
    backend = build(bed, tmp_path / "index", factory=factory)
    queries = [p.text for p in passages(600)[::30]]
    wanted = exact(bed, queries, 10)
    shared = [len(set(a) & set(b)) / 10 for a, b in zip(ids(backend.search(queries, k=10)), wanted)]
    assert np.mean(shared) > (0.3 if "PCA" in factory else 0.9)
    manifest = read_manifest(tmp_path / "index")
    assert list(manifest["files"]) == ["index.faiss"]
    assert manifest["built"]["encoder"]["fingerprint"] == load_encoder(bed / "encoder").fingerprint
    assert manifest["versions"]["faiss-cpu"]


def test_search_parameters_are_checked_and_enter_the_fingerprint(bed: Path, tmp_path: Path) -> None:
    ivf, hnsw = tmp_path / "ivf", tmp_path / "hnsw"
    build(bed, ivf, factory="IVF16,Flat")
    build(bed, hnsw, factory="HNSW16")
    assert read_manifest(ivf)["built"]["defaults"] == {"nprobe": 16}
    few, all_cells = open_index(ivf, nprobe=1), open_index(ivf, nprobe=16)
    query = ["word1 word2"]
    assert few.fingerprint != all_cells.fingerprint != open_index(ivf).fingerprint
    assert ids(all_cells.search(query, k=5)) == exact(bed, query, 5)
    assert len(few.search(query, k=600)[0]) < 600  # cells that are not probed are not searched
    assert len(open_index(hnsw, ef_search=8).search(query, k=5)[0]) == 5
    with pytest.raises(ConfigError, match="ef_search=4: expected nprobe for an IVF index"):
        open_index(ivf, ef_search=4)
    with pytest.raises(ConfigError, match="no search option 'nprob'"):
        open_index(ivf, nprob=4)
    wrong: list[dict[str, Any]] = [
        {"nprobe": -1}, {"nprobe": True}, {"mmap": 1}, {"threads": "2"}, {"gpu": "all"}, {"encoder": 3},
    ]  # fmt: skip
    for bad in wrong:
        with pytest.raises(ConfigError, match="dense search: expected"):
            open_index(ivf, **bad)
    with pytest.raises(ConfigError, match="memory_limit: expected a size such as 8GB"):
        open_index(ivf, memory_limit="plenty")


def test_backends_pickle_and_serve_threads(bed: Path, tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    backend = build(bed, tmp_path / "flat")
    twin = pickle.loads(pickle.dumps(backend))
    assert twin.fingerprint == backend.fingerprint
    queries = [p.text for p in passages(600)[::20]]
    wanted = backend.search(queries, k=5)
    with ThreadPoolExecutor(4) as pool:
        assert [found[0] for found in pool.map(lambda q: twin.search([q], k=5), queries)] == wanted


# -- building -------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from turntree.search_backend import embedding, dense_build, index
stage, at, corpus, out, encoder, factory = sys.argv[1:]
embedding.CHUNK = 100
dense_build._ADD = 128
def progress(name, done, total, note):
    if name == stage and done >= int(at):
        os.kill(os.getpid(), signal.SIGKILL)
index.build_index(corpus, out, kind="dense", options={"encoder": encoder, "factory": factory}, progress=progress)
"""


@pytest.mark.parametrize(
    ("factory", "stages"), [("Flat", ["embed 100", "embed 500"]), ("HNSW8", ["embed 300", "add 256"])]
)
def test_a_killed_build_goes_on_and_leaves_the_same_bytes(
    bed: Path, tmp_path: Path, factory: str, stages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turntree.search_backend.embedding.CHUNK", 100)
    monkeypatch.setattr("turntree.search_backend.dense_build._ADD", 128)
    build(bed, tmp_path / "whole", factory=factory)
    for stage in stages:
        arguments = [*stage.split(), str(bed / "store"), str(tmp_path / "killed"), str(bed / "encoder"), factory]
        command = [sys.executable, "-c", KILLED, *arguments]
        assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL
        with pytest.raises(SearchIndexError, match="unfinished build"):
            open_index(tmp_path / "killed")
    seen: list[tuple[str, int]] = []
    options = {"encoder": str(bed / "encoder"), "factory": factory}
    build_index(
        bed / "store",
        tmp_path / "killed",
        kind="dense",
        options=options,
        progress=lambda s, d, t, n: seen.append((s, d)),
    )
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert ("embed", 100) not in seen  # what was done was not done again


def test_vectors_made_with_another_encoder_are_not_gone_on_with(bed: Path, tmp_path: Path) -> None:
    corpus, encoder = passages(30), load_encoder(bed / "encoder")
    path, journal = tmp_path / "v.faiss", tmp_path / "embedding.json"
    embed_corpus(corpus, encoder, path, journal, progress=lambda *_: None)
    other = load_encoder(write_static(tmp_path / "other", seed=1))
    with pytest.raises(SearchIndexError, match="found those of"):
        embed_corpus(corpus, other, path, journal, progress=lambda *_: None)


class _Broken:
    dimension, fingerprint = 4, "broken"

    def describe(self) -> dict[str, Any]:
        return {}

    def encode_queries(self, queries: Any) -> Any:
        return np.ones((len(queries), 4), np.float32)

    def encode_passages(self, passages: Any) -> Any:
        found = np.ones((len(passages), 4), np.float32)
        found[2] = np.nan
        return found


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    broken: Encoder = _Broken()
    with pytest.raises(DataError, match=r"not finite for passage 'd2' \(row 2\)"):
        embed_corpus(passages(5), broken, tmp_path / "v", tmp_path / "j", progress=lambda *_: None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 40), st.integers(1, 24), st.integers(0, 45), st.integers(0, 3))
def test_a_vector_file_is_a_flat_faiss_index(
    tmp_path_factory: pytest.TempPathFactory, rows: int, dimension: int, count: int, seed: int
) -> None:
    vectors = np.random.default_rng(rows).standard_normal((rows, dimension)).astype(np.float32)
    path = tmp_path_factory.mktemp("v") / "v.faiss"
    header = FlatHeader.of(rows, dimension)
    path.write_bytes(header.bytes + vectors.tobytes())
    assert path.stat().st_size == header.file_bytes(rows, dimension)
    index = faiss.read_index(str(path))
    assert (index.ntotal, index.d, index.metric_type) == (rows, dimension, faiss.METRIC_INNER_PRODUCT)
    if rows:
        np.testing.assert_array_equal(index.reconstruct_n(0, rows), vectors)
    file = VectorFile(path, rows, dimension)
    np.testing.assert_array_equal(np.concatenate([*file.chunks(7), vectors[:0]]), vectors)
    sample = file.sample(count, seed)
    assert len(sample) == min(count, rows)
    assert {row.tobytes() for row in sample} <= {row.tobytes() for row in vectors}
    np.testing.assert_array_equal(sample, file.sample(count, seed))


def test_settings_are_checked_by_name(bed: Path, tmp_path: Path) -> None:
    kind, encoder = find_kind("dense"), str(bed / "encoder")
    with pytest.raises(ConfigError, match="needs an encoder: a model folder"):
        kind.settings({})
    with pytest.raises(ConfigError, match="no option 'facotry'"):
        kind.settings({"encoder": encoder, "facotry": "Flat"})
    with pytest.raises(ConfigError, match="expected seed of type int, found '1'"):
        kind.settings({"encoder": encoder, "seed": "1"})
    with pytest.raises(ConfigError, match="leave IDMap out"):
        kind.settings({"encoder": encoder, "factory": "IDMap,Flat"})
    with pytest.raises(ConfigError, match="factory='HSNW32': expected a FAISS index factory string"):
        kind.estimate(survey(bed / "store"), kind.settings({"encoder": encoder, "factory": "HSNW32"}))
    with pytest.raises(ConfigError, match="one passage for each of its 1024 cells, found 600"):
        build(bed, tmp_path / "index", factory="IVF1024,Flat")
    assert not list((tmp_path / "index" / "index").iterdir())  # known before anything is embedded


def test_an_encoder_that_changed_is_refused_and_one_that_moved_is_named(bed: Path, tmp_path: Path) -> None:
    folder = write_static(tmp_path / "encoder")
    build_index(bed / "store", tmp_path / "index", kind="dense", options={"encoder": str(folder)})
    folder.rename(tmp_path / "moved")
    assert open_index(tmp_path / "index", encoder=str(tmp_path / "moved")).search(["word1"], k=1)[0]
    other = write_static(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"found .* name its folder with encoder=DIR"):
        open_index(tmp_path / "index", encoder=str(other))


def test_kept_vectors_are_an_index_of_their_own(bed: Path, tmp_path: Path) -> None:
    build(bed, tmp_path / "index", factory="IVF8,SQ8", keep_vectors=True)
    store = CorpusStore.open(bed / "store")
    flat = open_faiss(store, tmp_path / "index" / "index" / "vectors.faiss", bed / "encoder")
    assert ids(flat.search(["word3 word4"], k=5)) == exact(bed, ["word3 word4"], 5)


# -- estimates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory", ["Flat", "SQ8", "HNSW16", "IVF64,Flat", "IVF64,PQ8np", "OPQ8,IVF16,PQ8np", "IDMap,Flat"]
)
def test_the_size_of_an_index_is_told_before_it_is_built(tmp_path: Path, factory: str) -> None:
    vectors = np.random.default_rng(0).standard_normal((4000, 64)).astype(np.float32)
    told = index_shape(make_index(factory, 64), 4000)
    index = make_index(factory, 64)
    if not index.is_trained:
        sample = vectors[:1500]
        inner = faiss.try_extract_index_ivf(index)
        if "PQ" in factory and inner is not None:
            faiss.downcast_index(inner).pq.cp.niter = 1
        if "OPQ" in factory:
            faiss.downcast_VectorTransform(faiss.downcast_index(index).chain.at(0)).niter = 1
        index.train(sample)
    index.add_with_ids(vectors, np.arange(4000)) if "IDMap" in factory else index.add(vectors)
    faiss.write_index(index, str(tmp_path / "index"))
    size = (tmp_path / "index").stat().st_size
    codebooks = 256 * 64 * 4 if "PQ" in factory else 0
    assert abs(told.bytes(4000) + codebooks - size) < 0.05 * size + 2000
    assert set_defaults(make_index(factory, 64)).keys() <= {"nprobe", "ef_search"}


def test_alternatives_are_smaller_and_can_be_built(bed: Path, tmp_path: Path) -> None:
    kind = find_kind("dense")
    chosen = kind.settings({"encoder": str(bed / "encoder"), "factory": "HNSW64", "max_length": 128})
    sample = tuple(passages(50))
    wiki = Survey(21_015_324, 13_600_000_000, True, sample)
    ways = [dict(way) for way in kind.alternatives(wiki, chosen)]
    needs = [kind.estimate(wiki, kind.settings(way)) for way in [{**ways[0], "factory": "HNSW64"}, *ways]]
    assert all(way["max_length"] == 128 for way in ways)
    assert [n.mapped for n in needs] == sorted((n.mapped for n in needs), reverse=True)
    with pytest.raises(CapacityError, match=r"what would fit: --kind dense --set encoder=.* --set factory=Flat"):
        check_fits(kind, wiki, chosen, tmp_path, memory_limit=4 * 10**9, disk_limit=10**12)
    few = Survey(255, 10_000, True, sample)  # a product quantiser cannot be trained on these
    assert [way["factory"] for way in kind.alternatives(few, chosen)] == ["Flat", "SQ8"]


# -- peers' files ---------------------------------------------------------------------------------------------


def bare(bed: Path, path: Path, factory: str = "Flat", metric: int | None = None, count: int = 600) -> Path:
    """A FAISS file as a peer writes it."""
    encoder = load_encoder(bed / "encoder")
    index = faiss.index_factory(encoder.dimension, factory, faiss.METRIC_INNER_PRODUCT if metric is None else metric)
    index.add(encoder.encode_passages(list(CorpusStore.open(bed / "store")))[:count])
    faiss.write_index(index, str(path))
    return path


@pytest.mark.parametrize(("name", "factory"), [("e5_Flat.index", "Flat"), ("e5_HNSW64.index", "HNSW64")])
@pytest.mark.parametrize("mmap", [True, False])
def test_bare_files_of_peers_are_read(bed: Path, tmp_path: Path, name: str, factory: str, mmap: bool) -> None:
    path = bare(bed, tmp_path / name, factory)
    corpus = CorpusStore.open(bed / "store")
    backend = open_faiss(corpus, path, bed / "encoder", search=DenseSearch(mmap=mmap))
    queries = ["word1 word2", "word40 word41"]
    assert ids(backend.search(queries, k=3)) == exact(bed, queries, 3)
    adopted = build(bed, tmp_path / "index", faiss_file=str(path))
    assert ids(adopted.search(queries, k=3)) == exact(bed, queries, 3)
    assert (tmp_path / "index" / "index" / "index.faiss").is_symlink()


def test_an_l2_file_gives_the_same_order(bed: Path, tmp_path: Path) -> None:
    path = bare(bed, tmp_path / "l2.index", metric=faiss.METRIC_L2)
    backend = open_faiss(CorpusStore.open(bed / "store"), path, bed / "encoder")
    assert ids(backend.search(["word8 word9"], k=4)) == exact(bed, ["word8 word9"], 4)


def test_a_file_with_ids_of_its_own_finds_rows_or_is_refused(bed: Path, tmp_path: Path) -> None:
    corpus, encoder = CorpusStore.open(bed / "store"), load_encoder(bed / "encoder")
    vectors = encoder.encode_passages(list(corpus))

    def mapped(first: int) -> Path:
        index = faiss.IndexIDMap(faiss.IndexFlatIP(encoder.dimension))
        index.add_with_ids(vectors[::-1].copy(), np.arange(first, first + 600)[::-1].copy())
        faiss.write_index(index, str(tmp_path / "mapped.index"))
        return tmp_path / "mapped.index"

    query = ["word8 word9"]
    assert ids(open_faiss(corpus, mapped(0), encoder).search(query, k=4)) == exact(bed, query, 4)
    for first in (1000, -1000):
        with pytest.raises(SearchIndexError, match=r"row numbers of the corpus's 600 passages .* ids of its own"):
            open_faiss(corpus, mapped(first), encoder).search(query, k=4)
    with pytest.raises(SearchIndexError, match="ids of its own"):
        build(bed, tmp_path / "index", faiss_file=str(mapped(1000)))


def test_a_file_of_another_metric_is_refused(bed: Path, tmp_path: Path) -> None:
    path = bare(bed, tmp_path / "l1.index", metric=faiss.METRIC_L1)
    with pytest.raises(SearchIndexError, match="inner products or squared Euclidean distances, found FAISS's metric"):
        open_faiss(CorpusStore.open(bed / "store"), path, bed / "encoder")


def test_rotations_are_trained_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    sample = np.random.default_rng(0).standard_normal((300, 8), dtype=np.float32)
    index = make_index("OPQ2,IVF2,PQ2", 8)
    train_index(index, sample, "OPQ2,IVF2,PQ2")
    index.add(sample)
    assert index.ntotal == 300
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


SHORT_OF_MEMORY = """
import resource, sys
from pathlib import Path
from turntree.errors import CapacityError
from turntree.search_backend.faiss_index import import_faiss, read_index

import_faiss()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
try:
    read_index(Path(sys.argv[1]), mmap=False, rows=int(sys.argv[2]))
except CapacityError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="limits the memory of a process as Linux does")
def test_too_little_memory_for_an_index_that_is_read_whole(tmp_path: Path) -> None:
    rows, path = 10**6, tmp_path / "large.index"
    header = FlatHeader.of(rows, 64)
    path.write_bytes(header.bytes)
    os.truncate(path, header.file_bytes(rows, 64))  # 256 MB that take no place on disk
    command = [sys.executable, "-c", SHORT_OF_MEMORY, str(path), str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "too little memory to read the index, a file of 256 MB; leave mmap=true" in done.stdout, done.stderr


def test_files_of_another_corpus_or_encoder_are_refused(bed: Path, tmp_path: Path) -> None:
    corpus = CorpusStore.open(bed / "store")
    short = bare(bed, tmp_path / "short.index", count=599)
    with pytest.raises(SearchIndexError, match="each of the corpus's 600 passages, found 599"):
        open_faiss(corpus, short, bed / "encoder")
    narrow = write_static(tmp_path / "narrow", dimension=16)
    whole = bare(bed, tmp_path / "whole.index")
    with pytest.raises(SearchIndexError, match=r"expected vectors of 16 dimensions .* found 32"):
        open_faiss(corpus, whole, narrow)
    (tmp_path / "junk.index").write_bytes(b"<html>" * 99)
    with pytest.raises(SearchIndexError, match="expected a FAISS index"):
        open_faiss(corpus, tmp_path / "junk.index", bed / "encoder")
    whole.write_bytes(whole.read_bytes()[:5000])
    with pytest.raises(SearchIndexError, match="expected a FAISS index"):
        open_faiss(corpus, whole, bed / "encoder")
    stranger = write_static(tmp_path / "stranger", seed=9)
    right_size = bare(bed, tmp_path / "right.index")
    options = {"encoder": str(stranger), "faiss_file": str(right_size)}
    with pytest.raises(SearchIndexError, match="check the encoder, its prefixes"):
        build_index(bed / "store", tmp_path / "index", kind="dense", options=options)


# -- GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(faiss.get_num_gpus()), reason="this FAISS sees a GPU")
@pytest.mark.parametrize("gpu", ["one", "shard"])
def test_without_a_gpu_there_is_an_error_not_a_slow_index(bed: Path, tmp_path: Path, gpu: str) -> None:
    build(bed, tmp_path / "flat")
    with pytest.raises(ConfigError, match=r"get_num_gpus\(\) = 0"):
        open_index(tmp_path / "flat", gpu=gpu)


@pytest.mark.skipif(not faiss.get_num_gpus(), reason="needs a FAISS that sees a GPU")
@pytest.mark.parametrize(("gpu", "half"), [("one", False), ("shard", False), ("shard", True)])
def test_gpus_find_what_the_cpu_finds(bed: Path, tmp_path: Path, gpu: str, half: bool) -> None:
    build(bed, tmp_path / "flat")
    found = open_index(tmp_path / "flat", gpu=gpu, gpu_half=half).search(["word1 word2"], k=5)
    assert set(ids(found)[0]) == set(exact(bed, ["word1 word2"], 5)[0])


# -- the real encoder -----------------------------------------------------------------------------------------


def test_the_module_does_not_import_faiss_or_torch() -> None:
    code = (
        "import sys, turntree.search_backend.dense, turntree.search_backend.hybrid, turntree.search_backend.rerank\n"
        "assert not {'faiss', 'torch', 'sentence_transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONSAFEPATH": "1"})
    assert import_faiss() is faiss


def test_the_store_of_an_index_is_the_one_it_was_built_from(bed: Path, tmp_path: Path) -> None:
    build(bed, tmp_path / "flat")
    assert open_store(tmp_path / "flat").fingerprint == CorpusStore.open(bed / "store").fingerprint
    assert json.loads((tmp_path / "flat" / "manifest.json").read_text())["settings"]["factory"] == "Flat"
