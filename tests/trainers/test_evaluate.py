"""Evaluation: every question once, in order, scored apart from failures, sampled as configured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import ScriptedEngine
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.models import load_tokenizer
from turntree.envs.search_qa import Limits as EnvLimits
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import FrozenDict, Question
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import RetrievalError
from turntree.search_backend import Passage
from turntree.trainers.evaluate import Evaluation, evaluate
from turntree.trainers.rollout import Limits

GREEDY = SamplingParams(max_tokens=60, temperature=0.0, stop=WorldGrammar().stop)


class Shelf:
    """Finds the passage whose id is asked for; one query brings it down."""

    fingerprint = "shelf"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        if "boom" in queries:
            raise RetrievalError("the index is down")
        return [[Passage(query, query, f"about {query}")] for query in queries]


@pytest.fixture(scope="module")
def dialogue(bed: Any) -> Dialogue:
    return Dialogue(load_tokenizer(bed.model))


def play(
    dialogue: Dialogue, questions: Sequence[Question], script: Callable[[str, int], str], **options: Any
) -> tuple[Evaluation, ScriptedEngine]:
    engine = ScriptedEngine(script, dialogue.tokenizer)
    core = SearchQACore(Shelf(), limits=EnvLimits(max_turns=3, top_k=1), grammar=WorldGrammar())
    found = evaluate(
        questions,
        core=core,
        engine=engine,
        dialogue=dialogue,
        sampling=GREEDY,
        limits=Limits(max_turn_tokens=60, max_context_tokens=600, tool_retries=0),
        **options,
    )
    return found, engine


def answers_number(text: str, seed: int) -> str:
    """Answers with the number in the prompt."""
    return f"<answer> {int(''.join(c for c in text if c.isdigit()))} </answer>"


def test_all_rows_in_order_whatever_the_batch(dialogue: Dialogue) -> None:
    """101 rows in batches of 16: the last batch is not full, and nothing is dropped or shuffled."""
    questions = [Question(f"q{i}", f"number {i} ?", (str(i if i % 4 else -1),)) for i in range(101)]
    seen: list[int] = []
    found, _ = play(dialogue, questions, answers_number, batch=16, on_batch=seen.append)
    assert [row.id for row in found.rows] == [q.id for q in questions]
    assert [row.prediction for row in found.rows] == [str(i) for i in range(101)]
    assert [row.em for row in found.rows] == [float(i % 4 != 0) for i in range(101)]
    assert seen == [16, 32, 48, 64, 80, 96, 101]
    whole, _ = play(dialogue, questions, answers_number, batch=1000)
    assert whole.rows == found.rows
    assert found.summary()["n"] == 101
    assert found.summary()["em"] == pytest.approx(75 / 101)


def test_equal_questions_are_kept_apart(dialogue: Dialogue) -> None:
    questions = [Question("a", "number 1 ?", ("1",)), Question("b", "number 1 ?", ("2",))]
    found, _ = play(dialogue, questions, answers_number)
    assert [(row.id, row.em, row.golden_answers) for row in found.rows] == [("a", 1.0, ["1"]), ("b", 0.0, ["2"])]


def test_failures_are_counted_and_never_scored(dialogue: Dialogue) -> None:
    questions = [Question("good", "number 1 ?", ("1",)), Question("bad", "number 2 ?", ("2",))]

    def script(text: str, seed: int) -> str:
        return "<search> boom </search>" if "2" in text else "<answer> 1 </answer>"

    found, _ = play(dialogue, questions, script)
    assert [row.status for row in found.rows] == ["answered", "failed"]
    summary = found.summary()
    assert (summary["n"], summary["failed"], summary["em"]) == (1, 1, 1.0)


def test_every_question_is_sampled_once_as_configured(dialogue: Dialogue, tmp_path: Path) -> None:
    questions = [Question(f"q{i}", f"number {i} ?", (str(i),)) for i in range(5)]
    found, engine = play(dialogue, questions, answers_number, seed=4)
    assert len(engine.requests) == 5, "one chain a question"
    assert {r.params.temperature for r in engine.requests} == {0.0}
    assert {r.params.stop for r in engine.requests} == {GREEDY.stop}
    found.save(tmp_path, extra={"model": "m"})
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert saved["sampling"] == {"max_tokens": 60, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop": [*GREEDY.stop]}
    assert (saved["seed"], saved["model"]) == (4, "m")


def test_rows_say_what_happened(dialogue: Dialogue) -> None:
    facts = FrozenDict({"supporting_ids": ["x", "y"], "hops": 2, "type": "chain"})
    turns = iter(["<search> x </search>", "<search> x </search>", "<answer> Yes. </answer>"])
    found, _ = play(dialogue, [Question("q", "Who ?", ("yes",), facts)], lambda text, seed: next(turns))
    (row,) = found.rows
    assert (row.turns, row.searches, row.supporting_found, row.hops, row.type) == (3, 2, 0.5, 2, "chain")
    assert (row.prediction, row.em, row.status, row.stop_reason) == ("Yes.", 1.0, "answered", "answer")
    assert row.generated_tokens > 0
    assert found.summary()["em_by_hops"] == {"2": 1.0}


def test_an_episode_without_an_answer_scores_zero(dialogue: Dialogue) -> None:
    found, _ = play(dialogue, [Question("q", "Who ?", ("yes",))], lambda text, seed: "<search> yes </search>")
    (row,) = found.rows
    assert (row.prediction, row.em, row.f1, row.sub_em, row.status) == (None, 0.0, 0.0, 0.0, "truncated")
    assert found.summary()["answered_share"] == 0.0


def test_results_are_json_in_every_script(dialogue: Dialogue, tmp_path: Path) -> None:
    question = Question("题\ud800", "谁 ? 👍", ("曹雪芹",))
    found, _ = play(dialogue, [question], lambda text, seed: "<answer> 曹雪芹 </answer>")
    found.save(tmp_path)
    text = (tmp_path / "evaluation.jsonl").read_text(encoding="utf-8")
    assert "曹雪芹" in text
    assert json.loads(text)["id"] == question.id

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    one = json.loads((tmp_path / "evaluation.json").read_text(), parse_constant=refuse)
    assert (one["em"], one["em_low"]) == (1.0, None)
    Evaluation((), {}, 0).save(tmp_path / "none")
    none = json.loads((tmp_path / "none" / "evaluation.json").read_text(), parse_constant=refuse)
    assert (none["n"], none["em"]) == (0, None)
    assert math.isnan(Evaluation((), {}, 0).summary()["em"])
