"""Audits of completeness checkers: figures, labelled trajectories, and the command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.completeness import Ballot, Poll, RuleChecker, Vote, call_turns
from turntree.agents.scorer import Failed, Finished
from turntree.cli import cli
from turntree.envs import Limits, Question, SearchQACore
from turntree.envs.worlds import generate_world, load_world
from turntree.errors import ConfigError, DataError
from turntree.search_backend.bm25 import BM25Backend
from turntree.trainers.audit import audit, judge
from turntree.trainers.labelled import Labelled, read_labelled, replay, save_rows, world_trajectories


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_world("quickstart", seed=5, questions=60).save(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def played(world: Path) -> list[Labelled]:
    return world_trajectories(world, laziness=0.4, error=0.2, seed=1)


# -- trajectories ----------------------------------------------------------------------------------------------


def test_trajectories_of_a_world_are_of_every_kind(world: Path, played: list[Labelled]) -> None:
    """Complete and right, complete and wrong, incomplete and wrong, and a lucky guess or two."""
    kinds = Counter((item.label, bool(item.finished.info["em"])) for item in played)
    assert kinds[True, True] > 10
    assert kinds[False, False] > 5
    assert kinds[True, False] + kinds[False, True] > 0
    assert [item.finished.task for item in played] == load_world(world).questions


def test_labels_follow_the_gold_steps_and_agree_with_the_rule_checker(played: list[Labelled]) -> None:
    for item in played:
        found = {i for turn in call_turns(item.finished) for i in turn.retrieved}
        assert item.label == (set(item.finished.task.metadata["supporting_ids"]) <= found)
        for gold in ("auto", "steps", "passages"):
            (vote,) = RuleChecker(gold).vote([Ballot(item.finished, 0)])
            assert isinstance(vote, Vote)
            assert vote.complete == item.label


def test_a_careful_teacher_is_always_complete(world: Path) -> None:
    careful = world_trajectories(world, questions=20, laziness=0, error=0)
    assert all(item.label for item in careful)
    assert sum(item.finished.reward for item in careful) == len(careful) == 20


def test_what_is_written_is_read_again(played: list[Labelled], tmp_path: Path) -> None:
    _, rows = audit(played, Poll(RuleChecker()))
    save_rows(tmp_path / "rows.jsonl", rows)
    again = read_labelled(tmp_path / "rows.jsonl")
    assert [item.label for item in again] == [item.label for item in played]
    for item, old in zip(again, played):
        assert item.finished.task == old.finished.task
        assert item.finished.answer == old.finished.answer
        assert call_turns(item.finished) == call_turns(old.finished)
    assert audit(again, Poll(RuleChecker()))[0] == audit(played, Poll(RuleChecker()))[0]


def test_line_separators_inside_a_text_end_no_row(played: list[Labelled], tmp_path: Path) -> None:
    item = dataclasses.replace(played[0], finished=dataclasses.replace(played[0].finished, answer="a\u2028b\x85c"))
    _, rows = audit([item], Poll(RuleChecker()))
    save_rows(tmp_path / "rows.jsonl", rows)
    (again,) = read_labelled(tmp_path / "rows.jsonl")
    assert again.finished.answer == "a\u2028b\x85c"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": 2}, "label is 2"),
        ({"label": None}, "label"),
        ({"question": {"id": "q"}}, "question"),
        ({"turns": [{"result": "x"}]}, "calls"),
        ({"turns": 3}, "line 1"),
        ({"answer": 5}, "answer is 5"),
        ({"turns": {}}, "turns is {}, expected a list"),
        ({"turns": [{"calls": "ab"}]}, "calls is 'ab', expected a list"),
        ({"turns": [{"calls": [{"tool": "search"}]}]}, "'argument' is missing"),
        ({"turns": [{"calls": [{"tool": None, "argument": "a"}]}]}, "the tool of a call is None, expected a text"),
        ({"turns": [{"calls": [{"tool": "t", "argument": {"a": 1}}]}]}, "argument of a call is {'a': 1}"),
        ({"turns": [{"calls": [], "result": None}]}, "the result is None, expected a text"),
        ({"turns": [{"calls": [], "retrieved": "p1"}]}, "retrieved is 'p1', expected a list"),
        ({"turns": [{"calls": [], "retrieved": [None]}]}, "retrieved holds None"),
        ({"question": {"id": "q", "question": "?", "golden_answers": "Cy"}}, "golden_answers is 'Cy', expected a list"),
        ({"question": {"id": "q", "question": None, "golden_answers": []}}, "question is None, expected a text"),
    ],
)
def test_rows_that_are_no_labelled_trajectory_are_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    question = {"id": "q", "question": "?", "golden_answers": ["x"], "metadata": {}}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": question, "turns": [], "answer": None, "label": 1, **change}))
    with pytest.raises(DataError, match=words):
        read_labelled(path)


def test_a_row_of_a_thousand_brackets_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match="line 1"):
        read_labelled(tmp_path / "rows.jsonl")


def test_files_without_trajectories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read"):
        read_labelled(tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="found none"):
        read_labelled(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="found none"):
        audit([], Poll(RuleChecker()))


def test_a_replay_must_end_with_its_last_turn(world: Path) -> None:
    loaded = load_world(world)
    core = SearchQACore(BM25Backend.from_passages(loaded.passages), limits=Limits(max_turns=3))
    question = loaded.questions[0]
    finished = replay(core, question, ["<search>Hamlet</search>", "<answer>x</answer>"])
    assert (finished.status, finished.answer, len(finished.turns)) == ("answered", "x", 2)
    assert replay(core, question, ["<search>a</search>"] * 3).status == "truncated"
    for texts, words in (
        (["<search>a</search>"], "goes on"),
        ([], "goes on"),
        (["<answer>x</answer>"] * 2, "with turn 1"),
    ):
        with pytest.raises(DataError, match=words):
            replay(core, question, texts)


# -- figures ---------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0, None]), st.booleans()), max_size=25))
def test_figures_follow_from_the_confusion(pairs: list[tuple[float | None, bool]]) -> None:
    scores: list[float | Failed] = [Failed("verdict") if score is None else score for score, _ in pairs]
    found = judge("x", scores, [label for _, label in pairs])
    n = found.tp + found.fp + found.fn + found.tn
    assert n + found.failed == len(pairs)
    assert found.tp == sum(score is not None and score > 0.5 and label for score, label in pairs)
    if n:
        assert found.accuracy.mean == pytest.approx((found.tp + found.tn) / n)
    if found.tp:
        precision, recall = found.precision.mean, found.recall.mean
        assert found.f1.mean == pytest.approx(2 * precision * recall / (precision + recall))
    for interval in (found.accuracy, found.precision, found.recall, found.f1):
        assert math.isnan(interval.low) or 0 <= interval.low <= interval.mean <= interval.high <= 1


class Panel:
    """Votes by number; every fourth trajectory gets no verdict at all."""

    constant = False
    fingerprint = "panel"

    def __init__(self) -> None:
        self.count = 0

    def content(self, finished: Finished) -> str:
        return str(finished.task.id)

    def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
        return [self.one(ballot.finished) for ballot in ballots]

    def one(self, finished: Finished) -> Vote | Failed:
        self.count += 1
        if finished.task.id[-1] in "abc" or int(finished.task.id[-5:]) % 4 == 0:
            return Failed("verdict", "nothing")
        return Vote(self.count % 3 != 0, 100, 10)


def test_agreement_failures_and_cost(played: list[Labelled]) -> None:
    found, rows = audit(played, Poll(Panel(), votes=3, dead_after=None), name="panel")
    lost = sum(int(item.finished.task.id[-5:]) % 4 == 0 for item in played)
    assert found.judges[0].failed == lost > 0
    assert found.failures == {"verdict": 3 * lost}
    assert f"failed votes: verdict x {3 * lost}: nothing" in found.lines()
    assert (found.votes, found.valid_votes) == (180, 180 - 3 * lost)
    assert (found.prompt_tokens, found.completion_tokens) == (100 * found.valid_votes, 10 * found.valid_votes)
    # Two of three votes say yes each time: one pair of three agrees.
    assert found.agreement.mean == pytest.approx(1 / 3)
    assert found.kappa == pytest.approx((1 / 3 - 5 / 9) / (4 / 9))
    assert [row["score"] is None for row in rows].count(True) == lost
    assert all(sorted(map(str, row["votes"])) == ["False", "True", "True"] for row in rows if row["score"] is not None)


def test_chinese_answers_are_compared_as_chinese() -> None:
    """Otherwise the comparison would be won by a checker that is none."""
    asked = [
        Question("a", "谁写的？", ("《红楼梦》",)),
        Question("b", "多少？", ("120",)),
        Question("c", "Who?", ("A Bo",)),
    ]
    said = ["红楼梦。", "一百二十", "bo"]
    labelled = [
        Labelled(Finished(question, question.question, (), "answered", answer, 0.0), True)
        for question, answer in zip(asked, said)
    ]
    found, _ = audit(labelled, Poll(Panel(), dead_after=None))
    assert [judge.tp for judge in found.judges[1:]] == [3, 3]


def test_the_comparison_with_answer_rewards(played: list[Labelled]) -> None:
    """A lazy teacher's answers misjudge its calls; the gain is the paired difference of accuracies."""
    found, _ = audit(played, Poll(RuleChecker()), name="rule")
    rule, em, f1 = found.judges
    assert [rule.name, em.name, f1.name] == ["rule", "answer EM", "answer F1"]
    assert rule.accuracy.mean == rule.f1.mean == 1
    assert em.accuracy.mean < 1
    for other in (em, f1):
        gain = found.gains[other.name]
        assert gain.difference.mean == pytest.approx(rule.accuracy.mean - other.accuracy.mean)
        assert (gain.wins, gain.losses) == (other.fp + other.fn, 0)


