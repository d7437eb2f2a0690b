"""Any TurnEnv is a task of a run: found by its id, with its own arguments, judged by its own metric."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from turntree.agents import ByteTokenizer, Dialogue
from turntree.agents.engines import ScriptedEngine
from turntree.agents.solutions import solutions
from turntree.envs import Action, AgentTask, FrozenDict, Question, Step, TaskCore, TurnEnv
from turntree.envs.search_qa import SearchQACore
from turntree.errors import ConfigError, DataError
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import Evaluation, evaluate, read_rows, shown
from turntree.trainers.rollout import Limits
from turntree.trainers.task import build_task, eval_sampling, has_split, provenance


@dataclass(frozen=True)
class Word:
    text: str
    said: str = ""


@dataclass(frozen=True)
class Echo(AgentTask[Word]):
    """Say the word again; graded, without any notion of success unless it is asked for."""

    max_turns: int = 2
    knows: bool = False

    def initial_state(self, task: str, rng: np.random.Generator) -> Word:
        return Word(task)

    def prompt(self, state: Word) -> str:
        return f"Say {state.text}."

    def transition(self, state: Word, action: Action, rng: np.random.Generator) -> Step[Word]:
        right = action.argument == state.text
        moved = Word(state.text, action.argument)
        info = FrozenDict({"letters": len(action.argument)})
        return Step(moved, "No.", -1.0 if not right else 0.5, terminated=right, info=info)

    def success(self, state: Word) -> bool | None:
        return state.said == state.text if self.knows else None

    def solution(self, task: str) -> list[str]:
        return [] if task == "?" else [task]


class Letters(Echo):
    metric = "letters"


def make(split: str = "train", **options: Any) -> TurnEnv[Word]:
    words = {"train": ["a", "bb"], "dev": ["ccc"], "test": ["d", "e", "f"]}
    return TurnEnv(Echo(**options), words[split])


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    gymnasium.register(id="tests/Echo-v0", entry_point=make)
    gymnasium.register(id="tests/Limited-v0", entry_point=make, max_episode_steps=3)
    yield
    del gymnasium.registry["tests/Echo-v0"], gymnasium.registry["tests/Limited-v0"]


ECHO = "env.id=tests/Echo-v0"


def tasks(*overrides: str, split: Any = "train") -> tuple[str, ...]:
    return build_task(compose([ECHO, *overrides]), ByteTokenizer(), split=split).questions


def test_splits_are_arguments() -> None:
    own = ["env.dev_args.split=dev", "env.test_args.split=test"]
    assert tasks() == ("a", "bb")
    assert tasks(*own, split="dev") == ("ccc",)
    assert tasks(*own, split="test") == ("d", "e", "f")
    assert tasks(own[0], split="test") == ("ccc",)
    assert tasks(split="test") == ("a", "bb")
    assert not has_split(compose([ECHO]), "dev")
    assert has_split(compose([ECHO, own[0]]), "dev")


def test_arguments_reach_the_environment_and_the_results() -> None:
    config = compose(["env=tests/Echo-v0", "env.args.max_turns=7"])
    found = build_task(config, ByteTokenizer())
    core: Any = found.core
    assert core.rules.max_turns == 7
    about = provenance(config, found)
    assert (about["env_id"], about["env_args"], about["questions"]) == (
        "tests/Echo-v0",
        {"max_turns": 7},
        "tests/Echo-v0",
    )
    limited = build_task(compose([ECHO, "env.max_observation_tokens=200"]), ByteTokenizer())
    assert limited.core.fingerprint != build_task(compose([ECHO]), ByteTokenizer()).core.fingerprint


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([ECHO, "agent=planner_summarizer"], "agent=planner_summarizer plays question answering"),
        (["env.id=tests/Ecko-v0"], "did you mean 'tests/Echo-v0'"),
        ([ECHO, "env.args.max_turn=3"], "max_turn"),
        ([ECHO, "env.max_turns=3"], r"env\.max_turns is an option of turntree/SearchQA-v0.*env\.args"),
        ([ECHO, "env.questions=somewhere"], r"env\.questions is an option of"),
        (["env.id=tests/Limited-v0"], "max_episode_steps=3"),
        (["env.id=CartPole-v1"], "expected a turntree.envs.TurnEnv"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_task(compose(overrides), ByteTokenizer())


def test_question_answering_goes_through_the_same_door(make_config: Callable[..., RunConfig]) -> None:
    found = build_task(make_config("env.args.normalizer=unicode"), ByteTokenizer())
    assert isinstance(found.core, SearchQACore)
    assert found.core.normalizer == "unicode"
    assert all(isinstance(question, Question) for question in found.questions)
    with pytest.raises(ConfigError, match=r"env\.args\.max_turns .*has an option of its own"):
        build_task(make_config("env.args.max_turns=3"), ByteTokenizer())


def test_a_reward_function_of_answers_has_no_effect_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    tasks("reward.name=f1")
    assert "reward.name=f1 judges answers and has no effect" in caplog.text


def played(rules: Echo, words: list[str], *turns: str) -> Evaluation:
    core = TaskCore(rules)
    script = iter(turns)
    return evaluate(
        words,
        core=core,
        engine=ScriptedEngine(lambda text, seed: next(script), ByteTokenizer()),
        dialogue=Dialogue(ByteTokenizer()),
        sampling=eval_sampling(compose([]), core),
        limits=Limits(max_turn_tokens=64, max_context_tokens=600),
        batch=1,
    )


def test_tasks_without_gold_answers_are_judged_by_their_reward(tmp_path: Path) -> None:
    found = played(Echo(), ["a", "b"], "a", "x", "y")
    summary = found.summary()
    assert [row.reward for row in found.rows] == [0.5, -2.0]
    assert [(row.em, row.f1, row.success, row.question) for row in found.rows] == [
        (None, None, None, "Say a."),
        (None, None, None, "Say b."),
    ]
    assert (summary["metric"], summary["reward"], shown(summary)) == ("reward", -0.75, ("reward",))
    assert summary["reward_low"] <= summary["reward"] <= summary["reward_high"]
    assert not {"em", "f1", "success"} & summary.keys()
    assert summary["answered_share"] == 0.5
    found.save(tmp_path)
    assert list(read_rows(tmp_path / "evaluation.jsonl").values()) == list(found.rows)
    assert json.loads((tmp_path / "evaluation.json").read_text())["metric"] == "reward"


def test_success_is_a_share_beside_the_reward() -> None:
    summary = played(Echo(knows=True), ["a", "b"], "a", "x", "y").summary()
    assert (summary["success"], summary["reward"]) == (0.5, -0.75)
    assert 0 < summary["success_low"] < 0.5 < summary["success_high"] < 1
    assert shown(summary) == ("reward", "success")


def test_a_metric_of_its_own() -> None:
    summary = played(Letters(), ["abc", "b"], "abc", "xxxxx", "y").summary()
    assert (summary["metric"], summary["letters"]) == ("letters", 2.0)
    assert shown(summary) == ("letters", "reward")


def test_solutions_are_played_and_checked() -> None:
    demos = solutions(TaskCore(Letters()), ["ab", "c"], seed=0)
    assert [(d.prompt, d.turns[0].text, d.reward, d.em) for d in demos] == [
        ("Say ab.", "ab", 0.5, 2.0),
        ("Say c.", "c", 0.5, 1.0),
    ]
    with pytest.raises(DataError, match="gives no turns"):
        solutions(TaskCore(Echo()), ["?"], seed=0)

    class Late(Echo):
        def solution(self, task: str) -> list[str]:
            return [task, task]

    with pytest.raises(DataError, match="found turn 1 of 2"):
        solutions(TaskCore(Late()), ["a"], seed=0)


def test_hermes_settings_that_a_run_does_not_follow(
    make_config: Callable[..., RunConfig], caplog: pytest.LogCaptureFixture
) -> None:
    hermes = "env.grammar=turntree.envs.grammar:HermesGrammar"
    with pytest.raises(ConfigError, match=r"env\.grammar_args\.schemas=template: expected schemas=prompt"):
        build_task(make_config(hermes, "env.grammar_args.schemas=template"), None)
    for style, calls, warned in (("inline", 8, True), ("inline", 1, False), ("tools", 8, False)):
        caplog.clear()
        build_task(make_config(hermes, f"env.grammar_args.max_calls={calls}", f"model.dialogue={style}"), None)
        assert ("a turn has no stop string" in caplog.text) is warned
