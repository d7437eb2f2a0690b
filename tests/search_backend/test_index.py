from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turntree.commands.search import run_index_build, run_index_search
from turntree.errors import CapacityError, ConfigError, SearchIndexError
from turntree.search_backend import Passage, save_corpus
from turntree.search_backend.index import (
    build_index,
    check_fits,
    estimate_index,
    find_kind,
    open_index,
    open_store,
    read_manifest,
    survey_corpus,
)
from turntree.search_backend.machine import available_memory, free_disk, human_bytes, parse_bytes
from turntree.search_backend.selftest import known_items
from turntree.search_backend.store import CorpusStore
from turntree.search_backend.survey import Survey, survey

PASSAGES = [Passage(f"d{i}", f"Title {i}", f"passage number{i} about topic{i % 7}") for i in range(60)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    save_corpus(tmp_path / "corpus.jsonl", PASSAGES)
    return tmp_path / "corpus.jsonl"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_index_folder_is_whole_and_can_be_moved(tmp_path: Path, corpus: Path) -> None:
    backend = build_index(corpus, tmp_path / "index", kind="bm25", options={"k1": 1.2})
    manifest = read_manifest(tmp_path / "index")
    assert manifest["kind"] == "bm25"
    assert manifest["settings"]["k1"] == 1.2
    assert manifest["corpus"]["passages"] == 60
    assert manifest["versions"]["bm25s"]
    found = backend.search(["number7"], k=3)
    (tmp_path / "index").rename(tmp_path / "moved")
    again = open_index(tmp_path / "moved")
    assert again.search(["number7"], k=3) == found
    assert again.fingerprint == backend.fingerprint
    assert list(open_store(tmp_path / "moved")) == PASSAGES


KILLED = """
import os, signal, sys
from pathlib import Path
from turntree.search_backend import postings, store, terms
from turntree.search_backend.index import build_index
import turntree.search_backend.lexical, bm25s

store._CHUNK = terms.BLOCK = 25
postings._SORT_BYTES = 800
corpus, out, last = Path(sys.argv[1]), Path(sys.argv[2]), [0, 0]

def watch(event, args):
    if last[0] and event in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir") and str(out) in str(args[0]):
        last[1] += 1
        if last[1] == last[0]:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)

def built(folder, step):
    pid = os.fork()
    if not pid:
        last[:] = [step, 0]
        build_index(corpus, folder, kind="bm25")
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0

def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

assert built(out / "whole", 0)
step, killed = 1, 0
while not built(out / str(step), step):
    killed += 1
    assert built(out / str(step), 0), f"killed at step {step}: it does not go on"
    assert contents(out / str(step)) == contents(out / "whole"), f"killed at step {step}: other bytes"
    step += 1 if step < 14 else 13
print(killed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_a_build_goes_on_wherever_it_was_killed(tmp_path: Path, corpus: Path) -> None:
    """Before each file that it opens, renames or removes: all of the first ones, some of the rest."""
    command = [sys.executable, "-c", KILLED, str(corpus), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 20


def test_several_indexes_share_a_store(tmp_path: Path, corpus: Path) -> None:
    store = CorpusStore.build(corpus, tmp_path / "store")
    build_index(store, tmp_path / "a", kind="bm25")
    build_index(tmp_path / "store", tmp_path / "b", kind="bm25", options={"stemmer": None})
    build_index(tmp_path / "a", tmp_path / "c", kind="turntree.search_backend.lexical:KIND")
    for name in "abc":
        assert not (tmp_path / name / "corpus").exists()
        assert read_manifest(tmp_path / name)["corpus"]["path"] == "../store"
        assert open_index(tmp_path / name).search(["number7"], k=1)[0][0].id == "d7"


def test_building_again_opens_and_other_settings_are_refused(tmp_path: Path, corpus: Path) -> None:
    build_index(corpus, tmp_path / "index", kind="bm25")
    before = contents(tmp_path / "index")
    build_index(corpus, tmp_path / "index", kind="bm25")
    assert contents(tmp_path / "index") == before
    with pytest.raises(SearchIndexError, match="choose another folder, or --replace it"):
        build_index(corpus, tmp_path / "index", kind="bm25", options={"b": 0.1})
    build_index(corpus, tmp_path / "index", kind="bm25", options={"b": 0.1}, replace=True)
    assert read_manifest(tmp_path / "index")["settings"]["b"] == 0.1
    with pytest.raises(SearchIndexError, match="expected an index or an empty folder"):
        build_index(corpus, tmp_path, kind="bm25", replace=True)
    assert corpus.is_file()


def test_replacing_an_index_does_not_remove_the_corpus_it_is_built_from(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "index"
    build_index(corpus, folder, kind="bm25")
    before = contents(folder)
    for source in (folder, folder / "corpus", CorpusStore.open(folder / "corpus")):
        with pytest.raises(SearchIndexError, match="the corpus would be removed too; build in another folder"):
            build_index(source, folder, kind="bm25", options={"b": 0.1}, replace=True)
        assert contents(folder) == before


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, corpus: Path) -> None:
    for out in (corpus, corpus / "below"):
        with pytest.raises(SearchIndexError, match=r"expected a folder to write at .*; choose another"):
            build_index(corpus, out, kind="bm25")
    assert corpus.is_file()


@pytest.mark.parametrize("place", [8, 30, -3])
@pytest.mark.parametrize("name", ["corpus/ends.npy", "corpus/records.bin", "index/indptr.csc.index.npy"])
def test_damaged_bytes_are_errors_of_the_index(tmp_path: Path, corpus: Path, name: str, place: int) -> None:
    """What opening or searching stumbles over; the bytes are not compared with a hash, which would read them all."""
    build_index(corpus, tmp_path / "index", kind="bm25")
    data = bytearray((tmp_path / "index" / name).read_bytes())
    data[place] ^= 0xFF
    (tmp_path / "index" / name).write_bytes(bytes(data))
    with contextlib.suppress(SearchIndexError):
        open_index(tmp_path / "index").search([f"number{i}" for i in range(60)], k=60)


def test_what_the_manifest_does_not_describe_is_refused(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "index"
    build_index(corpus, folder, kind="bm25")
    with pytest.raises(SearchIndexError, match=r"expected a search index in .*absent"):
        open_index(tmp_path / "absent")
    data = folder / "index" / "data.csc.index.npy"
    os.truncate(data, data.stat().st_size - 4)
    with pytest.raises(SearchIndexError, match=r"data.csc.index.npy: expected \d+ bytes, found \d+ bytes; build"):
        open_index(folder)
    data.unlink()
    with pytest.raises(SearchIndexError, match=r"expected \d+ bytes, found no file"):
        open_index(folder)
    (tmp_path / "other.jsonl").write_text('{"id": "1", "text": "another corpus"}\n', encoding="utf-8")
    other = CorpusStore.build(tmp_path / "other.jsonl", tmp_path / "other")
    manifest = read_manifest(folder)
    manifest["corpus"]["path"] = str(other.folder)
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(SearchIndexError, match=r"expected the corpus [0-9a-f]{32} \(60 passages\), found [0-9a-f]{32}"):
        open_index(folder)
    manifest["format"] = 99
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(SearchIndexError, match="expected an index of format 1, found 99"):
        open_index(folder)


def test_an_unfinished_build_says_so_and_goes_on(tmp_path: Path, corpus: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(stage: str, *_: Any) -> None:
        if stage == "matrix":
            raise Stopped

    with pytest.raises(Stopped):
        build_index(corpus, tmp_path / "index", kind="bm25", progress=stop)
    with pytest.raises(SearchIndexError, match="an unfinished build: run the same turntree index build again"):
        open_index(tmp_path / "index")
    with pytest.raises(SearchIndexError, match="--replace"):
        build_index(corpus, tmp_path / "index", kind="bm25", options={"b": 0.1})
    build_index(corpus, tmp_path / "index", kind="bm25")
    build_index(corpus, tmp_path / "whole", kind="bm25")
    assert contents(tmp_path / "index") == contents(tmp_path / "whole")


@pytest.mark.parametrize("kind", ["klingon", "no.such.module:KIND", "turntree.search_backend.lexical:NOTHING"])
def test_unknown_kinds_are_config_errors(kind: str) -> None:
    with pytest.raises(ConfigError, match="kind="):
        find_kind(kind)


def test_a_survey_extrapolates_a_file_and_measures_a_store(tmp_path: Path) -> None:
    rows = [Passage(str(i), f"Title {i}", f"text of about one length {i:06}") for i in range(20_000)]
    save_corpus(tmp_path / "c.jsonl", rows)
    guess = survey(tmp_path / "c.jsonl")
    assert not guess.exact
    assert abs(guess.passages - 20_000) < 1000
    exact = survey(CorpusStore.build(tmp_path / "c.jsonl", tmp_path / "store"))
    assert (exact.passages, exact.exact, exact.disk) == (20_000, True, 0)
    assert abs(guess.text_bytes - exact.text_bytes) < 0.05 * exact.text_bytes


def test_estimates_cover_what_is_built(tmp_path: Path, corpus: Path) -> None:
    needs = estimate_index(corpus, kind="bm25")
    build_index(corpus, tmp_path / "index", kind="bm25")
    size = sum(len(data) for data in contents(tmp_path / "index" / "index").values())
    assert size < needs.disk
    assert needs.load_memory <= needs.build_memory


def test_what_does_not_fit_names_what_is_missing(tmp_path: Path) -> None:
    kind = find_kind("bm25")
    about = Survey(21_015_324, 13_000_000_000, False, tuple(PASSAGES), disk=14_000_000_000)
    with pytest.raises(CapacityError, match=r"21015324 passages: building needs about .* of memory, found 100 MB"):
        check_fits(kind, about, kind.settings({}), tmp_path, memory_limit=10**8)
    with pytest.raises(CapacityError, match="of disk, found 1 GB"):
        check_fits(kind, about, kind.settings({}), tmp_path, memory_limit=10**12, disk_limit=10**9)
    assert check_fits(kind, about, kind.settings({}), tmp_path, memory_limit=10**12, disk_limit=10**12).disk > 10**9


def test_sizes_read_and_print() -> None:
    assert [parse_bytes(t) for t in ("8GB", "500 mb", "1.5k", "7", "2GiB")] == [
        8 * 10**9,
        5 * 10**8,
        1500,
        7,
        2 * 10**9,
    ]
    for bad in ("lots", "", "GB", "-1GB", "8 apples", "nan"):
        with pytest.raises(ValueError, match=r"expected a size|could not convert"):
            parse_bytes(bad)
    assert human_bytes(12_345_678_901) == "12.3 GB"
    assert available_memory() > 0
    assert free_disk(Path("/tmp/not/there/yet")) > 0


class Stuck:
    """A backend that always finds the same passages."""

    fingerprint = "stuck"

    def search(self, queries: list[str], *, k: int) -> list[list[Passage]]:
        return [PASSAGES[:k] for _ in queries]


def test_the_self_test_sees_a_stuck_index() -> None:
    result = known_items(Stuck(), PASSAGES)  # type: ignore[arg-type]
    assert not result.ok
    assert result.overlap == 1.0
    assert known_items(Stuck(), []).ok  # type: ignore[arg-type]


def test_an_index_of_the_corpus_of_another_index_is_estimated_and_built(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_index(corpus, tmp_path / "first", kind="bm25")
    assert survey_corpus(tmp_path / "first").passages == 60
    assert estimate_index(tmp_path / "first", kind="bm25").disk > 0
    arguments: dict[str, Any] = {"encoder": None, "settings": ("k1=1.5",), "memory_limit": None}
    arguments |= dict.fromkeys(("yes", "force", "replace", "dry_run"), False)
    run_index_build(tmp_path / "first", tmp_path / "second", kind="bm25", **arguments)
    assert "corpus: 60 passages" in capsys.readouterr().out
    assert read_manifest(tmp_path / "second")["corpus"]["path"] == "../first/corpus"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"kind": "bm25"', '"kind": 3', "without a valid 'kind'"),
        ('"corpus": {', '"body": {', "without a valid 'corpus'"),
        ('"fingerprint"', '"print"', "without a valid 'corpus'"),
        ('"files": {', '"files": [], "x": {', "without a valid 'files'"),
        ('"path": "corpus"', '"path": 3', "without a valid 'corpus'"),
        ('"kind": "bm25"', '"kind": "dense"', "the manifest of a dense index, found it without 'encoder'"),
        ('"k1": 0.9', '"k9": 0.9', "bm25 has no option 'k9'"),
        ('"kind": "bm25"', '"kind": "os:path"', "'os:path', whose module would be imported"),
    ],
)
def test_damaged_manifests_are_typed_errors(tmp_path: Path, corpus: Path, old: str, new: str, error: str) -> None:
    build_index(corpus, tmp_path / "index", kind="bm25")
    manifest = tmp_path / "index" / "manifest.json"
    text = manifest.read_text(encoding="utf-8")
    assert old in text
    manifest.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises((SearchIndexError, ConfigError), match=error):
        open_index(tmp_path / "index")


def test_what_is_no_kind_is_refused_where_it_is_named(tmp_path: Path, corpus: Path) -> None:
    build_index(corpus, tmp_path / "index", kind="bm25")
    manifest = tmp_path / "index" / "manifest.json"
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"kind": "bm25"', '"kind": "os:path"'))
    with pytest.raises(ConfigError, match="without \\['settings', 'estimate'"):
        open_index(tmp_path / "index", kind="os:path")


def test_damaged_stores_are_typed_errors(tmp_path: Path, corpus: Path) -> None:
    CorpusStore.build(corpus, tmp_path / "store")
    (tmp_path / "store" / "store.json").write_text('{"format": 1}', encoding="utf-8")
    with pytest.raises(SearchIndexError, match="without 'passages'; build it again"):
        CorpusStore.open(tmp_path / "store")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "building.json").write_text('{"rows": 1}', encoding="utf-8")
    with pytest.raises(SearchIndexError, match="expected the state of a build"):
        CorpusStore.build(corpus, tmp_path / "half")


def test_what_no_terminal_can_show_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = json.dumps({"id": "a", "title": "\ud83d", "text": "half a pair \ud800 中文 \x00"})
    (tmp_path / "corpus.jsonl").write_text(row + "\n", encoding="utf-8")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", kind="bm25")
    run_index_search(tmp_path / "index", ["pair"], k=1, settings=(), as_json=False)
    assert "half a pair \\ud800 中文" in capsys.readouterr().out
    run_index_search(tmp_path / "index", ["pair"], k=1, settings=(), as_json=True)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["passages"][0]["title"] == "\ud83d"
