"""RLTR's reward: votes, penalties, checkers, the cache, and the scorer that puts them together."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.agents.completeness import (
    AnswerChecker,
    Ballot,
    CompletenessScorer,
    Penalties,
    Penalty,
    Poll,
    RuleChecker,
    Vote,
    VoteCache,
    call_key,
    call_turns,
    completeness,
    load_checker,
    total_reward,
    violations,
)
from turntree.agents.completeness.calls import Call
from turntree.agents.completeness.votes import votes_needed
from turntree.agents.scorer import Failed, Finished, FinishedTurn, Judged
from turntree.envs import Question
from turntree.envs.task import FrozenDict
from turntree.errors import ConfigError, CostLimitError, DataError, EngineError

STEPS = [
    {"query": "Ava mentor", "supporting_id": "p1", "answer": "Bo"},
    {"query": "Bo college", "supporting_id": "p2", "answer": "Cy"},
]
ASKED = Question("q", "Which college did the mentor of Ava attend?", ("Cy",), FrozenDict({"steps": STEPS}))


def searched(query: str, *ids: str, result: str = "a passage", **info: Any) -> FinishedTurn:
    calls = [{"tool": "search", "argument": query}]
    found = {"calls": calls, "retrieved": [{"id": i, "title": ""} for i in ids], **info}
    return FinishedTurn(f"<search>{query}</search>", "search", result, FrozenDict(found))


def invalid(reason: str) -> FinishedTurn:
    return FinishedTurn("?", "invalid", "Once more.", FrozenDict({"action": "invalid", "invalid_reason": reason}))


def ended(*turns: FinishedTurn, task: Any = ASKED, answer: str | None = "Cy", **info: Any) -> Finished:
    end = FinishedTurn("<answer>x</answer>", "answer", "", FrozenDict({"action": "answer"}))
    return Finished(task, task.question, (*turns, end), "answered", answer, 0.0, None, FrozenDict(info))


class Panel:
    """Votes as a list says, in the order in which they are asked for; counts what it was asked."""

    constant = False
    fingerprint = "panel"

    def __init__(self, says: Callable[[Finished, int], bool | Failed] | Sequence[bool | Failed]) -> None:
        self.says = says
        self.asked: list[Ballot] = []

    def content(self, finished: Finished) -> str:
        return repr((finished.task.id, call_turns(finished)))

    def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
        return [self._one(ballot) for ballot in ballots]

    def _one(self, ballot: Ballot) -> Vote | Failed:
        number = len(self.asked)
        self.asked.append(ballot)
        said = self.says(ballot.finished, ballot.seed) if callable(self.says) else self.says[number]
        return said if isinstance(said, Failed) else Vote(said, 10, 2)


def rewards(scorer: CompletenessScorer, *finished: Finished) -> list[float | str]:
    out = scorer(finished)
    return [o.reward if isinstance(o, Judged) else o.kind if isinstance(o, Failed) else o for o in out]


# -- the formula -----------------------------------------------------------------------------------------------


def test_golden_rewards(golden_dir: Path) -> None:
    cases = json.loads((golden_dir / "rltr_reward.json").read_text())["cases"]
    assert cases
    for case in cases:
        r_comp = completeness(list(map(bool, case["completeness_votes"])))
        total = total_reward(r_comp, case["rule_penalty_sum"], legal=case["format_ok"])
        assert r_comp == pytest.approx(case["R_comp"], abs=1e-6)
        assert total == pytest.approx(case["R_total"], abs=1e-6)


def test_golden_rewards_through_the_scorer(golden_dir: Path) -> None:
    """The same numbers from whole trajectories: votes of a panel, and repeated calls of the case's penalty."""
    for case in json.loads((golden_dir / "rltr_reward.json").read_text())["cases"]:
        size = -float(case["rule_penalty_sum"])
        panel = Panel([bool(v) for v in case["completeness_votes"]])
        scorer = CompletenessScorer(
            checker=panel,
            votes=len(case["completeness_votes"]),
            penalties={"repeated": {"size": size, "cap": 99}, "floor": -99},
        )
        twice = (searched("Ava"), searched("ava ?"))
        (judged,) = scorer([ended(*twice, format_valid=case["format_ok"])])
        assert isinstance(judged, Judged)
        assert judged.reward == pytest.approx(case["R_total"], abs=1e-6)


