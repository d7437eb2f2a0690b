"""Lines of files that are larger than they look, or end too early."""

from __future__ import annotations

import gzip
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turntree.errors import DataError
from turntree.trainers import lines
from turntree.trainers.exchange import import_trees
from turntree.trainers.exchange.files import read_lines
from turntree.trainers.lines import LongLineError, file_lines, zstd_lines
from turntree.trainers.store import TreeStore

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda content: zstandard.ZstdCompressor(write_checksum=True).compress(content),
    "gzip": gzip.compress,
    "plain": bytes,
}


def bomb(path: Path, mebibytes: int) -> None:
    """One line of spaces, some ten thousand times as long as its file."""
    with path.open("wb") as handle, zstandard.ZstdCompressor(level=19).stream_writer(handle) as writer:
        for _ in range(mebibytes):
            writer.write(b" " * (1 << 20))
    assert path.stat().st_size < mebibytes * 1024


@pytest.mark.parametrize("compression", COMPRESSIONS)
@settings(max_examples=60, deadline=None)
@given(
    content=st.lists(st.binary(max_size=40) | st.just(b"\n" * 30) | st.binary(min_size=3000, max_size=4000)).map(
        b"\n".join
    ),
    frames=st.integers(1, 3),
)
def test_lines_are_those_of_the_content(
    tmp_path_factory: pytest.TempPathFactory, compression: str, content: bytes, frames: int
) -> None:
    assume(compression != "plain" or content[:2] != b"\x1f\x8b")
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(COMPRESSIONS[compression](content) * frames)
    *whole, rest = (content * frames).split(b"\n")
    assert list(file_lines(path)) == [line + b"\n" for line in whole] + [rest] * bool(rest)


def test_a_bomb_is_refused_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 64 << 20)
    bomb(tmp_path / "bomb.zst", 1024)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LongLineError, match="line 1 with more than 67,108,864 bytes"):
        list(zstd_lines(tmp_path / "bomb.zst"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB


def test_a_store_and_an_import_name_the_file_of_a_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1 << 20)
    store = TreeStore(tmp_path)
    bomb(store.file(1), 8)
    with pytest.raises(
        DataError, match=r"step-00000001\.jsonl\.zst is corrupt \(line 1 with more than 1,048,576 bytes"
    ):
        list(store.read(1))
    with pytest.raises(DataError, match=r"expected a complete file of JSON lines, found line 1 with more than"):
        import_trees(store.file(1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_damaged_files_are_data_errors(tmp_path: Path, compression: str, damage: str) -> None:
    whole = COMPRESSIONS[compression](b"".join(b'{"line": %d}\n' % i for i in range(2000)))
    path = tmp_path / "trees.jsonl"
    for position in range(20, len(whole), len(whole) // 20):
        damaged = bytearray(whole[:position] if damage == "cut" else whole)
        if damage == "flipped":
            damaged[position] ^= 0x55
        path.write_bytes(bytes(damaged))
        with pytest.raises(DataError, match="expected a complete file of JSON lines"):
            list(read_lines(path))
