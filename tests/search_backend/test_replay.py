"""The store of searches: exact, shared by processes, whole after kill -9, and never wrong in silence."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turntree.errors import ConfigError, ReplayMissError, RetrievalError
from turntree.search_backend import BM25Backend, Passage
from turntree.search_backend.passage import SearchBackend
from turntree.search_backend.replay import ReplayBackend, SearchStore


class Moody:
    """Answers differently each time, and counts."""

    def __init__(self, fingerprint: str = "moody") -> None:
        self.fingerprint = fingerprint
        self.asked: list[str] = []

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        self.asked += queries
        return [[Passage(f"{q}-{len(self.asked)}", "T", "text", 1 / 3)][:k] for q in queries]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
passages = st.builds(Passage, texts, texts, texts, st.none() | st.floats(allow_nan=False))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(texts, st.lists(passages, max_size=4), max_size=5), st.integers(1, 9), texts)
def test_what_is_stored_comes_back_bit_for_bit(
    tmp_path: Path, answers: dict[str, list[Passage]], k: int, fingerprint: str
) -> None:
    path = tmp_path / f"{os.urandom(4).hex()}.sqlite"
    store = SearchStore(path)
    store.put(fingerprint, answers, k)
    assert store.get(fingerprint, list(answers), k) == answers
    assert store.get(fingerprint, list(answers), k + 1) == {}
    assert store.get(fingerprint + "x", list(answers), k) == {}
    store.close()
    again = SearchStore(path)
    assert again.get(fingerprint, list(answers), k) == answers
    again.close()


def test_scores_are_exact_doubles(tmp_path: Path) -> None:
    store = SearchStore(tmp_path / "s.sqlite")
    scores = [0.1 + 0.2, 1e-320, -0.0, math.pi, math.inf, None]
    store.put("f", {"q": [Passage(str(i), "", "t", score) for i, score in enumerate(scores)]}, 9)
    (found,) = store.get("f", ["q"], 9).values()
    assert [repr(p.score) for p in found] == [repr(score) for score in scores]


def test_passages_are_kept_once(tmp_path: Path) -> None:
    store = SearchStore(tmp_path / "s.sqlite")
    for k in range(1, 50):
        store.put("f", {f"q{k}": [Passage("1", "T", "the same text" * 100, float(k))]}, k)
    with sqlite3.connect(store.path) as raw:
        assert raw.execute("SELECT COUNT(*) FROM passages").fetchone() == (1,)
    assert len(store) == 49


def test_readthrough_asks_once_and_replay_never(tmp_path: Path) -> None:
    backend = Moody()
    live = ReplayBackend(tmp_path / "s.sqlite", backend, mode="readthrough", source="test")
    assert isinstance(live, SearchBackend)
    first = live.search(["a", "b", "a"], k=2)
    assert first[0] == first[2]
    assert live.search(["b", "a"], k=2) == [first[1], first[0]]
    assert backend.asked == ["a", "b"]
    assert live.stats == {"hits": 2, "asked": 2, "misses": 2}
    replayed = ReplayBackend(tmp_path / "s.sqlite", mode="replay")
    assert replayed.fingerprint == "moody"
    assert replayed.search(["a", "b", "a"], k=2) == first
    with pytest.raises(ReplayMissError, match=r"no answer of moody to the query 'c' with k=2.*moody from test.*Record"):
        replayed.search(["a", "c"], k=2)
    with pytest.raises(ReplayMissError, match="k=3"):
        replayed.search(["a"], k=3)


def test_record_asks_anew_but_one_session_sees_one_answer(tmp_path: Path) -> None:
    backend = Moody()
    path = tmp_path / "s.sqlite"
    yesterday = ReplayBackend(path, backend, mode="record").search(["a"], k=1)
    today = ReplayBackend(path, backend, mode="record")
    copy: ReplayBackend = pickle.loads(pickle.dumps(today))
    found = today.search(["a"], k=1)
    assert found != yesterday
    assert copy.search(["a"], k=1) == found == today.search(["a"], k=1)
    assert ReplayBackend(path, mode="replay").search(["a"], k=1) == found
    assert len(backend.asked) == 2


def test_replay_needs_to_know_whose_answers(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with pytest.raises(ConfigError, match="no store of searches"):
        ReplayBackend(path, mode="replay")
    for name in ("one", "two"):
        ReplayBackend(path, Moody(name), source=f"http:{name}").search(["a"], k=1)
    with pytest.raises(ConfigError, match=r"2 fingerprints \(one from http:one, two from http:two\)"):
        ReplayBackend(path, mode="replay")
    assert ReplayBackend(path, mode="replay", source="http:two").fingerprint == "two"
    assert ReplayBackend(path, mode="replay", fingerprint="one").search(["a"], k=1)[0][0].id == "a-1"
    with pytest.raises(ConfigError, match="needs a backend"):
        ReplayBackend(path, mode="record")
    with pytest.raises(ConfigError, match="expected one of record"):
        ReplayBackend(path, Moody(), mode="write")  # type: ignore[arg-type]


def test_failures_are_not_stored(tmp_path: Path) -> None:
    class Down(Moody):
        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            raise RetrievalError("down")

    class Short(Moody):
        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            return []

    for backend, words in ((Down(), "down"), (Short(), "expected 1 lists")):
        live = ReplayBackend(tmp_path / "s.sqlite", backend)
        with pytest.raises(RetrievalError, match=words):
            live.search(["a"], k=1)
        assert len(live.store) == 0


@pytest.mark.parametrize("kind", ["text", "sqlite", "newer"])
def test_other_files_are_refused_and_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "text":
        path.write_text("this is no database, but a text that is long enough to look at" * 20)
    elif kind == "sqlite":
        with sqlite3.connect(path) as raw:
            raw.execute("CREATE TABLE mine (x)")
    else:
        SearchStore(path).close()
        with sqlite3.connect(path) as raw:
            raw.execute("PRAGMA user_version = 99")
    before = path.read_bytes() if kind == "text" else b""
    with pytest.raises(ConfigError, match="expected a store of searches"):
        SearchStore(path)
    assert kind != "text" or path.read_bytes() == before


def test_threads_share_one_store(tmp_path: Path) -> None:
    backend = BM25Backend.from_passages([Passage(str(i), "", f"river number{i}") for i in range(20)])
    live = ReplayBackend(tmp_path / "s.sqlite", backend)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: live.search([f"number{i % 20}", "river"], k=3), range(80)))
    assert all(each == backend.search([f"number{i % 20}", "river"], k=3) for i, each in enumerate(found))
    assert len(live.store) == 21


def _fill(live: ReplayBackend, number: int, out: Any) -> None:
    """In a forked process: searches that overlap with those of the others."""
    out.put({f"q{i}": live.search([f"q{i}"], k=2)[0][0].id for i in range(number, number + 40)})


def test_forked_processes_agree(tmp_path: Path) -> None:
    """Whoever is first decides: all see the same answers, and so does a replay."""
    context = multiprocessing.get_context("fork")
    live = ReplayBackend(tmp_path / "s.sqlite", Moody())
    live.search(["q0"], k=2)  # the parent's connection is open when the children start
    out: Any = context.Queue()
    workers = [context.Process(target=_fill, args=(live, 10 * n, out), daemon=True) for n in range(4)]
    for worker in workers:
        worker.start()
    seen = [out.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    live.search(["q0", "q69"], k=2)  # the parent's still works
    agree(tmp_path / "s.sqlite", seen)


def agree(path: Path, seen: list[dict[str, str]]) -> None:
    replayed = ReplayBackend(path, mode="replay")
    for found in seen:
        for query, name in found.items():
            assert replayed.search([query], k=2)[0][0].id == name


FILLER = """
import json, os, sys
from turntree.search_backend import Passage
from turntree.search_backend.replay import ReplayBackend