votes = st.lists(st.booleans(), min_size=1, max_size=9)
counts = st.integers(0, 40)


@given(votes, st.randoms(use_true_random=False))
def test_the_order_of_votes_does_not_matter(cast: list[bool], rng: random.Random) -> None:
    shuffled = cast[:]
    rng.shuffle(shuffled)
    for majority in (False, True):
        assert completeness(cast, majority=majority) == completeness(shuffled, majority=majority)
    assert 0 <= completeness(cast) <= 1
    assert (completeness(cast, majority=True) - 0.5) * (completeness(cast) - 0.5) >= 0


@given(votes, counts, counts, counts, st.floats(0, 2), st.floats(0, 2), st.floats(-3, 0))
def test_penalties_are_monotone_and_bounded(
    cast: list[bool], repeated: int, bad: int, unknown: int, size: float, cap: float, floor: float
) -> None:
    rules = Penalties(Penalty(size, cap), Penalty(size, cap), Penalty(size, cap), floor=floor)
    given_counts = {"repeated": repeated, "bad_argument": bad, "unknown_tool": unknown}
    parts = rules.parts(given_counts)
    assert floor <= parts["rule"] <= 0
    assert all(-cap <= parts[f"rule_{name}"] <= 0 for name in given_counts)
    assert parts["rule"] == max(floor, sum(parts[f"rule_{name}"] for name in given_counts))
    for name in given_counts:
        assert rules.parts({**given_counts, name: given_counts[name] + 1})["rule"] <= parts["rule"]
    total = total_reward(completeness(cast), parts["rule"], legal=True)
    assert floor <= total <= 1
    assert total_reward(completeness(cast), parts["rule"], legal=False) == -1


def test_no_vote_is_no_zero() -> None:
    with pytest.raises(ConfigError, match="at least one valid vote"):
        completeness([])


@pytest.mark.parametrize(
    ("given_rules", "words"),
    [
        ({"repeatd": 0.1}, "did you mean 'repeated'"),
        ({"repeated": {"siz": 1}}, "siz"),
        ({"repeated": -0.1}, "leave the minus out"),
        ({"repeated": float("nan")}, "size"),
        ({"repeated": "much"}, "expected a number"),
        ({"floor": 0.5}, "at most 0"),
        ({"max_argument": 0}, "at least 1"),
    ],
)
def test_penalties_that_make_no_sense_are_refused(given_rules: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Penalties.of(given_rules)


def test_penalties_from_a_configuration_keep_what_is_not_given() -> None:
    rules = Penalties.of({"repeated": 0.25, "unknown_tool": {"cap": 0.1}, "max_argument": None})
    assert rules.repeated == Penalty(0.25, cap=Penalties().repeated.cap)
    assert rules.unknown_tool == Penalty(Penalties().unknown_tool.size, cap=0.1)
    assert rules.max_argument is None
    assert rules.bad_argument == Penalties().bad_argument


# -- calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Who wrote Hamlet?", " who  wrote HAMLET ", True),
        ("《红楼梦》的作者？", "《红楼梦》的作者", True),
        ("ＡＢＣ", "abc", True),
        ("C++", "C", False),
        ("-5", "5", False),
        ("vitamin A", "vitamin", False),
        ("??", "!", False),
        ('{"a": 1, "b": 2}', '{"b": 2,  "a": 1}', True),
        ('{"a": "X"}', '{"a": "x"}', False),
        ("x = 1\nprint(x)", "x = 1 \nprint(x)", True),
        ("if x:\n    y()", "if x:\n  y()", False),
    ],
)
def test_identical_calls(one: str, other: str, same: bool) -> None:
    assert (call_key(Call("search", one)) == call_key(Call("search", other))) is same
    assert call_key(Call("search", one)) != call_key(Call("python", one))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("print(A)", "print(a)", False),
        ("print('a  b')", "print('a b')", False),
        ("'１'", "'1'", False),
        ("x = 5;", "x = 5", False),
        (" print(a)\n", "print(a)", True),
    ],
)
def test_one_line_of_code_is_compared_as_it_is(one: str, other: str, same: bool) -> None:
    assert (call_key(Call("python", one)) == call_key(Call("python", other))) is same


