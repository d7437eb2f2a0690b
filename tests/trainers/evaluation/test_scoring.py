"""The whole of ``turntree evaluate`` on a tiny model: every way of playing, killed and resumed, compared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.commands import run_evaluate
from turntree.errors import CheckpointError, ConfigError
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluation import modes
from turntree.trainers.evaluation.compare import compare, read_side
from turntree.trainers.evaluation.journal import Journal
from turntree.trainers.evaluation.rows import file_rows
from turntree.trainers.scoring import score, score_sets

WAYS = ("evaluation", "samples", "trees", "closed_book")


@pytest.fixture
def config(make_config: Callable[..., RunConfig], bed: Any) -> RunConfig:
    return make_config(
        f"env.test_questions={bed.world}", "eval.limit=6", "eval.batch=2", "eval.samples=2", "eval.tree=true",
        "eval.tree_leaves=4", "eval.closed_book=true", "eval.constants=[Bolmar]", "eval.scorers=[search_r1,unicode]",
    )  # fmt: skip


def lines(folder: Path, way: str) -> list[str]:
    return (folder / f"{way}.jsonl").read_text(encoding="utf-8").splitlines()


def test_every_way_has_rows_and_numbers(config: RunConfig, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    document = score_sets(config, tmp_path, report=lambda *at: seen.append(at)).documents[""]
    assert [stage for stage, done, total in seen if done == total] == ["evaluate", "samples", "trees", "closed_book"]
    assert [len(lines(tmp_path, way)) for way in WAYS] == [6, 24, 24, 6]
    assert not list(tmp_path.glob("*.partial.jsonl"))
    assert (document["n"], document["sampled"]["samples"], document["tree"]["n"]) == (6, 4, 6)
    assert document["tree"]["tree"]["leaves"] == document["tree"]["best_of_leaves"]["leaves"] == 4.0
    tree, flat = (document["tree"][name]["generated_tokens"] for name in ("tree", "best_of_leaves"))
    assert tree < flat, "shared turns are generated once"
    assert document["tree"]["best_of_tokens"]["generated_tokens"] <= tree
    assert document["closed_book"]["searches_mean"] == 0.0
    assert [c["answer"] for c in document["constants"] if not c["most_frequent"]] == ["Bolmar"]
    assert {"search_r1/em", "unicode/f1", "em_disagreements", "observation_tokens_mean", "supporting_all"} <= set(
        document
    )
    assert document["breakdown"]["by_hops"]
    assert sum(kind["n"] for kind in document["breakdown"]["by_type"].values()) == 6
    assert document["passport"]["data"]["questions"] == 6
    first, *_ = file_rows(tmp_path / "evaluation.jsonl")
    assert len(first.trajectory) == first.turns
    leaves = file_rows(tmp_path / "trees.jsonl")
    assert {row.reward for row in leaves} == {0.0}, "a tree grows without the gold answers"
    assert all(row.spent_tokens and row.logprob is not None for row in leaves)
    assert "avg@4" in (tmp_path / "evaluation.md").read_text(encoding="utf-8")


class Killed(BaseException):
    """As good as kill -9: nobody catches it."""


@pytest.mark.parametrize(
    ("way", "batches"),
    [
        ("evaluation", 2),
        ("trees", 2),
        pytest.param("samples", 1, marks=pytest.mark.slow),
        pytest.param("closed_book", 1, marks=pytest.mark.slow),
    ],
)
def test_resumed_equals_never_stopped(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, batches: int
) -> None:
    whole = score(config, tmp_path / "whole")
    count = 0

    class Faulty(Journal):
        def write(self, rows: Sequence[Any]) -> None:
            nonlocal count
            super().write(rows)
            count += self.path.name.startswith(way) and bool(rows)
            if count == batches:
                self._file.append_lines(b'[{"id": "cut in the mid')
                raise Killed

    monkeypatch.setattr(modes, "Journal", Faulty)
    with pytest.raises(Killed):
        score(config, tmp_path / "again")
    monkeypatch.undo()
    played: list[int] = []
    resumed = score(replace(config, resume=True), tmp_path / "again", report=lambda done, total: played.append(done))
    assert played[0] > 2, "what was played is not played again"
    assert resumed == whole
    for name in WAYS:
        assert lines(tmp_path / "again", name) == lines(tmp_path / "whole", name)
    again: list[int] = []
    assert score(replace(config, resume=True), tmp_path / "again", report=lambda *at: again.append(1)) == whole
    assert not again


def test_ways_join_a_finished_result_and_other_options_are_refused(config: RunConfig, tmp_path: Path) -> None:
    plain = replace(config, eval=replace(config.eval, samples=0, tree=False, closed_book=False))
    first = score(plain, tmp_path)
    assert "sampled" not in first
    resumed = score(replace(plain, resume=True, eval=replace(plain.eval, samples=2)), tmp_path)
    assert (resumed["em"], resumed["sampled"]["samples"]) == (first["em"], 2)
    with pytest.raises(CheckpointError, match="temperature"):
        score(replace(plain, resume=True, eval=replace(plain.eval, samples=2, temperature=0.5)), tmp_path)
    with pytest.raises(CheckpointError, match="ids"):
        score(replace(plain, resume=True, eval=replace(plain.eval, limit=3)), tmp_path)


def test_files_that_changed_under_their_names_are_told(config: RunConfig, bed: Any, tmp_path: Path) -> None:
    """A result never mixes weights, or gold answers, that bear one name."""
    from safetensors.torch import load_file, save_file

    model, world, out = tmp_path / "model", tmp_path / "world", tmp_path / "out"
    shutil.copytree(bed.model, model)
    shutil.copytree(bed.world, world)
    options = replace(config.eval, samples=0, tree=False, closed_book=False, limit=2)
    env = replace(config.env, test_questions=str(world))
    plain = replace(config, model=replace(config.model, path=str(model)), env=env, eval=options)
    first = score(plain, out)
    assert score(replace(plain, resume=True), out) == first
    file = world / "questions.jsonl"
    rows = file.read_text(encoding="utf-8")
    question = json.loads(rows.splitlines()[0])
    file.write_text(rows.replace(question["golden_answers"][0], "Nobody", 1), encoding="utf-8")
    with pytest.raises(CheckpointError, match="content"):
        score(replace(plain, resume=True), out)
    file.write_text(rows, encoding="utf-8")
    weights = load_file(model / "model.safetensors")
    save_file({name: tensor + 0.1 for name, tensor in weights.items()}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="weights_hash"):
        score(replace(plain, resume=True), out)
    assert json.loads((out / "evaluation.json").read_text(encoding="utf-8")) == first


def test_sets_are_evaluated_compared_and_tabled(bed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = bed.world / "questions.jsonl"
    sets = f"eval.sets=['nq={questions}','musique={questions}']"
    common = [*bed.args, sets, "eval.set_options.musique={limit: 3}", "eval.limit=5"]
    run_evaluate([*common, f"out={tmp_path / 'a'}"])
    shown = capsys.readouterr().out
    assert "NQ" in shown
    assert "avg multi-hop (1 of 4)" in shown
    assert "nq: EM" in shown
    together = json.loads((tmp_path / "a" / "evaluations.json").read_text(encoding="utf-8"))["sets"]
    assert {name: d["n"] for name, d in together.items()} == {"nq": 5, "musique": 3}
    for name in ("evaluation.md", "evaluation.csv", "nq/evaluation.json", "musique/evaluation.jsonl"):
        assert (tmp_path / "a" / name).is_file()
    run_evaluate([*common, "search.top_k=2", "sampling.eval_temperature=1.0", f"out={tmp_path / 'b'}"])
    found = compare(read_side("a", [tmp_path / "a"]), read_side("b", [tmp_path / "b"]), resamples=200)
    assert found.common == 8
    assert {warning.split(":")[0] for warning in found.warnings} == {"nq", "musique"}
    assert any("search.top_k" in warning for warning in found.warnings)


@pytest.mark.slow
def test_a_value_head_chooses(make_config: Callable[..., RunConfig], bed: Any, tmp_path: Path) -> None:
    from turntree.commands import run_train

    run = tmp_path / "run"
    run_train([*bed.args, "algorithm=ppo", "trainer.steps=1", "algorithm.chains=2", f"out={run}"])
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    config = make_config(
        f"model.path={run / 'model'}", f"env.test_questions={bed.world}", "eval.limit=3", "eval.tree=true",
        "eval.tree_leaves=3", "eval.choose=[value,majority]", f"eval.value_head={checkpoint}",
    )  # fmt: skip
    document = score(config, tmp_path / "out")
    assert set(document["tree"]["tree_minus_tokens"]) == {"value", "majority"}
    values = {row.value for row in file_rows(tmp_path / "out" / "trees.jsonl")}
    assert None not in values
    assert len(values) > 1
    run_train([*bed.args, "trainer.steps=1", f"out={tmp_path / 'plain'}"])
    (other,) = (tmp_path / "plain" / "checkpoints").glob("step-*")
    with pytest.raises(ConfigError, match="algorithm=ppo"):
        score(replace(config, eval=replace(config.eval, value_head=str(other))), tmp_path / "out2")


def test_trees_that_would_need_gold_answers_are_refused(config: RunConfig, tmp_path: Path) -> None:
    peeking = replace(config.eval, tree_rule="turntree.trainers.expansion:ucb", samples=0)
    with pytest.raises(ConfigError, match=r"reward\.scorer"):
        score(replace(config, eval=peeking), tmp_path / "a")
    with pytest.raises(ConfigError, match=r"knows the gold answers"):
        score(replace(config, eval=replace(config.eval, choose=["scorer"])), tmp_path / "b")


def test_a_scorer_chooses_and_guides(config: RunConfig, tmp_path: Path) -> None:
    reward = replace(config.reward, scorer="users_rules:constant")
    options = replace(config.eval, choose=["scorer"], tree_rule="turntree.trainers.expansion:ucb", closed_book=False)
    document = score(replace(config, reward=reward, eval=replace(options, limit=2)), tmp_path)
    assert set(document["tree"]["tree_minus_tokens"]) == {"scorer"}
    assert {row.reward for row in file_rows(tmp_path / "trees.jsonl")} == {0.25}


def test_tokens_bound_a_tree(config: RunConfig, tmp_path: Path) -> None:
    options = replace(config.eval, tree_leaves=12, tree_tokens=8, limit=3, closed_book=False)
    document = score(replace(config, eval=options), tmp_path)
    assert 2 <= document["tree"]["tree"]["leaves"] < 12


@pytest.mark.slow
def test_a_chat_endpoint_is_sampled_and_searched(bed: Any, openai_server: Any, tmp_path: Path) -> None:
    chat = [
        *bed.args, "engine=openai", f"engine.base_url={openai_server.url}", "engine.model=tiny",
        f"env.test_questions={bed.world}", "eval.limit=2", "eval.tree=true", "eval.tree_leaves=3",
        "eval.tree_rule=turntree.trainers.expansion:random_nodes",
    ]  # fmt: skip
    openai_server.faults()
    with pytest.raises(ConfigError, match="chat endpoint"):
        run_evaluate([*chat, f"out={tmp_path / 'no'}"])
    assert not openai_server.log(), "refused before anything is played"
    run_evaluate([*chat, "eval.choose=[majority]", f"out={tmp_path / 'out'}"])
    document = json.loads((tmp_path / "out" / "evaluation.json").read_text(encoding="utf-8"))
    assert document["tree"]["n"] == 2
    assert document["usage"]["requests"] == len(openai_server.log()) > 6