class Own:
    fingerprint = "own"
    def search(self, queries, *, k):
        return [[Passage(f"{q}-of-{os.getpid()}", "", "text", 1.0)] for q in queries]

live = ReplayBackend(sys.argv[1], Own())
first = int(sys.argv[2])
print(json.dumps({f"q{i}": live.search([f"q{i}"], k=2)[0][0].id for i in range(first, first + 150)}))
"""


def test_four_processes_that_start_together_agree(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    workers = [
        subprocess.Popen([sys.executable, "-c", FILLER, str(path), str(30 * n)], stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    seen = [json.loads(worker.communicate(timeout=100)[0]) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert len({name.partition("-of-")[2] for found in seen for name in found.values()}) > 1
    agree(path, seen)


WRITER = """
import sys
from turntree.search_backend import Passage
from turntree.search_backend.replay import SearchStore
store = SearchStore(sys.argv[1])
for n in range(100000):
    store.put("f", {f"q{n}": [Passage(f"{n}-{i}", "T", "x" * 500, n / 7) for i in range(5)]}, 5)
    print(n, flush=True)
"""


def test_kill_minus_nine_loses_nothing_that_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    for round_ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        last = [int(writer.stdout.readline()) for _ in range(20 + 13 * round_)][-1]
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
        writer.stdout.close()
        store = SearchStore(path)
        found = store.get("f", [f"q{n}" for n in range(last + 1)], 5)
        assert len(found) == last + 1
        assert all([p.score for p in hits] == [int(q[1:]) / 7] * 5 for q, hits in found.items())
        with sqlite3.connect(path) as raw:
            assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            orphans = "SELECT found FROM answers"
            hashes = {h.hex() for (h,) in raw.execute("SELECT hash FROM passages")}
            assert all(h in hashes for (text,) in raw.execute(orphans) for h, _ in json.loads(text))
        store.close()


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM passages",
        "UPDATE passages SET text = 'u'",
        "UPDATE passages SET id = '2'",
        *(
            f"UPDATE answers SET found = '{found}'"
            for found in ("x", "null", "{}", "[1]", '[["zz", 1.0]]', '[["", "1"]]')
        ),
    ],
)
def test_a_damaged_row_is_an_error_not_a_result(tmp_path: Path, damage: str) -> None:
    store = SearchStore(tmp_path / "s.sqlite")
    store.put("f", {"q": [Passage("1", "", "t", 1.0)]}, 1)
    with sqlite3.connect(store.path) as raw:
        raw.execute(damage)
    with pytest.raises(RetrievalError, match="failed"):
        store.get("f", ["q"], 1)


def test_half_surrogates_and_nul_of_a_corpus_come_back(tmp_path: Path) -> None:
    """JSON files hold them, and SQLite's text cannot."""
    odd = [Passage("\ud83d", "half \ud800", "alpha \udfff \x00 z"), Passage("b", "", "alpha \x00")]
    live = BM25Backend.from_passages(odd)
    found = ReplayBackend(tmp_path / "s.sqlite", live, mode="record").search(["alpha"], k=2)
    assert found == live.search(["alpha"], k=2)
    assert ReplayBackend(tmp_path / "s.sqlite", mode="replay").search(["alpha"], k=2) == found


def test_a_store_without_answers_says_so(tmp_path: Path) -> None:
    SearchStore(tmp_path / "s.sqlite").close()
    with pytest.raises(ConfigError, match="holds no answers yet: record some first"):
        ReplayBackend(tmp_path / "s.sqlite", mode="replay")
