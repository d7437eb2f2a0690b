from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import DataError, SearchIndexError
from turntree.search_backend import Passage, load_corpus
from turntree.search_backend.store import CorpusStore, corpus_fingerprint, scored_passages

texts = st.text(st.characters(codec=None), max_size=20)  # lone surrogates too
passages = st.lists(st.builds(Passage, id=st.text(min_size=1, max_size=6), title=texts, text=texts), max_size=12).map(
    lambda rows: list({p.id: p for p in rows}.values())
)


def write(path: Path, rows: Sequence[Passage]) -> Path:
    lines = [json.dumps({"id": p.id, "title": p.title, "text": p.text}) for p in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def numbered(count: int, first: int = 0) -> list[Passage]:
    return [Passage(str(first + i), f"title {i % 7}", f"text number {i} 文") for i in range(count)]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@given(passages)
@settings(max_examples=40, deadline=None)
def test_a_store_is_the_sequence_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Passage]
) -> None:
    store = CorpusStore.from_passages(rows, tmp_path_factory.mktemp("store") / "s")
    assert len(store) == len(rows)
    assert list(store) == [store[i] for i in range(len(rows))] == store[:] == rows
    assert [store.row(p.id) for p in rows] == list(range(len(rows)))
    assert all(p in store for p in rows)
    assert store[::-1] == rows[::-1]
    assert store.find("absent!") is None
    assert store.fingerprint == corpus_fingerprint(rows)
    order = [*reversed(range(len(rows))), *range(len(rows))]
    scores = [float(i) for i in range(len(order))]
    expected = [replace(rows[row], score=score) for row, score in zip(order, scores)]
    assert scored_passages(store, order, scores) == scored_passages(rows, order, scores) == expected


@pytest.mark.parametrize("first", [0, 1, 21015324])
def test_consecutive_integer_ids_need_no_table(tmp_path: Path, first: int) -> None:
    rows = numbered(300, first)
    store = CorpusStore.build(write(tmp_path / "c.jsonl", rows), tmp_path / "store")
    assert not (tmp_path / "store" / "ids_hashes.npy").exists()
    assert [store.row(p.id) for p in rows] == list(range(300))
    for absent in (str(first - 1), str(first + 300), "x", f"0{first}", "²", ""):
        with pytest.raises(DataError, match="expected an id of this corpus"):
            store.row(absent)


def test_a_file_of_any_layout_becomes_the_same_store(tmp_path: Path) -> None:
    plain = write(tmp_path / "c.jsonl", numbered(9000))
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    one, other = CorpusStore.build(plain, tmp_path / "a"), CorpusStore.build(packed, tmp_path / "b")
    assert one.fingerprint == other.fingerprint
    assert list(one) == load_corpus(plain)
    assert one[8999].id == "8999"
    with pytest.raises(IndexError):
        one[9000]


KILLED = """
import os, signal, sys
from turntree.search_backend.store import CorpusStore

calls = 0
def progress(*args):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

CorpusStore.build(sys.argv[1], sys.argv[2], progress=progress)
"""


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_a_killed_build_goes_on_with_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"c.{suffix}", [Passage(f"d{p.id}", p.title, p.text) for p in numbered(10_000)])
    if suffix.endswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    CorpusStore.build(path, tmp_path / "whole")
    for calls in (1, 2, 1):  # killed after the first block; after two more; then it finishes
        command = [sys.executable, "-c", KILLED, str(path), str(tmp_path / "killed"), str(calls)]
        code = subprocess.run(command, timeout=60, check=False).returncode
        if code == 0:
            break
        assert code == -signal.SIGKILL
        with pytest.raises(SearchIndexError, match="expected a corpus store"):
            CorpusStore.open(tmp_path / "killed")
        with (tmp_path / "killed" / "records.bin").open("ab") as file:
            file.write(b"half a block that was written before the kill")
    assert CorpusStore.build(path, tmp_path / "killed")[9999].id == "d9999"
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert set(contents(tmp_path / "whole")) == {
        "ends.npy", "ids_hashes.npy", "ids_numbers.npy", "parts.npy", "records.bin", "store.json",
    }  # fmt: skip


