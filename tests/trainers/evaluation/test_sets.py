"""Sets by name or file, each with what it is searched in and compared after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.errors import ConfigError, DataError
from turntree.trainers.eval_config import PAPER_SETS
from turntree.trainers.evaluation.sets import load_sets, set_labels


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, split in (("nq", "test"), ("bamboogle", "test"), ("chinese_simpleqa", "test")):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"id": f"{name}{i}", "question": f"{name} {i}?", "golden_answers": ["yes", "是"]} for i in range(9)]
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path


def test_published_sets_bring_their_own(make_config: Callable[..., Any], data: Path) -> None:
    config = make_config(
        "eval.sets=[nq,bamboogle,chinese_simpleqa]", f"eval.data={data}", "eval.limit=4",
        "eval.set_options.bamboogle={limit: 2, corpus: b.jsonl, search: {top_k: 5}, env: {max_turns: 9}}",
    )  # fmt: skip
    nq, bamboogle, chinese = load_sets(config)
    assert [len(one.questions or ()) for one in (nq, bamboogle, chinese)] == [4, 2, 4]
    assert (bamboogle.config.search.corpus, bamboogle.config.search.top_k) == ("b.jsonl", 5)
    assert (bamboogle.config.env.max_turns, nq.config.env.max_turns) == (9, config.env.max_turns)
    assert nq.config.env.normalizer == "squad"
    assert chinese.config.env.normalizer in ("unicode", "zh")
    assert (nq.config.env.language, chinese.config.env.language) == ("en", "zh")
    assert nq.data["dataset"] == "nq"
    assert len({one.data["ids"] for one in (nq, bamboogle, chinese)}) == 3
    assert {len(one.data["sha256"]) for one in (nq, bamboogle, chinese)} == {64}


def test_files_and_names_of_one_s_own(make_config: Callable[..., Any], data: Path) -> None:
    file = data / "nq" / "test.jsonl"
    config = make_config(f"eval.sets=['{file}','mine={file}']", "eval.set_options.mine.normalizer=unicode")
    one, two = load_sets(config)
    assert (one.name, two.name) == ("test", "mine")
    assert (one.config.env.normalizer, two.config.env.normalizer) == ("", "unicode")
    assert one.data["ids"] == two.data["ids"]


def test_a_random_subset_depends_on_the_seed_only(make_config: Callable[..., Any], data: Path) -> None:
    def ids(*more: str) -> list[str]:
        config = make_config("eval.sets=[nq]", f"eval.data={data}", "eval.limit=4", "eval.subset=random", *more)
        return [q.id for q in load_sets(config)[0].questions or ()]

    assert ids() == ids() == sorted(ids())
    assert ids() != ids("seed=9")


def test_all_are_the_eight_of_the_papers(make_config: Callable[..., Any]) -> None:
    assert tuple(set_labels(make_config("eval.sets=[all]"))) == PAPER_SETS
    assert set_labels(make_config("eval.sets=[2wiki,hotpot]")) == ["2wikimultihopqa", "hotpotqa"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.sets=[hotpot_qa]"], "Did you mean"),
        (["eval.sets=[nq]", "eval.set_options.popqa.limit=3"], r"eval\.set_options\.popqa.*sets \['nq'\]"),
        (["eval.sets=[nq]", "eval.set_options.nq.corpsu=x"], "Did you mean 'corpus'"),
        (["eval.sets=[nq]", "eval.set_options.nq.search={top: 3}"], r"search\.top is not known"),
        (["eval.sets=[nq,all]"], "twice"),
        (["eval.set_options.nq.limit=3"], "eval.sets, which is empty"),
        (["eval.choose=[best]"], r"eval\.choose"),
        (["eval.tree=true", "eval.tree_leaves=2"], "nothing to grow"),
        (["eval.tree=true", "eval.choose=[value]"], r"eval\.value_head is empty"),
        (["eval.samples=2", "eval.temperature=0"], "would be equal"),
        (["eval.sets=[nq,nq]"], "twice"),
        (["eval.sets=[nq]", "eval.set_options.nq.normalizer=squat"], "squad"),
        (["eval.sets=[nq]", "eval.set_options.nq.limit=0"], r"limit: expected null or a whole number from 1, found 0"),
        (["eval.sets=[nq]", "eval.set_options.nq.limit=true"], "found True"),
        (["eval.sets=[nq]", "eval.set_options.nq.env={max_turns: x}"], "env does not fit.*Integer"),
        (["eval.sets=[nq]", "eval.set_options.nq.env=x"], "options of env"),
        (["eval.sets=[nq]", "eval.set_options.nq.scorers=squad"], "a list of names"),
        (["eval.sets=[../x=nq.jsonl]"], "without slashes"),
        (["eval.sets=[=nq.jsonl]"], "without slashes"),
    ],
)
def test_options_that_do_not_fit(
    make_config: Callable[..., Any], data: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_sets(make_config(f"eval.data={data}", *overrides))


def test_a_missing_set_says_where_it_was_looked_for(make_config: Callable[..., Any], data: Path) -> None:
    with pytest.raises(DataError, match=r"popqa: expected popqa/test\.jsonl"):
        load_sets(make_config("eval.sets=[nq,popqa]", f"eval.data={data}"))
