"""Disks that fill up, or turn read-only, in every stage: a clear error, nothing lost, and it goes on with more room."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.disk import SmallDisk, small_disk
from turntree.commands import run_evaluate
from turntree.errors import CheckpointError, ConfigError, RetrievalError, SearchIndexError, TurnTreeError
from turntree.search_backend import Passage, save_corpus
from turntree.search_backend.index import build_index
from turntree.search_backend.replay import SearchStore
from turntree.trainers import learner, run_checkpoints
from turntree.trainers.checkpoint import latest_checkpoint, save_checkpoint, verify_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import Evaluation
from turntree.trainers.learner import train
from turntree.trainers.loggers import open_trackers
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import MetricsLog, RunFolder, read_metrics
from turntree.trainers.store import TreeStore

MakeConfig = Callable[..., RunConfig]
STEPS = ("trainer.steps=2", "trainer.save_every=1", "trainer.loggers=[]")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "48m") as made:
        yield made


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def finished(make_config: MakeConfig, bed: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(make_config(*STEPS, f"env.dev_questions={bed.world}", "trainer.eval_questions=4", f"out={run}"))
    return run


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "occasion"),
    [
        (TreeStore, "write", 1),
        (run_checkpoints, "save_checkpoint", 0),
        (run_checkpoints, "save_checkpoint", 1),
        (learner, "save_model", 0),
        (Evaluation, "save", 0),
        (MetricsLog, "write", 1),
    ],
    ids=["trees", "first checkpoint", "second checkpoint", "export", "validation", "metrics"],
)
@pytest.mark.parametrize("leaving", [0, 100_000])
def test_a_run_goes_on_after_room_is_made(
    make_config: MakeConfig,
    bed: Any,
    finished: Path,
    disk: SmallDisk,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    occasion: int,
    leaving: int,
) -> None:
    run, before, count = disk.folder / "run", getattr(owner, name), 0

    def filled(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if count == occasion:
            disk.fill(leaving)
        count += 1
        return before(*args, **kwargs)

    options = (*STEPS, f"env.dev_questions={bed.world}", "trainer.eval_questions=4", f"out={run}", "resume=true")
    monkeypatch.setattr(owner, name, filled)
    with pytest.raises(TurnTreeError, match=r"(?s)No space left.*resume"):
        train(make_config(*options))
    monkeypatch.undo()
    for checkpoint in (run / "checkpoints").glob("step-*"):
        verify_checkpoint(checkpoint)
    assert rows(run) == rows(finished)[: len(rows(run))]
    disk.free()
    train(make_config(*options))
    assert rows(run) == rows(finished)
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (run, finished))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_read_only_disk_is_refused_before_any_work(make_config: MakeConfig, disk: SmallDisk) -> None:
    RunFolder.create(disk.folder / "run", make_config())
    disk.read_only(True)
    for path, resume in ((disk.folder / "run", True), (disk.folder / "other", False)):
        with pytest.raises(CheckpointError, match=r"(?i)read-only"):
            RunFolder.create(path, make_config(), resume=resume)


def test_a_checkpoint_without_room_leaves_the_others(disk: SmallDisk) -> None:
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(disk.folder, 1, model=model, optimizer=optimizer, state={}, keep=1)
    before = {p: p.read_bytes() for p in disk.folder.rglob("*") if p.is_file()}
    for leaving in (0, 4096, 100_000, 364_544):
        disk.fill(leaving)
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*No space left.*then resume"):
            save_checkpoint(disk.folder, 2, model=model, optimizer=optimizer, state={}, keep=1)
        disk.free()
        assert {p: p.read_bytes() for p in disk.folder.rglob("*") if p.is_file()} == before
    save_checkpoint(disk.folder, 2, model=model, optimizer=optimizer, state={}, keep=1)
    newest = latest_checkpoint(disk.folder)
    assert newest is not None
    assert newest.name == "step-00000002"


def test_every_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    """A damaged manifest never passes for another run's, or points to other files: the older checkpoint is used."""
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        save_checkpoint(
            tmp_path, step, model=model, optimizer=torch.optim.SGD(model.parameters()), state={},
            fingerprint={"seed": 1, "name": "question"},
        )  # fmt: skip
    manifest = tmp_path / "step-00000002" / "manifest.json"
    whole = manifest.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= (1, 32, 128)[place % 3]
        manifest.write_bytes(damaged)
        try:
            same = json.loads(damaged) == json.loads(whole)  # white space
        except ValueError:
            same = False
        if not same:
            with pytest.raises(CheckpointError, match="step-00000002"):
                verify_checkpoint(manifest.parent)
    manifest.write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match="step-00000002"):
        assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"


