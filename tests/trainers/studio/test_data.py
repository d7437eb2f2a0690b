"""What the studio reads from run folders."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainers.studio.stored import made_up, write_run
from turntree.agents.tokenizer import ByteTokenizer
from turntree.errors import CheckpointError, DataError
from turntree.trainers.config import RunConfig
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore, encode_line
from turntree.trainers.studio.data import Library, Run, node_name, tree_view
from turntree.trainers.studio.scan import occurrences, search
from turntree.trainers.studio.tokens import TokenReader, find_node, pieces, token_view
from turntree.trainers.tree import Group, Node, Tree


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return open_run(write_run(tmp_path_factory.mktemp("studio") / "run", steps=3, trees=4, leaves=9))


def open_run(folder: Path) -> Run:
    return Run(RunFolder.open(folder), folder.name)


def test_summaries_are_those_of_the_trees(run: Run) -> None:
    for stored, summary in zip(run.store.read(2), run.summaries(2), strict=True):
        tree = stored.tree
        rewards = [leaf.reward for leaf in tree.scored_leaves() if leaf.reward is not None]
        assert summary.leaves == len(tree.leaves()) == len(summary.rewards) == 9
        assert summary.turns == len(tree.nodes()) - 1
        assert summary.depth == max(node.depth for node in tree.nodes())
        assert summary.tokens == tree.generated_tokens
        assert summary.mean == pytest.approx(fmean(rewards))
        assert summary.spread == pytest.approx(pstdev(rewards))
        assert summary.failed == sum(leaf.status == "failed" for leaf in tree.leaves())
        assert summary.question == (tree.task.question if tree.task else "")


def test_a_view_holds_every_node_with_its_parent_and_says_what_the_store_says(run: Run) -> None:
    data = run.step(1)
    view, stored = tree_view(data, 0), data.stored(0)
    nodes = {node_name(node.path): node for node in stored.tree.nodes()}
    assert [cell["id"] for cell in view["nodes"]] == list(nodes)
    for cell in view["nodes"]:
        node = nodes[cell["id"]]
        assert cell["parent"] == (None if node.parent is None else node_name(node.parent.path))
        assert (cell["text"], cell["status"], cell["reward"], cell["score"]) == (
            node.text, node.status, node.reward, node.score,
        )  # fmt: skip
        assert cell["picked"] == (None if node.picked is None else node_name(node.picked.path))
        if node.text:
            assert cell["thought"] in node.text
            assert cell["argument"] in node.text
    assert json.dumps(view, allow_nan=False)


def test_steps_carry_their_metrics_and_what_was_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2, trees=3)
    run = open_run(folder)
    rows = run.steps()
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["trees"] == 3 and "critic/rewards/mean" in row["metrics"] for row in rows)
    assert run.live(time.time())
    assert not run.live(time.time() + 3600)
    hour = time.time() - 3600  # steps of an hour each: two of them without a word are no end
    os.utime(run.store.file(1), (hour, hour))
    assert run.live(time.time() + 7200)
    assert not run.live(time.time() + 4 * 3600)
    run.folder.write_summary({})
    os.utime(run.folder.summary_file, (time.time() + 5, time.time() + 5))
    assert not run.live(time.time())


def test_new_steps_appear_and_rewritten_ones_are_read_again(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", steps=1, trees=2, leaves=3))
    assert len(run.summaries(1)) == 2
    rng = np.random.default_rng(5)
    run.store.write(2, [Group("0/9", [made_up(rng, 9, 4)])])
    assert [row["step"] for row in run.steps()] == [1, 2]
    run.store.write(1, [Group("0/7", [made_up(rng, 7, 5)])])
    assert [tree.leaves for tree in run.summaries(1)] == [5]
    assert run.step(1).stored(0).tree.prompt_uid == "0/7"


def test_damage_is_named_and_stays_in_its_step(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", steps=2, trees=2, leaves=3))
    run.store.file(1).write_bytes(b"no zstandard")
    with pytest.raises(DataError, match=r"step-00000001.*corrupt"):
        run.step(1)
    assert len(run.step(2).lines) == 2
    with pytest.raises(DataError, match=r"step 7 of run is not stored.*1 to 2"):
        run.step(7)
    with pytest.raises(DataError, match="trees 0 to 1, found 5"):
        run.step(2).row(5)
    found = search(run, "king")
    assert found["skipped"] == [1]
    assert found["hits"]


def test_a_library_names_runs_and_takes_no_paths(tmp_path: Path) -> None:
    write_run(tmp_path / "outside", steps=1, trees=1, leaves=2)
    for name in ("a", "deep/er/b"):
        write_run(tmp_path / "runs" / name, steps=1, trees=1, leaves=2)
    library = Library(tmp_path / "runs")
    assert [run.name for run in library.runs()] == ["a", "deep/er/b"]
    assert library.run("a").steps()
    for name in ("../outside", "a/../../outside", str(tmp_path / "outside"), "", ".", "a/"):
        with pytest.raises(DataError, match="no run"):
            library.run(name)
    write_run(tmp_path / "runs" / "c", steps=1, trees=1, leaves=2)
    assert library.run("c").name == "c"
    assert [run.name for run in Library(tmp_path / "outside").runs()] == ["outside"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a run folder and holds none"):
        Library(tmp_path / "empty")


def test_a_library_says_which_runs_it_cannot_read(tmp_path: Path) -> None:
    for name in ("good", "old"):
        write_run(tmp_path / "runs" / name, steps=1, trees=1, leaves=2)
    mark = tmp_path / "runs" / "old" / "run.json"
    whole = mark.read_text()
    mark.write_text('{"schema": 0}')
    library = Library(tmp_path / "runs")
    assert [run.name for run in library.runs()] == ["good"]
    [refused] = library.unreadable()
    assert refused["id"] == "old"
    assert "has schema 0" in refused["message"]
    with pytest.raises(CheckpointError, match="has schema 0"):
        Library(mark.parent)
    mark.write_text(whole)
    assert [run.name for run in library.runs()] == ["good", "old"]
    assert library.unreadable() == []


def test_memory_for_steps_is_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turntree.trainers.studio.data._KEPT_BYTES", 1)
    for step in (1, 2, 3):
        run.step(step)
    assert len(run._steps) == 1
    assert len(run.summaries(1)) == 4


# Search ---------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), turn=st.booleans())
def test_search_finds_whatever_is_written(tmp_path_factory: pytest.TempPathFactory, text: str, turn: bool) -> None:
    run = open_run(write_run(tmp_path_factory.mktemp("search") / "run", steps=0))
    root = Node(observation="a prompt")
    around = f"before it {text} after it"
    root.add_child(Node(text=around if turn else "", observation="" if turn else around, status="answered", reward=1.0))
    run.store.write(1, [Group("q", [Tree(root, "q")])])
    for query in (text, text.upper() if len(text.upper()) == len(text) and text.upper().lower() == text else text):
        hits = search(run, query)["hits"]
        assert [(hit["step"], hit["node"], hit["field"]) for hit in hits if hit["node"] == "0"] == [
            (1, "0", "turn" if turn else "observation")
        ]


def test_search_goes_on_where_it_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = search(run, "KING 2")
    assert [hit["step"] for hit in whole["hits"]] == [3, 2, 1]
    assert {hit["field"] for hit in whole["hits"]} == {"accepted answer"}
    monkeypatch.setattr("turntree.trainers.studio.scan.SLICE_SECONDS", -1.0)
    steps, before = [], None
    while True:
        part = search(run, "king 2", before=before)
        steps += [hit["step"] for hit in part["hits"]]
        before = part["next"]
        if before is None:
            break
    assert steps == [3, 2, 1]
    assert search(run, "no such words")["hits"] == []


def test_the_same_question_is_found_at_every_step(run: Run) -> None:
    key = run.summaries(3)[1].key
    found = occurrences(run, key)
    assert [(tree["step"], tree["index"]) for tree in found["trees"]] == [(3, 1), (2, 1), (1, 1)]
    assert found["next"] is None


# Tokens ---------------------------------------------------------------------------------------------------------------


@given(st.text(max_size=30))
def test_pieces_are_the_text_and_cover_all_tokens(text: str) -> None:
    tokenizer = ByteTokenizer()
    text = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    found = list(pieces(ids, tokenizer.decode))
    assert "".join(piece for _, piece in found) == tokenizer.decode(ids)
    assert sum(count for count, _ in found) == len(ids)


def test_unfinished_characters_end_as_they_are() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("ab京")[:-1]
    found = list(pieces(ids, tokenizer.decode))
    assert [count for count, _ in found] == [1, 1, 2]
    assert found[-1][1].startswith("\ufffd")


def test_tokens_carry_every_stored_number(run: Run) -> None:
    reader = TokenReader("test", lambda ids: "".join(f"[{i}]" for i in ids))
    stored = run.step(1).stored(0)
    node = stored.tree.root.children[0]
    view = token_view(run, 1, 0, "0", reader)
    assert "".join(text for _, text in view["pieces"]) == "".join(f"[{i}]" for i in node.turn_ids)
    assert view["columns"]["logprob"] == list(node.logprobs)
    assert view["columns"]["entropy"] == list(node.entropies)
    assert view["columns"]["value"] == list(stored.tokens["value"][node])
    assert token_view(run, 1, 0, "0", None)["pieces"] is None
    with pytest.raises(DataError, match=r"no node '9\.9'"):
        token_view(run, 1, 0, "9.9", reader)
    assert find_node(json.loads(encode_line(stored)), "root")["path"] == []


def test_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", steps=1, trees=1, leaves=2))
    store = TreeStore(tmp_path / "run" / "trees")
    import zstandard

    line = (
        zstandard.ZstdDecompressor()
        .stream_reader(store.file(1).read_bytes())
        .read()
        .replace(b'"schema":1', b'"schema":9')
    )
    store.file(1).write_bytes(zstandard.ZstdCompressor().compress(line))
    with pytest.raises(DataError, match="schema 9"):
        run.summaries(1)


def test_a_run_with_values_stores_them_for_every_sampled_token(
    tmp_path: Path, make_config: Callable[..., RunConfig]
) -> None:
    from turntree.trainers import train

    train(make_config("algorithm=ppo", "trainer.steps=1", "trainer.prompts_per_step=2", f"out={tmp_path / 'run'}"))
    run = open_run(tmp_path / "run")
    nodes = 0
    for index in range(len(run.summaries(1))):
        stored = run.step(1).stored(index)
        for leaf in stored.tree.scored_leaves():
            for node in leaf.trajectory():
                assert len(stored.tokens["value"][node]) == len(stored.tokens["advantage"][node]) == len(node.turn_ids)
                nodes += 1
    assert nodes > 0