# -- the command -----------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["audit-reward", *arguments])


def test_the_command_prints_a_table_or_json(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    table = run("--world", str(world), "--questions", "30", "--out", str(out))
    assert table.exit_code == 0, table.output
    for words in ("30 trajectories", "rule", "answer EM", "answer F1", "accuracy of rule minus answer EM", "tokens"):
        assert words in table.output
    plain = run("--trajectories", str(out), "--checker", "f1", "--arg", "threshold=0.9", "--json")
    assert plain.exit_code == 0, plain.output
    document = json.loads(plain.output)
    assert document["trajectories"] == 30
    assert [row["name"] for row in document["judges"]] == ["f1", "answer EM", "answer F1"]
    assert document["agreement"]["mean"] is None


def test_the_command_asks_a_server(openai_server: Any, world: Path, tmp_path: Path) -> None:
    say = {"kind": "say", "text": "<verdict>complete</verdict>", "usage": {"prompt_tokens": 50, "completion_tokens": 5}}
    openai_server.faults(*[say] * 11, {**say, "text": "who knows"})
    at = ("--arg", f"base_url={openai_server.url}", "--arg", "model=tiny", "--arg", "retries=0")
    cache = ("--cache", str(tmp_path / "votes.sqlite"))
    done = run("--world", str(world), "--questions", "4", "--checker", "llm", *at, *cache, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.output)
    assert (document["votes"], document["valid_votes"], document["failures"]) == (12, 11, {"verdict": 1})
    assert (document["prompt_tokens"], document["completion_tokens"]) == (600, 60)
    assert document["judges"][0]["recall"]["mean"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "one of the two"),
        (("--world", "WORLD", "--checker", "ruel"), "did you mean 'rule'"),
        (("--world", "WORLD", "--votes", "0"), "votes=0"),
        (("--world", "WORLD", "--arg", "gold=maybe"), "gold"),
        (
            ("--world", "WORLD", "--out", "/proc/turntree/rows.jsonl"),
            "--out /proc/turntree/rows.jsonl: expected a file",
        ),
        (("--world", "WORLD", "--out", "/tmp"), "found a folder"),
    ],
)
def test_the_command_refuses_what_does_not_fit(world: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(*(str(world) if word == "WORLD" else word for word in arguments))
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)


def test_a_number_of_questions_below_one_is_refused(world: Path) -> None:
    """Cut off like a list, -3 would be all but three."""
    assert run("--world", str(world), "--questions", "-3").exit_code == 2
    for questions in (0, -3):
        with pytest.raises(ConfigError, match="at least 1"):
            world_trajectories(world, questions=questions)