@pytest.mark.parametrize("argument", ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000])
def test_an_argument_that_no_parser_can_read_is_a_text_like_others(argument: str) -> None:
    assert call_key(Call("search", argument)) == call_key(Call("search", f"{argument} "))
    assert violations(ended(searched(argument), searched(argument)))["repeated"] == 1


def test_violations_are_counted_by_rule() -> None:
    finished = ended(
        searched("Ava"), searched("AVA."), searched("Bo"), searched("ava"), searched("x" * 20),
        invalid("empty_query"), invalid("bad_json"), invalid("unknown_tool"), invalid("no_action"),
    )  # fmt: skip
    assert violations(finished) == {"repeated": 2, "bad_argument": 2, "unknown_tool": 1}
    assert violations(finished, max_argument=10)["bad_argument"] == 3


def test_an_environment_without_calls_in_its_info_has_one_call_a_turn() -> None:
    turns = (FinishedTurn("go north", "move", "a cave"), FinishedTurn("go  North", "move", "a cave"))
    finished = ended(*turns, FinishedTurn("hm", "invalid", "what?"), FinishedTurn("look", "move", ""))
    assert [turn.calls for turn in call_turns(finished)] == [(Call("move", "go north"),), (Call("move", "go  North"),)]
    assert violations(finished)["repeated"] == 1


@pytest.mark.parametrize("calls", [2, ["look"], [{"name": "look", "arguments": {}}], None, {"tool": "a"}])
@pytest.mark.parametrize("retrieved", [3, ["p1"], [{"title": "x"}], None])
def test_calls_and_passages_of_another_environment_may_be_something_else(calls: Any, retrieved: Any) -> None:
    turn = FinishedTurn("go north", "move", "a cave", FrozenDict({"calls": calls, "retrieved": retrieved}))
    (found,) = call_turns(ended(turn))
    assert found.calls == (Call("move", "go north"),)
    assert found.retrieved == ()


# -- votes -----------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=7), st.data())
def test_early_stop_finds_the_majority_of_all_votes(said: list[bool | None], data: st.DataObject) -> None:
    """Whatever the order and the failures; and it never asks for more than all."""
    quorum = data.draw(st.integers(1, len(said)))
    cast = [Failed("verdict", "nonsense") if vote is None else vote for vote in said]
    panel = Panel(cast)
    poll = Poll(panel, votes=len(said), quorum=quorum, early_stop=True, dead_after=None)
    (tally,) = poll([ended()])
    valid = [vote for vote in said if vote is not None]
    result = poll.result(tally)
    if len(valid) < quorum:
        assert isinstance(result, Failed)
    else:
        assert result == completeness(valid, majority=True)
    assert len(panel.asked) == len(tally.votes) <= len(said)


def test_early_stop_asks_for_no_vote_that_cannot_turn_the_majority() -> None:
    agreeing, split = Panel([True] * 5), Panel([True, False, True, False, False])
    Poll(agreeing, votes=5, early_stop=True)([ended()])
    assert len(agreeing.asked) == 3
    poll = Poll(split, votes=5, early_stop=True)
    assert poll.result(poll([ended()])[0]) == 0.0
    assert len(split.asked) == 5
    assert votes_needed(3, 0, left=2, quorum=4) == 1  # decided, but the quorum is not there


def test_the_mean_needs_every_vote() -> None:
    panel = Panel([True, True, True, False, True])
    poll = Poll(panel, votes=5)
    assert poll.result(poll([ended()])[0]) == 0.8
    assert len(panel.asked) == 5