def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, 1, model=model, optimizer=torch.optim.SGD(model.parameters()), state={})
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert verify_checkpoint(path)["step"] == 1


# -- beside it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "csv"])
def test_a_tracker_without_room_never_stops_a_run(disk: SmallDisk, caplog: pytest.LogCaptureFixture, name: str) -> None:
    (tracker,) = open_trackers([name], disk.folder)
    disk.fill()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 60):
            tracker.log(step, {f"metric/{number}": 1.0 for number in range(200)})
        tracker.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"logger {name} failed and gets nothing more" in caplog.text


def test_lines_of_a_csv_are_cut_without_losing_them(disk: SmallDisk) -> None:
    (tracker,) = open_trackers(["csv"], disk.folder)
    for step in range(1, 2000):
        tracker.log(step, {"loss": 1.0})
    tracker.close()
    (file,) = (disk.folder / "csv").glob("scalars/**/*.csv")
    before = file.read_bytes()
    disk.fill()
    with pytest.raises(ConfigError, match="No space left"):
        open_trackers(["csv"], disk.folder, resume_step=1500)
    assert file.read_bytes() == before


def test_a_store_of_searches_keeps_what_it_has(disk: SmallDisk) -> None:
    store = SearchStore(disk.folder / "store")
    store.put("f", {"first": [Passage("1", "", "text", 1.0)]}, 1)
    disk.fill()
    many = {f"query {number}": [Passage(str(number), "", f"{number} text " * 200, 1.0)] for number in range(2000)}
    with pytest.raises(RetrievalError, match=r"store.*(full|disk I/O).*what it holds is whole"):
        store.put("f", many, 1)
    assert store.get("f", ["first"], 1)["first"][0].text == "text"
    disk.free()
    store.put("f", {"second": [Passage("2", "", "text", 1.0)]}, 1)
    store.close()
    again = SearchStore(disk.folder / "store")
    assert list(again.get("f", ["first", "second"], 1)) == ["first", "second"]
    again.close()


@pytest.mark.parametrize("kind", ["bm25", pytest.param("dense", marks=pytest.mark.slow)])
def test_a_build_goes_on_after_room_is_made(bed: Any, disk: SmallDisk, tmp_path: Path, kind: str) -> None:
    options: dict[str, Any] = {}
    corpus = bed.world / "corpus.jsonl"
    if kind == "dense":
        pytest.importorskip("faiss")
        from tests.search_backend.dense_models import write_static
        from tests.search_backend.test_dense import passages

        corpus = tmp_path / "corpus.jsonl"  # of words that the encoder knows
        save_corpus(corpus, passages(600))
        write_static(tmp_path / "encoder")
        options = {"encoder": str(tmp_path / "encoder")}
    build_index(corpus, tmp_path / "whole", kind=kind, options=options)
    size = sum(p.stat().st_size for p in (tmp_path / "whole").rglob("*") if p.is_file())
    for number, share in enumerate((0.0, 0.2, 0.5, 0.8)):
        folder = disk.folder / f"index{number}"
        disk.fill(int(size * share))
        with pytest.raises(
            SearchIndexError, match=r"cannot write.*make room.*goes on|expected a folder to write.*space"
        ):
            build_index(corpus, folder, kind=kind, options=options)
        disk.free()
        build_index(corpus, folder, kind=kind, options=options)
        for file in (tmp_path / "whole").rglob("*"):
            if file.is_file() and file.name != "manifest.json":
                assert (folder / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_an_evaluation_goes_on_after_room_is_made(
    bed: Any, disk: SmallDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turntree.trainers.evaluation.journal import Journal

    base = [*bed.args, f"env.test_questions={bed.world}"]
    run_evaluate([*base, f"out={tmp_path / 'whole'}"])
    before = Journal.write

    def filled(self: Journal, found: Any) -> None:
        disk.fill()
        before(self, found)

    monkeypatch.setattr(Journal, "write", filled)
    with pytest.raises(CheckpointError, match=r"cannot write.*resume=true"):
        run_evaluate([*base, f"out={disk.folder / 'e'}"])
    monkeypatch.undo()
    disk.free()
    run_evaluate([*base, f"out={disk.folder / 'e'}", "resume=true"])
    one, other = (folder / "evaluation.jsonl" for folder in (tmp_path / "whole", disk.folder / "e"))
    assert one.read_bytes() == other.read_bytes()
