"""Published sets by name: from a file, from a folder, from a hub; each says which questions these are."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from turntree.envs.datasets import DATASETS, dataset_spec, load_dataset_questions
from turntree.errors import ConfigError, DataError

ROW = b'{"id": "test_0", "question": "Who?", "golden_answers": ["me", "I"]}\n'


def put(path: Path, data: bytes = ROW) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_every_set_is_pinned_and_says_how_it_is_scored() -> None:
    assert {
        *("hotpotqa", "2wikimultihopqa", "musique", "bamboogle", "nq", "triviaqa", "popqa", "chinese_simpleqa"),
        *("frames", "cmrc", "drcd"),
    } == set(DATASETS)
    names = [name for spec in DATASETS.values() for name in (spec.name, *spec.aliases)]
    assert len(set(names)) == len(names)
    for spec in DATASETS.values():
        assert spec.split in spec.sizes
        assert set(spec.splits) <= set(spec.sizes)
        assert bool(spec.repo) == bool(spec.splits) == bool(re.fullmatch(r"[0-9a-f]{40}", spec.revision))
        assert (spec.language == "zh") == (spec.normalizer in ("zh", "cmrc"))


def test_unknown_names_and_splits() -> None:
    assert dataset_spec("2Wiki").name == "2wikimultihopqa"
    assert dataset_spec("Chinese-SimpleQA".replace("SimpleQA", "simpleqa")).name == "chinese_simpleqa"
    with pytest.raises(ConfigError, match="Did you mean 'musique'"):
        load_dataset_questions("musiqe")
    with pytest.raises(ConfigError, match=r"no split 'val'; expected one of \['dev', 'test', 'train'\]"):
        load_dataset_questions("nq", split="val")


@pytest.mark.parametrize(
    "place",
    ["nq/test.jsonl", "nq/test.parquet.gz", "nq_open/test.json", "nq_test.csv", "nq_test/questions.jsonl", "nq.jsonl",
     "nq/questions.jsonl"],
)  # fmt: skip
def test_a_set_is_found_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    file = put(tmp_path / "data" / place)
    monkeypatch.setenv("TURNTREE_DATA", os.pathsep.join((str(tmp_path / "absent"), str(tmp_path / "data"))))
    for found in (load_dataset_questions("nq"), load_dataset_questions("nq", source=tmp_path / "data")):
        assert [q.golden_answers for q in found.questions] == [("me", "I")]
        passport = found.passport()
        assert passport == {
            "dataset": "nq",
            "split": "test",
            "origin": "file",
            "repo": "",
            "revision": "",
            "file": file.name,
            "sha256": hashlib.sha256(ROW).hexdigest(),
            "layout": "flashrag",
            "questions": 1,
            "skipped": 0,
            "expected": 3610,
            "complete": False,
        }
    assert load_dataset_questions("nq", source=file, limit=1).complete is None


@pytest.mark.parametrize("place", ["chinese_simpleqa.jsonl", "chinese_simpleqa/chinese_simpleqa.jsonl"])
def test_a_hub_file_without_a_folder_may_lie_in_one(tmp_path: Path, place: str) -> None:
    put(tmp_path / place)
    assert len(load_dataset_questions("chinese_simpleqa", source=tmp_path).questions) == 1


def test_the_split_that_was_asked_for_is_read(tmp_path: Path) -> None:
    put(tmp_path / "nq" / "test.jsonl")
    put(tmp_path / "nq" / "dev.jsonl", ROW.replace(b"test_0", b"dev_0"))
    assert load_dataset_questions("nq", split="dev", source=tmp_path).questions[0].id == "dev_0"
    with pytest.raises(DataError, match=r"expected nq/train.jsonl or nq_train.jsonl in the folder .* found none"):
        load_dataset_questions("nq", split="train", source=tmp_path)
    with pytest.raises(DataError, match="expected a file or folder"):
        load_dataset_questions("nq", source=tmp_path / "absent")


def test_a_set_that_is_not_on_the_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNTREE_DATA", raising=False)
    with pytest.raises(DataError, match=r"drcd, split dev: expected a local file.*TURNTREE_DATA, or pass source=FILE"):
        load_dataset_questions("drcd")


# The hub --------------------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(status: int) -> Iterator[tuple[str, list[str]]]:
    """A server that answers for one file as the hub does, or fails."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(ROW) if status == 200 else 0))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            if status == 200:
                self.wfile.write(ROW)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)


SCRIPT = """
import json
from turntree.envs.datasets import load_dataset_questions
from turntree.errors import DataError
try:
    print(json.dumps(load_dataset_questions("nq", {options}).passport()))
except DataError as error:
    print(json.dumps(str(error)))
"""


def ask(endpoint: str, home: Path, options: str = "", *, offline: bool = False) -> dict[str, object] | str:
    """What a process of its own gets from the hub at ``endpoint``: its settings are read when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TURNTREE_DATA"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1"}
    env |= {"HF_HUB_OFFLINE": "1"} if offline else {}
    script = SCRIPT.format(options=options)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] | str = json.loads(done.stdout)
    return answer


def test_the_hub_gives_the_pinned_file_once(tmp_path: Path) -> None:
    with hub(200) as (endpoint, asked):
        found = ask(endpoint, tmp_path)
        assert isinstance(found, dict)
        assert (found["origin"], found["revision"], found["questions"]) == ("hub", COMMIT, 1)
        assert found["sha256"] == hashlib.sha256(ROW).hexdigest()
        spec = DATASETS["nq"]
        assert asked[0] == f"/datasets/{spec.repo}/resolve/{spec.revision}/nq/test.jsonl"
        other = ask(endpoint, tmp_path, f'revision="{COMMIT}"')
        assert isinstance(other, dict)
        assert other["revision"] == COMMIT
    # Offline, what was downloaded is still there.
    again = ask("http://127.0.0.1:9", tmp_path, f'revision="{COMMIT}"', offline=True)
    assert isinstance(again, dict)
    assert again["sha256"] == found["sha256"]


def test_without_the_hub_both_ways_on_are_named(tmp_path: Path) -> None:
    with hub(404) as (endpoint, _):
        missing = ask(endpoint, tmp_path)
    offline = ask("http://127.0.0.1:9", tmp_path, offline=True)
    for message in (missing, offline):
        assert isinstance(message, str)
        assert "nq, split test: expected nq/test.jsonl of RUC-NLPIR/FlashRAG_datasets" in message
        assert "HF_HUB_OFFLINE" in message
        assert "TURNTREE_DATA" in message