def test_duplicate_ids_are_refused_with_both_lines_and_equal_titles_are_not(tmp_path: Path) -> None:
    rows = [Passage(f"d{i}", "the same title", f"text {i}") for i in range(5000)]
    lines = write(tmp_path / "c.jsonl", rows).read_text(encoding="utf-8").splitlines()
    (tmp_path / "c.jsonl").write_text("\n".join([*lines[:4500], "", *lines[4500:], lines[17]]), encoding="utf-8")
    with pytest.raises(DataError, match=r"c.jsonl, line 5002: .* found id 'd17' again \(first on line 18\)"):
        CorpusStore.build(tmp_path / "c.jsonl", tmp_path / "store")
    assert not (tmp_path / "store" / "store.json").exists()


def test_a_corrupt_line_is_named_and_can_be_mended(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", numbered(5000))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('{"id": "4321"', '{"id": "4321', 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"c.jsonl, line 4322: expected one JSON object"):
        CorpusStore.build(path, tmp_path / "store")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SearchIndexError, match="choose another folder, or remove"):
        CorpusStore.build(path, tmp_path / "store")


def test_what_is_no_store_or_another_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", numbered(10))
    CorpusStore.build(path, tmp_path / "store")
    assert len(CorpusStore.build(path, tmp_path / "store")) == 10
    with pytest.raises(SearchIndexError, match="expected the corpus"):
        CorpusStore.build(write(tmp_path / "d.jsonl", numbered(11)), tmp_path / "store")
    with pytest.raises(SearchIndexError, match="expected an empty or new folder"):
        CorpusStore.build(path, tmp_path)
    with pytest.raises(SearchIndexError, match="expected a corpus store"):
        CorpusStore.open(tmp_path / "absent")
    with pytest.raises(DataError, match="expected a readable corpus"):
        CorpusStore.build(tmp_path / "absent.jsonl", tmp_path / "new")
    os.truncate(tmp_path / "store" / "records.bin", 100)
    with pytest.raises(SearchIndexError, match=r"records.bin: expected \d+ bytes, found 100 bytes"):
        CorpusStore.open(tmp_path / "store")


def test_threads_forks_and_pickles_read_the_same(tmp_path: Path) -> None:
    rows = numbered(6000)
    store = CorpusStore.from_passages(rows, tmp_path / "store")
    assert pickle.loads(pickle.dumps(store))[5999] == rows[5999]
    wrong: list[int] = []

    def read(start: int) -> None:
        wrong.extend(i for i in range(start, 6000, 4) if store[i] != rows[i])

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    child = os.fork()
    if child == 0:  # reads at the same time as its parent, through the same open file
        os._exit(int(any(store[i] != rows[i] for i in range(0, 6000, 3))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert os.waitpid(child, 0)[1] == 0
    assert wrong == []


def test_an_empty_corpus_is_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("\n", encoding="utf-8")
    store = CorpusStore.build(tmp_path / "c.jsonl", tmp_path / "store")
    assert list(store) == store[:] == []
    assert store.find("0") is None


def test_two_builders_of_one_folder_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", numbered(10))

    def second(*_: object) -> None:
        with pytest.raises(SearchIndexError, match="another process is building"):
            CorpusStore.build(path, tmp_path / "store")

    CorpusStore.build(path, tmp_path / "store", progress=second)


def test_duplicates_among_passages_in_memory_are_counted_from_one(tmp_path: Path) -> None:
    rows = [Passage("a", "", "x"), Passage("b", "", "y"), Passage("a", "", "z")]
    with pytest.raises(DataError, match=r"the corpus, passage 3: .* found id 'a' again \(first on passage 1\)"):
        CorpusStore.from_passages(rows, tmp_path / "store")


def test_results_of_rows_that_are_not_there_are_refused(tmp_path: Path) -> None:
    store = CorpusStore.from_passages(numbered(3), tmp_path / "store")
    assert store.scored([], []) == []
    for row in (-1, 3, -4):
        with pytest.raises(IndexError, match=f"expected rows from 0 to 2, found {row} to {row}"):
            store.scored([row], [1.0])
    with pytest.raises(ValueError, match="zip"):
        store.scored([0, 1], [1.0])


def test_a_build_that_stopped_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    path, folder = write(tmp_path / "c.jsonl", numbered(3)), tmp_path / "store"
    folder.mkdir()
    (folder / "building.json.part").write_bytes(b"{")  # killed while it wrote its first file
    assert len(CorpusStore.build(path, folder)) == 3
    path.write_text(path.read_text(encoding="utf-8") + "{\n", encoding="utf-8")
    for _ in range(2):  # the second time too the line is named, not the folder
        with pytest.raises(DataError, match="line 4: expected one JSON object"):
            CorpusStore.build(path, tmp_path / "other")