def test_fewer_valid_votes_than_the_quorum_are_a_failure_never_a_zero() -> None:
    nonsense, lost = Failed("verdict", "no word"), Failed("EngineError", "timeout")
    scorer = CompletenessScorer(checker=Panel([True, nonsense, nonsense, lost, False]), votes=5, quorum=3)
    (failed,) = scorer([ended()])
    assert isinstance(failed, Failed)
    assert failed.kind == "verdict"
    assert "2 of 5 votes are valid, 3 are needed; no word" in failed.message
    enough = CompletenessScorer(checker=Panel([True, nonsense, False, lost, True]), votes=5, quorum=3)
    assert rewards(enough, ended()) == [pytest.approx(2 / 3)]


def test_each_vote_has_its_own_seed_for_any_order_and_batch() -> None:
    one, two = ended(searched("Ava")), ended(searched("Bo"))
    panel = Panel(lambda _, seed: seed % 2 == 0)
    together = CompletenessScorer(checker=panel, votes=4)
    first = rewards(together, one, two)
    assert len({ballot.seed for ballot in panel.asked}) == 8
    assert all(0 <= ballot.seed < 2**31 for ballot in panel.asked)
    again = CompletenessScorer(checker=Panel(panel.says), votes=4)
    assert [*rewards(again, two), *rewards(again, one)] == first[::-1]


def test_equal_trajectories_are_asked_about_once_and_cost_once() -> None:
    panel = Panel([True, False, True])
    poll = Poll(panel, votes=3)
    first, second = poll([ended(searched("Ava")), ended(searched("Ava"), answer="no")])
    assert len(panel.asked) == 3
    assert first.valid == second.valid
    assert (first.tokens, second.tokens) == ((30, 6), (0, 0))
    assert (first.cached, second.cached) == (0, 3)


def test_a_dead_checker_stops_the_run_and_so_does_a_spent_budget() -> None:
    dead = CompletenessScorer(checker=Panel(lambda *_: Failed("EngineError", "refused")), votes=3)
    with pytest.raises(EngineError, match=r"in a row.*refused"):
        dead([ended(searched(str(i))) for i in range(20)])
    spent = CompletenessScorer(checker=Panel(lambda *_: Failed("CostLimitError", "max_cost")))
    with pytest.raises(CostLimitError, match="max_cost"):
        spent([ended()])


