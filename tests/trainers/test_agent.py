"""agent=planner_summarizer as a run configures it: training, evaluation, options that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines import ScriptedEngine
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.models import load_tokenizer
from turntree.agents.scorer import Failed, Finished, Judged
from turntree.agents.summarizer import RuleSummarizer, WrittenAnswers
from turntree.envs.grammar import PlannerGrammar
from turntree.envs.search_qa import Limits as EnvLimits
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import CheckpointError, ConfigError
from turntree.search_backend import Passage
from turntree.trainers.build import scorer
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import Evaluation, evaluate, read_rows
from turntree.trainers.learner import train
from turntree.trainers.rollout import Limits
from turntree.trainers.scoring import score
from turntree.trainers.task import build_task

PLANS = '''
import zlib

from users_rules import Babble

from turntree.agents.scorer import Failed
from turntree.envs.core import Action
from turntree.envs.grammar import ParsedTurn, Validity

closed = []


class Plans(Babble):
    """Finds searches and stops in anything; any babble is legal."""

    fingerprint = "plans"

    def parse(self, text):
        if "<finish>" in text:
            return ParsedTurn(Action("finish", ""))
        if text.startswith("<think>"):
            return super().parse(text)
        draw = zlib.crc32(text.encode()) % 8
        return ParsedTurn(Action("finish", "") if draw < 3 else Action("search", text.strip() or "who"))

    def validity(self, turns):
        return Validity(True)


class Counting:
    """Counts how many answers it wrote, in a file."""

    def __init__(self, log):
        self.log = open(log, "a")

    def __call__(self, finished):
        from dataclasses import replace
        self.log.write(f"{len(finished)}\\n")
        return [replace(f, answer=f.task.golden_answers[0]) for f in finished]

    def close(self):
        self.log.write("closed\\n")
        self.log.close()


class Half:
    """A scorer with a part that fails every second trajectory."""

    def __init__(self, log):
        self.log = open(log, "a")

    def __call__(self, finished):
        from turntree.agents.scorer import Judged
        half = [Judged(0.5, {"calls": float(len(f.turns))}) for f in finished]
        return [outcome if i % 2 else Failed("verdict") for i, outcome in enumerate(half)]

    def close(self):
        self.log.write("closed\\n")
        self.log.close()
'''

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def plans(bed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "plan_rules.py").write_text(PLANS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return ["agent=planner_summarizer", "env.grammar=plan_rules:Plans", "reward.name=em"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# -- training -------------------------------------------------------------------------------------------------


def test_the_reward_is_that_of_the_written_answer(make_config: MakeConfig, plans: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    own = ("agent.summarizer=plan_rules:Counting", f"agent.summarizer_args.log={log}")
    train(make_config(*plans, *own, "trainer.steps=1", f"out={tmp_path / 'run'}"))
    (row,) = rows(tmp_path / "run")
    assert row["critic/score/mean"] == row["tree/reward/em"] == 1.0
    lines = log.read_text().splitlines()
    assert sum(map(int, lines[:-1])) == row["budget/trajectories"]
    assert lines[-1] == "closed"


def test_no_answer_is_written_where_only_calls_count(make_config: MakeConfig, plans: list[str], tmp_path: Path) -> None:
    """Completeness needs none in training; validation writes them all, with a summariser of its own."""
    logs = [tmp_path / "train.log", tmp_path / "dev.log"]
    options = (
        "agent.summarizer=plan_rules:Counting",
        f"agent.summarizer_args.log={logs[0]}",
        "agent.eval_summarizer=plan_rules:Counting",
        f"agent.eval_summarizer_args.log={logs[1]}",
        "reward.scorer=turntree.agents.completeness:CompletenessScorer",
        "trainer.steps=1",
        "trainer.eval_questions=6",
    )
    config = make_config(*plans, *options, f"out={tmp_path / 'run'}")
    config = replace(config, env=replace(config.env, dev_questions=config.env.questions))
    result = train(config)
    assert logs[0].read_text().splitlines() == ["closed"]
    *written, last = logs[1].read_text().splitlines()
    assert (sum(map(int, written)), last) == (6, "closed")
    assert result.evaluation is not None
    summary = result.evaluation.summary()
    assert (summary["em"], summary["n"], summary["completeness_n"]) == (1.0, 6, 6)
    assert 0 <= summary["completeness_low"] <= summary["completeness"] <= summary["completeness_high"] <= 1
    saved = json.loads((tmp_path / "run" / "validation" / "step-000001" / "evaluation.json").read_text())
    assert (saved["agent"], saved["summarizer"]) == ("planner_summarizer", "plan_rules:Counting")
    assert saved["scorer"].endswith(":CompletenessScorer")


def test_the_planner_s_own_engine_summarises_and_is_counted_apart(
    make_config: MakeConfig, plans: list[str], tmp_path: Path
) -> None:
    own = ("agent.summarizer_args.max_tokens=4", "trainer.prompts_per_step=2", "trainer.steps=1")
    train(make_config(*plans, *own, "sampling.max_context_tokens=1200", f"out={tmp_path / 'run'}"))
    (row,) = rows(tmp_path / "run")
    assert row["summarizer/requests"] > 0
    assert 0 < row["summarizer/completion_tokens"] <= 4 * row["summarizer/requests"]
    assert row["summarizer/prompt_tokens"] > row["budget/generated_tokens"]
    assert row["summarizer/failed"] == row.get("budget/error/summary/count", 0) == row["budget/failed"]


# -- evaluation -----------------------------------------------------------------------------------------------


class Shelf:
    fingerprint = "shelf"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[Passage(q, q, f"The mentor of Ava Li is {q} .")] for q in queries]


QUESTIONS = [Question(f"q{i}", f"number {i} ?", (f"Bo W{i}",)) for i in range(6)]


def played(bed: Any, **options: Any) -> Evaluation:
    """Six questions; the planner looks up the right name for all but the first, then stops."""

    def script(text: str, seed: int) -> str:
        if "<information>" in text:
            return "<think> t </think> <finish></finish>"
        number = next(c for c in text if c.isdigit())
        return f"<think> t </think> <search> {'Bo W' + number if number != '0' else 'Eve Wu'} </search>"

    tokenizer = load_tokenizer(bed.model)
    core = SearchQACore(
        Shelf(), limits=EnvLimits(max_turns=3, top_k=1), grammar=PlannerGrammar(WorldGrammar()), reward="em"
    )
    given = {"finisher": RuleSummarizer(), "scorer": WrittenAnswers(core), **options}
    return evaluate(
        QUESTIONS,
        core=core,
        engine=ScriptedEngine(script, tokenizer),
        dialogue=Dialogue(tokenizer),
        sampling=SamplingParams(max_tokens=80, temperature=0.0, stop=tuple(core.stop)),
        limits=Limits(max_turn_tokens=80, max_context_tokens=600, tool_retries=0),
        **given,
    )


def test_evaluation_scores_what_the_summariser_wrote(bed: Any) -> None:
    found = played(bed, finisher=lambda finished: [replace(f, answer=f.task.golden_answers[0]) for f in finished])
    assert [row.em for row in found.rows] == [1.0] * 6
    assert [row.reward for row in found.rows] == [1.0] * 6
    assert {row.stop_reason for row in found.rows} == {"finish"}
    assert found.summary()["reward"] == 1.0


def test_a_scorer_s_parts_have_intervals_and_its_failures_cost_no_question(bed: Any, tmp_path: Path) -> None:
    def judge(finished: Sequence[Finished]) -> list[float | Judged | Failed]:
        return [
            Failed("verdict", "no idea") if i == 1 else Judged(float(i), {"completeness": float(i > 2), "em": 9.0})
            for i, _ in enumerate(finished)
        ]

    found = played(bed, scorer=judge)
    assert [row.unscored for row in found.rows] == ["", "verdict", "", "", "", ""]
    assert [row.reward for row in found.rows] == [0.0, None, 2.0, 3.0, 4.0, 5.0]
    assert found.rows[1].parts == {}
    summary = found.summary()
    assert (summary["n"], summary["failed"], summary["unscored"]) == (6, 0, 1)
    assert (summary["completeness"], summary["completeness_n"]) == (0.6, 5)
    assert summary["completeness_low"] < 0.6 < summary["completeness_high"]
    assert summary["em"] != 9.0, "a part takes no name of the evaluation's own"
    found.save(tmp_path)
    assert read_rows(tmp_path / "evaluation.jsonl")["q3"].parts["completeness"] == 1.0


def test_a_summariser_that_fails_fails_the_question(bed: Any) -> None:
    found = played(bed, finisher=lambda finished: [Failed("summary", "no answer") for _ in finished])
    assert {row.status for row in found.rows} == {"failed"}
    assert (found.summary()["n"], found.summary()["failed"]) == (0, 6)


def test_answers_are_written_even_where_the_scorer_needs_none(bed: Any) -> None:
    class Calls:
        needs_answer = False

        def __call__(self, finished: Sequence[Finished]) -> list[float]:
            return [0.0 for _ in finished]

    found = played(bed, scorer=Calls())
    assert all(row.prediction for row in found.rows)


def test_rows_of_earlier_evaluations_are_still_read(bed: Any, tmp_path: Path) -> None:
    played(bed).save(tmp_path)
    path = tmp_path / "evaluation.jsonl"
    old = [json.loads(line) for line in path.read_text().splitlines()]
    for row in old:
        del row["parts"], row["unscored"]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert read_rows(path)["q0"].parts == {}


def test_turntree_evaluate_swaps_the_summariser_and_closes_everything(
    make_config: MakeConfig, plans: list[str], bed: Any, tmp_path: Path
) -> None:
    log, out = tmp_path / "log", tmp_path / "evaluation"
    options = (
        f"env.test_questions={bed.world}",
        "reward.scorer=plan_rules:Half",
        f"reward.scorer_args.log={log}",
        "agent.eval_summarizer=rule",
    )
    summary = score(make_config(*plans, *options), out)
    assert summary["unscored"] + summary["calls_n"] == 24
    assert summary["unscored"] > 0
    saved = json.loads((out / "evaluation.json").read_text())
    assert (saved["summarizer"], saved["n"], saved["failed"]) == ("rule", 24, 0)
    assert log.read_text() == "closed\n"
    with pytest.raises(CheckpointError, match="summarizer"):
        score(make_config(*plans, *options[:3], "agent.eval_summarizer=planner", "resume=true"), out)


# -- options that do not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agent=planer"], "planer"),
        (["agent.language=fr"], "agent.language"),
        (["agent.summarizer_args.model=x"], "agent=planner_summarizer, but agent=react"),
        (["agent.eval_summarizer=rule"], "agent=planner_summarizer, but agent=react"),
        (["agent.summarizer=rule"], r"agent\.summarizer is an option of agent=planner_summarizer, but agent=react"),
        (["agent=planner_summarizer", "agent.eval_summarizer_args.model=x"], "agent.eval_summarizer is empty"),
        (["agent=planner_summarizer", "reward.finisher=a:b"], "agent.summarizer"),
    ],
)
def test_mistakes_are_found_at_once(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose(overrides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["agent.summarizer=gold"], "expected planner, llm, rule"),
        (["agent.summarizer=rule", "agent.summarizer_args.model=x"], "agent.summarizer_args"),
        (["agent.summarizer=llm"], "model is empty"),
        (["agent.summarizer_args.model=x"], "an argument of agent.summarizer=llm"),
        (["agent.eval_summarizer=llm", "agent.eval_summarizer_args.modl=x"], "modl"),
        (["env.grammar=users_rules:Babble"], "cannot read a planner's ending"),
    ],
)
def test_what_only_a_run_can_find(
    make_config: MakeConfig, plans: list[str], tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make_config(*plans, *options, f"out={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_react_scores_as_the_environment_does(make_config: MakeConfig, bed: Any) -> None:
    config = make_config()
    assert scorer(config, build_task(config, load_tokenizer(bed.model)).core) is None
