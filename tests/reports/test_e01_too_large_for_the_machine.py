"""An index that cannot fit is refused before anything is loaded, with what it needs and what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from turntree.cli import cli
from turntree.errors import CapacityError
from turntree.search_backend import Passage, save_corpus
from turntree.search_backend.index import build_index, check_fits, find_kind
from turntree.search_backend.lexical import BM25Kind
from turntree.search_backend.survey import Estimate, Survey

PASSAGES = [Passage(str(i), f"Title {i}", f"text number{i} " * 20) for i in range(40)]


def test_e01_the_command_line_estimates_and_refuses(tmp_path: Path) -> None:
    save_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    command = ["index", "build", "--corpus", str(tmp_path / "corpus.jsonl"), "--out", str(tmp_path / "index")]
    refused = CliRunner().invoke(cli, [*command, "--memory-limit", "50MB"])
    assert isinstance(refused.exception, CapacityError)
    assert "of memory, found 50 MB" in str(refused.exception)
    assert "build: about" in refused.output
    assert not (tmp_path / "index").exists()
    assert (
        CliRunner().invoke(cli, [*command, "--memory-limit", "50MB", "--force"], catch_exceptions=False).exit_code == 0
    )
    assert (tmp_path / "index" / "manifest.json").is_file()


class _Flat(BM25Kind):
    """A kind that holds 768 numbers of a passage in memory."""

    name = "flat"

    def estimate(self, corpus: Survey, settings: Mapping[str, Any]) -> Estimate:
        size = 4 * 768 * corpus.passages
        return Estimate(build_memory=size, disk=size, load_memory=size, mapped=0, seconds=1.0)


def test_e01_a_flat_index_of_wiki18_is_refused_and_smaller_ones_are_named(tmp_path: Path) -> None:
    wiki18 = Survey(21_015_324, 13_600_000_000, True, tuple(PASSAGES))
    kind = _Flat()
    with pytest.raises(CapacityError, match=r"needs about 64.6 GB of memory, found 16 GB .* would fit: --kind bm25 \("):
        check_fits(kind, wiki18, kind.settings({}), tmp_path, memory_limit=16 * 10**9, disk_limit=10**12)


def test_e01_mapped_files_are_not_memory(tmp_path: Path) -> None:
    """What searching needs for itself hardly grows with the corpus; the files are the system's to keep or drop."""
    kind = find_kind("bm25")
    settings = kind.settings({})
    small, large = (kind.estimate(Survey(n, 650 * n, True, tuple(PASSAGES)), settings) for n in (10**5, 21 * 10**6))
    assert large.mapped > 100 * small.mapped
    assert large.load_memory < 400_000_000
    save_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    assert build_index(tmp_path / "corpus.jsonl", tmp_path / "index", kind="bm25").search(["number7"], k=1)[0]