def test_questions_without_gold_stop_a_run_only_where_there_are_no_others() -> None:
    bare = Question("q", "?", ("x",))
    without = [ended(searched(str(i)), task=bare) for i in range(40)]
    with pytest.raises(EngineError, match="no_gold"):
        CompletenessScorer()(without)
    assert rewards(CompletenessScorer(), ended(), *without) == [0.0, *["no_gold"] * 40]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"votes": 0}, "votes=0"),
        ({"votes": 3, "quorum": 4}, "quorum=4"),
        ({"checker": "ruel"}, "did you mean 'rule'"),
        ({"checker": "rule", "checker_args": {"gold": "guess"}}, "gold"),
        ({"checker": "rule", "checker_args": {"votes": 3}}, "votes"),
        ({"checker": "builtins:dict"}, "vote, content, fingerprint"),
        ({"checker": RuleChecker(), "checker_args": {"gold": "steps"}}, "found an object"),
        ({"corrections": "fine"}, "corrections"),
        ({"cache_size": -1}, "cache_size"),
        ({"illegal": float("nan")}, "illegal=nan"),
        ({"votes": "3"}, "votes='3': expected a whole number"),
        ({"votes": 2.5}, "votes=2.5: expected a whole number"),
        ({"votes": True}, "votes=True"),
        ({"quorum": 1.5}, "quorum=1.5"),
        ({"seed": "a"}, "seed='a'"),
        ({"early_stop": "maybe"}, "early_stop='maybe': expected true or false"),
        ({"judge_illegal": 1}, "judge_illegal=1"),
        ({"illegal": "x"}, "illegal=x"),
        ({"penalties": 0.3}, "penalties=0.3: expected rules"),
        ({"penalties": {"max_argument": float("inf")}}, "max_argument=inf: expected a whole number"),
        ({"penalties": {"max_argument": 2.5}}, "max_argument=2.5"),
        ({"cache": "no-such-folder/votes"}, "no-such-folder"),
        ({"checker": "llm"}, "model is empty"),
        ({"checker": "llm", "checker_args": {"modle": "m"}}, "did you mean 'model'"),
        ({"checker": "llm", "checker_args": {"model": "m", "concurrency": 3}}, "concurrency is for a server"),
        ({"checker": "llm", "checker_args": {"model": "m", "base_url": "http://h/v1", "max_tokens": 0}}, "max_tokens"),
        (
            {"checker": "llm", "checker_args": {"model": "m", "base_url": "http://h/v1", "max_result_chars": -5}},
            "chars",
        ),
        ({"checker": "llm", "checker_args": {"model": "m", "base_url": "http://h/v1", "retriess": 1}}, "retries"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        CompletenessScorer(**options)


@pytest.mark.parametrize("votes", [None, [None] * 3, [True] * 3, ["yes"] * 3])
def test_checkers_that_return_no_votes_are_told(votes: Any) -> None:
    class Odd(Panel):
        def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
            return votes  # type: ignore[no-any-return]

    with pytest.raises(ConfigError, match="Odd was given 3 ballots and returned"):
        CompletenessScorer(checker=Odd([]))([ended()])


def test_checkers_that_return_another_number_of_votes_are_named() -> None:
    class Short(Panel):
        def vote(self, ballots: Sequence[Ballot]) -> list[Vote | Failed]:
            return []

    with pytest.raises(ConfigError, match="Short was given 3 ballots"):
        CompletenessScorer(checker=Short([]))([ended()])


# -- the cache -------------------------------------------------------------------------------------------------


def test_votes_are_cached_by_content_in_memory_and_in_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "votes.sqlite")
    panel = Panel(lambda _, seed: seed % 2 == 0)
    finished = [ended(searched(str(i))) for i in range(5)]
    first = CompletenessScorer(checker=panel, votes=3, cache=file)
    expected = rewards(first, *finished)
    assert rewards(first, *finished) == expected
    assert len(panel.asked) == 15
    other = Panel([])
    assert rewards(CompletenessScorer(checker=other, votes=3, cache=file, cache_size=0), *finished) == expected
    assert other.asked == []
    more = Panel(panel.says)  # two votes more, and these only
    CompletenessScorer(checker=more, votes=5, cache=file)(finished)
    assert len(more.asked) == 10


def test_another_content_seed_or_checker_is_another_vote() -> None:
    class Renamed(Panel):
        fingerprint = "renamed"

    cache, asked = VoteCache(), ended(searched("Ava"))
    panel, renamed = Panel([True] * 9), Renamed([True] * 9)
    Poll(panel, votes=1, cache=cache)([asked])
    Poll(panel, votes=1, cache=cache)([ended(searched("Ava", result="another"))])
    Poll(panel, votes=1, cache=cache, seed=1)([asked])
    Poll(renamed, votes=1, cache=cache)([asked])
    Poll(panel, votes=1, cache=cache)([asked])
    assert (len(panel.asked), len(renamed.asked)) == (3, 1)


def test_failures_are_not_cached() -> None:
    panel = Panel([Failed("EngineError"), True])
    poll = Poll(panel, votes=1)
    assert isinstance(poll.result(poll([ended()])[0]), Failed)
    assert poll.result(poll([ended()])[0]) == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=30), st.integers(0, 5))
def test_the_cache_in_memory_keeps_the_newest(kept: list[tuple[int, bool]], size: int) -> None:
    cache, newest = VoteCache(size=size), dict[str, bool]()
    for key, vote in kept:
        cache.keep({str(key): vote})
        newest.pop(str(key), None)
        newest[str(key)] = vote
    expected = dict(list(newest.items())[len(newest) - size :] if size < len(newest) else newest)
    assert cache.find(map(str, range(10))) == expected


def test_a_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a data base, but long enough to look like one " * 40)
    with pytest.raises(DataError, match=r"notes\.txt"):
        VoteCache(tmp_path / "notes.txt")
    with pytest.raises(DataError, match="folder that exists"):
        VoteCache(tmp_path / "nowhere" / "votes.sqlite")
    held = VoteCache(tmp_path / "votes.sqlite")
    with sqlite3.connect(tmp_path / "votes.sqlite") as other:
        other.execute("DROP TABLE votes")
    with pytest.raises(DataError, match=r"votes\.sqlite"):
        held.keep({"a": True})


