"""Runs that search an index folder, and what the doctor says of a corpus."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.envs.search_qa import SearchQACore
from turntree.envs.tools import SearchTool
from turntree.errors import ConfigError, SearchIndexError
from turntree.search_backend import Passage, save_corpus
from turntree.search_backend.index import build_index
from turntree.search_backend.lexical import MappedBM25
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor import diagnose
from turntree.trainers.task import build_task


@pytest.fixture(scope="module")
def index(bed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("index") / "bm25"
    build_index(bed.world / "corpus.jsonl", folder, kind="bm25")
    return folder


def backend(config: RunConfig, **split: Any) -> Any:
    core = build_task(config, None, **split).core
    assert isinstance(core, SearchQACore)
    tool = core.tools["search"]
    assert isinstance(tool, SearchTool)
    return tool.backend


def test_a_run_searches_an_index_folder_as_it_searches_the_corpus(
    make_config: Callable[..., RunConfig], index: Path
) -> None:
    disk = backend(make_config(f"search.index={index}", "search.args.engine=numpy"))
    memory = backend(make_config())
    assert isinstance(disk, MappedBM25)
    assert disk.fingerprint == memory.fingerprint
    assert disk.search(["where", "who is"], k=3) == memory.search(["where", "who is"], k=3)


def test_an_index_may_stand_for_the_corpus_of_validation(
    make_config: Callable[..., RunConfig], bed: Any, index: Path
) -> None:
    config = make_config(f"env.dev_questions={bed.world}", f"env.dev_corpus={index}")
    assert isinstance(backend(config, split="dev"), MappedBM25)


def test_what_contradicts_an_index_is_refused(
    make_config: Callable[..., RunConfig], bed: Any, index: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"names kind and corpus itself; leave search.corpus=.* out"):
        backend(make_config(f"search.index={index}", f"search.corpus={bed.world / 'corpus.jsonl'}"))
    with pytest.raises(ConfigError, match=r"leave search.backend=users_rules:Down out"):
        backend(make_config(f"search.index={index}", "search.backend=users_rules:Down"))
    with pytest.raises(ConfigError, match=r"no index at search.index=.*nowhere"):
        backend(make_config(f"search.index={tmp_path / 'nowhere'}"))
    with pytest.raises(ConfigError, match="no search option 'k1'"):
        backend(make_config(f"search.index={index}", "search.args.k1=2"))
    with pytest.raises(SearchIndexError, match="expected a search index"):
        backend(make_config(f"search.index={tmp_path}"))


def test_the_doctor_says_what_fits_of_a_corpus(
    make_config: Callable[..., RunConfig], bed: Any, index: Path, tmp_path: Path
) -> None:
    checks = {c.name: c for c in diagnose(make_config(f"search.corpus={bed.world / 'corpus.jsonl'}"))}
    assert "passages" in checks["corpus"].found
    assert checks["search bm25"].means == "take this to begin with: nothing to build"
    assert "--kind bm25" in checks["search index bm25"].do
    assert "search index dense Flat" in checks
    save_corpus(tmp_path / "few.jsonl", [Passage(str(i), "", f"text {i}") for i in range(255)])
    few = {c.name for c in diagnose(make_config(f"search.corpus={tmp_path / 'few.jsonl'}"))}
    assert "search index dense SQ8" in few
    assert not any("PQ" in name for name in few)  # it could not be trained on these
    (line,) = [c for c in diagnose(make_config(f"search.index={index}")) if c.name == "index"]
    assert "bm25" in line.found
    failed = [c for c in diagnose(make_config(f"search.corpus={tmp_path / 'absent.jsonl'}")) if c.level == "fail"]
    assert [c.name for c in failed] == ["corpus"]
    shutil.copytree(index, tmp_path / "index")
    (tmp_path / "index" / "corpus" / "store.json").unlink()
    (line,) = [c for c in diagnose(make_config(f"search.index={tmp_path / 'index'}")) if c.level == "fail"]
    assert "expected a corpus store at" in line.means
