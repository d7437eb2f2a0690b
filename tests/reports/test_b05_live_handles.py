"""B05: a snapshot holds data only, however many live handles the environment has."""

from __future__ import annotations

import json
import pickle
import sqlite3
import threading
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from turntree.envs import Question, SearchQAEnv
from turntree.search_backend import Passage


class Connected:
    """A backend with a session, a lock, a database and a thread pool."""

    fingerprint = "connected"

    def __init__(self) -> None:
        self.session = urllib.request.build_opener()
        self.lock = threading.Lock()
        self.cache = sqlite3.connect(":memory:", check_same_thread=False)
        self.pool = ThreadPoolExecutor(1)

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        with self.lock:
            return list(self.pool.map(lambda query: [Passage("1", query, "text")], queries))


def make() -> SearchQAEnv:
    return SearchQAEnv([Question("1", "q", ("x",))], search=Connected())


def test_b05_a_snapshot_is_restored_into_an_environment_with_its_own_handles() -> None:
    env = make()
    env.reset(seed=0)
    env.step("<search>a</search>")
    snapshot = env.snapshot()
    for copied in (
        pickle.loads(pickle.dumps(snapshot)),
        env.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(snapshot)))),
    ):
        other = make()
        other.restore(copied)
        assert other.snapshot() == snapshot
        assert other.step("<search>b</search>") == env.fork().step("<search>b</search>")
