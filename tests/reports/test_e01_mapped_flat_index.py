"""A peer's flat index of wiki-18 (64.6 GB) opens in little memory; reading it whole is refused with what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turntree.errors import CapacityError
from turntree.search_backend import Passage
from turntree.search_backend.dense import DenseSearch, open_faiss
from turntree.search_backend.faiss_index import FlatHeader

pytest.importorskip("faiss")

ROWS, DIMENSION = 21_015_324, 768


class Wiki(Sequence[Passage]):
    """As long as wiki-18."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: Any) -> Any:
        return Passage(str(row), "title", "text")


class E5:
    dimension, fingerprint = DIMENSION, "e5"

    def describe(self) -> dict[str, Any]:
        return {}

    def encode_queries(self, queries: Sequence[str]) -> Any:
        return np.zeros((len(queries), DIMENSION), np.float32)

    def encode_passages(self, passages: Sequence[Passage]) -> Any:
        return np.zeros((len(passages), DIMENSION), np.float32)


def sparse(path: Path) -> Path:
    """A file of the full size that takes no disk: zeros that were never written."""
    header = FlatHeader.of(ROWS, DIMENSION)
    with path.open("wb") as file:
        file.write(header.bytes)
        file.truncate(header.file_bytes(ROWS, DIMENSION))
    return path


MAPPED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tests.reports.test_e01_mapped_flat_index import E5, Wiki
from turntree.search_backend.dense import open_faiss
backend = open_faiss(Wiki(), sys.argv[1], E5())
assert not backend.index.reconstruct(20_000_000).any()
fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
print(len(backend), fields["VmRSS"].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc for the resident memory")
def test_e01_a_60_gb_index_opens_in_less_than_2_gb(tmp_path: Path) -> None:
    path = sparse(tmp_path / "e5_Flat.index")
    assert path.stat().st_size > 64 * 10**9
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", MAPPED, str(path), str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    rows, kilobytes = map(int, done.stdout.split())
    assert rows == ROWS
    assert kilobytes < 2_000_000


def test_e01_reading_more_than_the_declared_limit_is_refused(tmp_path: Path) -> None:
    path = sparse(tmp_path / "e5_Flat.index")
    options = DenseSearch(mmap=False, memory_limit="16GB")
    with pytest.raises(CapacityError, match=r"about 64.6 GB .* memory_limit=16GB; leave mmap=true .*SQ8.*PQ"):
        open_faiss(Wiki(), path, E5(), search=options)