# -- checkers without a model ----------------------------------------------------------------------------------


def judged(checker: RuleChecker | AnswerChecker, finished: Finished) -> bool | str:
    (vote,) = checker.vote([Ballot(finished, 0)])
    return vote.kind if isinstance(vote, Failed) else vote.complete


def test_the_rule_checker_asks_whether_every_gold_step_was_found() -> None:
    rule = RuleChecker()
    assert judged(rule, ended(searched("Ava", "p1", "p9"), searched("Bo", "p2"), answer="wrong")) is True
    assert judged(rule, ended(searched("Ava", "p1"))) is False
    assert judged(rule, ended()) is False
    bare = Question("q", "?", ("x",), FrozenDict({"supporting_ids": ["p1", "p2"]}))
    assert judged(rule, ended(searched("a", "p2", "p1"), task=bare)) is True
    assert judged(rule, ended(searched("a", "p2"), task=bare)) is False
    assert judged(RuleChecker("steps"), ended(searched("a", "p2", "p1"), task=bare)) == "no_gold"
    assert judged(rule, ended(task=Question("q", "?", ("x",)))) == "no_gold"


def test_a_gold_step_of_another_tool_is_covered_by_its_result() -> None:
    task = Question("q", "?", ("x",), FrozenDict({"steps": [{"tool": "python", "answer": "42"}]}))
    calls = FrozenDict({"calls": [{"tool": "python", "argument": "6*7"}]})
    assert judged(RuleChecker(), ended(FinishedTurn("", "python", "42", calls), task=task)) is True
    assert judged(RuleChecker(), ended(FinishedTurn("", "python", "420", calls), task=task)) is False
    assert judged(RuleChecker(), ended(searched("42", result="42"), task=task)) is False
    vague = Question("q", "?", ("x",), FrozenDict({"steps": [{"answer": "42"}]}))
    assert judged(RuleChecker(), ended(task=vague)) == "no_gold"


@pytest.mark.parametrize("steps", ["Ava mentor", {"query": "x"}, ["Ava mentor", STEPS[0]], [None]])
def test_steps_that_are_no_steps_judge_nothing(steps: Any) -> None:
    """A step that cannot be read must not pass for one that was covered."""
    task = Question("q", "Who?", ("Cy",), FrozenDict({"steps": steps}))
    (vote,) = RuleChecker("steps").vote([Ballot(ended(searched("Ava mentor", "p1"), task=task), 0)])
    assert isinstance(vote, Failed)
    assert vote.kind == "no_gold"


@pytest.mark.parametrize(("ids", "complete"), [("p1", True), (["p1"], True), (7, False), (["p1", "p2"], False)])
def test_a_single_supporting_id_is_one(ids: Any, complete: bool) -> None:
    task = Question("q", "Who?", ("Cy",), FrozenDict({"supporting_ids": ids}))
    (vote,) = RuleChecker().vote([Ballot(ended(searched("Ava mentor", "p1"), task=task), 0)])
    assert vote == Vote(complete)


@pytest.mark.parametrize("metric", ["em", "f1"])
def test_answers_are_compared_in_the_language_of_the_question(metric: Any) -> None:
    """Chinese ones character by character, without their punctuation and with numerals read."""
    checker = AnswerChecker(metric)
    for question, gold, answer in (("谁写的？", "《红楼梦》", "红楼梦。"), ("多少？", "120", "一百二十")):
        asked = Question("q", question, (gold,))
        assert checker.vote([Ballot(ended(task=asked, answer=answer), 0)]) == [Vote(True)]
        assert AnswerChecker(metric, normalizer="squad").vote([Ballot(ended(task=asked, answer=answer), 0)]) == [
            Vote(False)
        ]
    english = Question("q", "Who?", ("The Cy",))
    assert checker.vote([Ballot(ended(task=english, answer="cy."), 0)]) == [Vote(True)]
    said = Question("q", "多少?", ("120",), FrozenDict({"language": "en"}))
    assert checker.content(ended(task=said)) != checker.content(ended(task=Question("q", "多少?", ("120",))))


def test_answer_checkers_look_at_the_answer_only() -> None:
    assert judged(AnswerChecker("em"), ended(answer="the cy")) is True
    assert judged(AnswerChecker("em"), ended(searched("Ava", "p1"), searched("Bo", "p2"), answer="Cy Bo")) is False
    assert judged(AnswerChecker("f1"), ended(answer="Cy Bo")) is True
    assert judged(AnswerChecker("f1", 0.9), ended(answer="Cy Bo")) is False
    assert judged(AnswerChecker("em"), ended(answer=None)) is False
    assert judged(AnswerChecker("em"), ended(task=Question("q", "?", ()))) == "no_gold"
    with pytest.raises(ConfigError, match="threshold"):
        load_checker("f1", {"threshold": 0})


def test_checkers_by_rule_are_asked_once_however_many_votes_there_are() -> None:
    scorer = CompletenessScorer(checker="rule", votes=5, quorum=4)
    (tally,) = scorer.poll([ended(searched("Ava", "p1", "p2"))])
    assert (len(tally.votes), scorer.poll.result(tally)) == (1, 1.0)


# -- the scorer ------------------------------------------------------------------------------------------------


def test_parts_of_the_reward() -> None:
    finished = ended(searched("Ava", "p1"), searched("ava", "p1"), searched("Bo", "p2"), invalid("unknown_tool"))
    (outcome,) = CompletenessScorer()([finished])
    assert isinstance(outcome, Judged)
    assert outcome.parts == {
        "completeness": 1.0,
        "rule": -0.2,
        "rule_repeated": -0.1,
        "rule_bad_argument": 0.0,
        "rule_unknown_tool": -0.1,
    }
    assert outcome.reward == pytest.approx(0.8)


def test_an_illegal_format_is_worth_minus_one_and_no_question_to_the_checker() -> None:
    panel = Panel([True] * 3)
    scorer = CompletenessScorer(checker=panel)
    illegal = ended(format_valid=False, format_reason="corrected:empty_query")
    assert rewards(scorer, illegal, ended(format_valid=True), illegal) == [-1.0, 1.0, -1.0]
    assert len(panel.asked) == 3
    assert rewards(CompletenessScorer(illegal=-0.5), illegal) == [-0.5]


def test_a_checker_that_fails_on_an_illegal_format_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    scorer = CompletenessScorer(checker=Panel(lambda *_: Failed("verdict", "no word")), judge_illegal=True, votes=1)
    out = scorer([ended(searched(str(i)), format_valid=False) for i in range(3)])
    assert out == [Judged(-1.0)] * 3
    (told,) = caplog.messages
    assert "left out of completeness: verdict: 0 of 1 votes are valid, 1 are needed; no word" in told


def test_corrections_may_be_penalised_instead() -> None:
    scorer = CompletenessScorer(checker=Panel([True] * 9), corrections="penalised")
    bad = ended(invalid("empty_query"), format_valid=False, format_reason="corrected:empty_query")
    other = ended(invalid("no_action"), format_valid=False, format_reason="corrected:no_action")
    broken = ended(format_valid=False, format_reason="unexpected_text:start")
    assert rewards(scorer, bad, other, broken) == [0.9, -1.0, -1.0]


@pytest.mark.parametrize(
    ("result", "complete"),
    [
        ("<information> 42</information> No search is left .", True),
        ("<information>42</information>", True),
        ("<result>\n42\n</result>", True),
        ("<information> -42</information>", False),
        ("<information>1042</information>", False),
    ],
)
def test_result_of_a_tool_is_read_without_the_tags_of_the_observation(result: str, complete: bool) -> None:
    task = Question("q", "?", ("42",), FrozenDict({"steps": [{"tool": "python", "answer": "42"}]}))
    calls = FrozenDict({"calls": [{"tool": "python", "argument": "6*7"}]})
    turn = FinishedTurn("<python> 6*7 </python>", "python", result, calls)
    finished = Finished(task, "?", (turn,), "answered", None, 0.0, None, FrozenDict())
    assert RuleChecker().vote([Ballot(finished, 0)]) == [Vote(complete)]
