"""Arguments of rewards, scorers and finishers, prompt files and tools, as a configuration names them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turntree.agents import ByteTokenizer, Dialogue
from turntree.agents.engines import SamplingParams, ScriptedEngine
from turntree.agents.scorer import AnswerScorer, Failed, Finished
from turntree.commands import run_evaluate, run_train
from turntree.envs import Outcome
from turntree.envs.tools import check_tool, load_tools
from turntree.errors import ConfigError
from turntree.trainers.build import finisher, scorer
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.expansion import random_nodes
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, Rollout, grow
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.task import Task, build_task, provenance

PLUGGED = '''
"""What a user plugs in."""

import zlib
from dataclasses import dataclass, replace

from turntree.agents.scorer import Failed
from turntree.envs import Action, TagGrammar, ToolFailure, ToolResult
from turntree.envs.grammar import ParsedTurn


@dataclass
class Counter:
    """Counts the words that it was given in this episode."""

    effects: str = "in_state"
    unit: str = "words"
    description: str = "counts words"

    def run(self, calls):
        totals = [(call.memory or 0) + len(call.argument.split()) for call in calls]
        return [ToolResult(f"{total} {self.unit}", memory=total) for total in totals]


def make_counter(unit="words"):
    return Counter(unit=unit)


class Down:
    effects = "none"
    description = "is never there"

    def run(self, calls):
        return [ToolFailure("refused", "nobody is there") for call in calls]


class Chatty(TagGrammar):
    """Finds a call in anything, so that a model with random weights uses the tool."""

    stop = ("e", "a")

    def parse(self, text):
        parsed = super().parse(text)
        if parsed.action.kind != "invalid":
            return parsed
        called = zlib.crc32(text.encode()) % 3
        return ParsedTurn(Action("answer", "yes") if called == 0 else Action("count", text.strip() or "one"))


def brief(outcome, *, price=0.05, metric="f1"):
    return getattr(outcome, metric) - price * outcome.turns


class Table:
    def __init__(self, right=1.0):
        self.right = right

    def __call__(self, outcome):
        return self.right * outcome.em


def shy(outcome):
    if outcome.answer is None:
        raise RuntimeError("not today")
    return 1.0


class Shelf:
    def __init__(self, corpus):
        raise RuntimeError("no shelf")


def make_shelf(corpus):
    return str(corpus)


def level(finished, *, value=0.25):
    return [value for _ in finished]


class Judge:
    def __init__(self, value, *, strict=False):
        if value < 0:
            raise ValueError("value must not be negative")
        self.value, self.strict = value, strict

    def __call__(self, finished):
        return [Failed("strict") if self.strict and f.answer is None else self.value for f in finished]


def make_judge(value=0.5):
    return Judge(value)


def make_number(value=0.5):
    return value


def write(finished, *, text):
    return [replace(f, answer=text) for f in finished]
'''


@pytest.fixture(scope="module")
def plugged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of ``plugged.py``, which can be imported."""
    folder = tmp_path_factory.mktemp("plugged")
    (folder / "plugged.py").write_text(PLUGGED, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("plugged", None)


pytestmark = pytest.mark.usefixtures("plugged")
TAGS = "env.grammar=turntree.envs.grammar:TagGrammar"
COUNT = "env.tools.count=plugged:Counter"


@pytest.fixture
def make_config(bed: Any) -> Callable[..., RunConfig]:
    """As the fixture of this name, without Hydra: the bed's options are composed once and sections replaced."""
    return lambda *overrides: overridden(base(tuple(bed.args)), overrides)


@cache
def base(overrides: tuple[str, ...]) -> RunConfig:
    return compose(overrides)


def overridden(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    for override in overrides:
        key, _, text = override.partition("=")
        section, name, *inner = key.split(".")
        value: Any = float(text) if re.fullmatch(r"-?\d+(\.\d+)?", text) else text
        if inner:
            value = merged(getattr(getattr(config, section), name), inner, value)
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def merged(table: dict[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    head, *rest = keys
    return {**table, head: merged(table.get(head, {}), rest, value) if rest else value}


def task(config: RunConfig) -> Task:
    tokenizer: Any = SimpleNamespace()
    return build_task(config, tokenizer)


def finished(answer: str | None) -> Finished:
    gold = SimpleNamespace(golden_answers=("Paris",))
    return Finished(task=gold, prompt="?", turns=(), status="answered", answer=answer, reward=0.0)


# -- rewards, scorers, finishers ---------------------------------------------------------------------------------------

WRONG = Outcome("Rome", ("Paris",), format_valid=True)
RIGHT = Outcome("Paris", ("Paris",), format_valid=True, turns=2)


@pytest.mark.parametrize(
    ("overrides", "outcome", "reward"),
    [
        ("reward.name=tree_grpo", WRONG, 0.2),
        ("reward.name=tree_grpo reward.args.structure=0.35", WRONG, 0.35),
        ("reward.name=plugged:brief", RIGHT, 0.9),
        ("reward.name=plugged:brief reward.args.price=0.25 reward.args.metric=em", RIGHT, 0.5),
        ("reward.name=plugged:Table", RIGHT, 1.0),
        ("reward.name=plugged:Table reward.args.right=3", RIGHT, 3.0),
    ],
)
def test_rewards_take_arguments(
    make_config: Callable[..., RunConfig], overrides: str, outcome: Outcome, reward: float
) -> None:
    core: Any = task(make_config(*overrides.split())).core
    assert core.reward(outcome) == pytest.approx(reward)


def test_arguments_of_a_reward_are_part_of_the_fingerprint(make_config: Callable[..., RunConfig]) -> None:
    weights = ["reward.args.structure=0.1", "reward.args.structure=0.3"]
    assert len({task(make_config("reward.name=tree_grpo", w)).core.fingerprint for w in weights}) == 2


@pytest.mark.parametrize(
    ("overrides", "value"),
    [
        ("reward.scorer=plugged:level", 0.25),
        ("reward.scorer=plugged:level reward.scorer_args.value=2", 2),
        ("reward.scorer=plugged:Judge reward.scorer_args.value=3", 3),
        ("reward.scorer=plugged:make_judge", 0.5),
        ("reward.scorer=plugged:make_judge reward.scorer_args.value=4", 4),
    ],
)
def test_scorers_are_functions_classes_or_factories(
    make_config: Callable[..., RunConfig], overrides: str, value: float
) -> None:
    found = scorer(make_config(*overrides.split()))
    assert found is not None
    assert list(found([finished("Paris"), finished(None)])) == [value, value]


def test_the_scorer_of_answers_needs_no_module_of_its_own(make_config: Callable[..., RunConfig]) -> None:
    found = scorer(make_config("reward.scorer=turntree.agents.scorer:AnswerScorer", "reward.scorer_args.no_answer=-1"))
    assert isinstance(found, AnswerScorer)
    assert found([finished("paris"), finished("Rome"), finished(None)]) == [1.0, 0.0, -1.0]


def test_finishers_take_arguments(make_config: Callable[..., RunConfig]) -> None:
    found = finisher(make_config("reward.finisher=plugged:write", "reward.finisher_args.text=巴黎"))
    assert found is not None
    (written,) = found([finished(None)])
    assert not isinstance(written, Failed)
    assert written.answer == "巴黎"


# -- what is refused, and how ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("reward.name=tree_grpo reward.args.strcture=1", ["reward.args", "'strcture'", "it takes outcome, structure"]),
        (
            "reward.name=tree_grpo reward.args.structure=high",
            ["reward.args.structure=high", "failed when it was tried"],
        ),
        ("reward.name=tree_grpo reward.args.metric=emm", ["reward.args.metric=emm", "did you mean 'em'"]),
        ("reward.name=plugged:Table reward.args.wrong=1", ["reward.args", "Table", "'wrong'", "it takes right"]),
        ("reward.name=plugged:brif", ["reward.name=plugged:brif", "did you mean 'brief'"]),
        ("reward.name=no_such_pkg:f", ["reward.name=no_such_pkg:f", "PYTHONPATH"]),
        (f"{TAGS} env.prompt=nowhere.txt", ["env.prompt", "nowhere.txt"]),
        (f"{TAGS} env.tools.count=plugged:Cuonter", ["env.tools.count=plugged:Cuonter", "did you mean 'Counter'"]),
        (f"{TAGS} env.tools.count=plugged:level", ["env.tools.count=plugged:level", "'finished' has no type"]),
        (f"{TAGS} env.tools.count=plugged:make_judge", ["env.tools.count=plugged:make_judge", "effects, description"]),
        (f"{TAGS} env.tools.answer=plugged:Counter", ["env.tools.answer", "small letters"]),
        (f"{TAGS} {COUNT.replace('=', '.path=')} env.tools.count.args.speed=1", ["env.tools.count", "'speed'", "unit"]),
        (f"{TAGS} {COUNT.replace('=', '.path=')} env.tools.count.args.effects=odd", ["env.tools.count", "'odd'"]),
        (COUNT, ["env.grammar=users_rules:Babble with env.tools", "cannot read the tool count"]),
        ("reward.name=plugged:shy", ["reward.name=plugged:shy", "RuntimeError: not today", "finite number"]),
        ("search.backend=plugged:make_shelf", ["search.backend=plugged:make_shelf", "without search, fingerprint"]),
        ("search.backend=plugged:Shelf", ["search.backend=plugged:Shelf", "the class Shelf", "no shelf"]),
        ("search.backend=plugged:Judge", ["search.args", "'corpus'"]),
    ],
)
def test_wrong_parts_of_the_task_are_refused_by_name(
    make_config: Callable[..., RunConfig], overrides: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        task(make_config(*overrides.split()))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("reward.scorer_args.value=1", ["reward.scorer_args", "reward.scorer is empty"]),
        ("reward.scorer=plugged:Judge", ["reward.scorer=plugged:Judge", "the class Judge", "'value'"]),
        ("reward.scorer=plugged:Judge reward.scorer_args.value=-1", ["reward.scorer=plugged:Judge", "not be negative"]),
        ("reward.scorer=plugged:Judge reward.scorer_args.vlue=1", ["reward.scorer_args", "'vlue'", "it takes value"]),
        ("reward.scorer=plugged:level reward.scorer_args.x=1", ["reward.scorer_args", "'x'", "finished, value"]),
        ("reward.scorer=plugged:make_number", ["reward.scorer=plugged:make_number", "0.5"]),
        ("reward.finisher=plugged:write", ["reward.finisher=plugged:write", "one batch", "'text'"]),
    ],
)
def test_wrong_scorers_are_refused_by_name(
    make_config: Callable[..., RunConfig], overrides: str, words: list[str]
) -> None:
    config = make_config(*overrides.split())
    with pytest.raises(ConfigError) as caught:
        (finisher if config.reward.finisher else scorer)(config)
    for word in words:
        assert word in str(caught.value)


def test_a_module_that_breaks_is_named(
    make_config: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_rules.py").write_text("def f(:", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"reward\.name=broken_rules:f: cannot import module .*SyntaxError"):
        task(make_config("reward.name=broken_rules:f"))


# -- prompts and tools -------------------------------------------------------------------------------------------------


def test_prompt_and_tools_reach_the_task_and_its_provenance(
    make_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    path = tmp_path / "提示.txt"
    path.write_text("查一查，再回答：{question}\n", encoding="utf-8")
    nested = ["env.tools.count.path=plugged:make_counter", "env.tools.count.args.unit=个词"]
    config = make_config(TAGS, f"env.prompt={path}", *nested)
    found = task(config)
    question = found.questions[0]
    assert found.core.initial(question, seed=0)[1] == f"查一查，再回答：{question.question}"
    assert check_tool(load_tools(config.env.tools)["count"], "a b") == ["2 个词"]
    assert "</count>" in found.core.stop
    about = provenance(config, found)
    assert (about["prompt"], about["prompt_text"]) == (str(path), "查一查，再回答：{question}")
    assert about["tools"] == {"count": {"path": "plugged:make_counter", "args": {"unit": "个词"}}}
    plain = task(make_config(TAGS))
    assert plain.core.fingerprint != found.core.fingerprint
    assert provenance(config, plain)["grammar"] != about["grammar"]
    assert json.loads(json.dumps(about)) == about


def grown(config: RunConfig, *texts: str, rounds: int = 2) -> Rollout:
    """One tree whose turns are ``texts`` by depth, the last one an answer."""
    found = task(config)
    turns = (*texts, "<answer>x</answer>")
    engine = ScriptedEngine(lambda context, seed: turns[context.partition("Question:")[2].count("</information>")])
    return grow(
        [Prompt("p", found.questions[0])],
        core=found.core,
        engine=engine,
        dialogue=Dialogue(ByteTokenizer()),
        plan=GrowthPlan(rounds=rounds, expansions=2 if rounds else 0, rule=random_nodes),
        sampling=SamplingParams(64, stop=found.core.stop),
        limits=Limits(64, max_context_tokens=8192, tool_backoff_s=0.0),
    )


CALLS = ("<count>a b</count>", "<search>who</search>", "<count>c</count>")


@pytest.mark.parametrize("effects", ["none", "in_state", "external"])
def test_effects_decide_where_a_tree_may_branch(make_config: Callable[..., RunConfig], effects: str) -> None:
    tool = ["env.tools.count.path=plugged:Counter", f"env.tools.count.args.effects={effects}"]
    rollout = grown(make_config(TAGS, *tool), *CALLS)
    turns = [n for n in rollout.groups[0].trees[0].root.walk() if n.parent is not None]
    for node in turns:
        assert node.branchable == (effects != "external")
        if node.action == "count":
            words = 3 if node.depth == 3 and effects == "in_state" else 2 if node.depth == 1 else 1
            assert f"{words} words" in node.observation
    if effects == "external":
        assert all(n.picked is None or n.picked.parent is None for n in turns)
    assert {n.action for n in turns} == {"count", "search", "answer"}


def test_calls_are_counted_by_tool(make_config: Callable[..., RunConfig]) -> None:
    rollout = grown(make_config(TAGS, COUNT), *CALLS)
    turns = [n for n in rollout.groups[0].trees[0].root.walk() if n.parent is not None]
    made = {name: sum(n.action == name for n in turns) for name in ("count", "search")}
    counts = rollout.stats.as_dict()
    assert {name: counts[f"tool_calls/{name}/count"] for name in made} == made
    assert counts["tool_calls"] == sum(made.values()) > 3
    leaf = rollout.groups[0].scored_leaves()[0]
    assert dict(leaf.info["tool_calls"]) == {"search": 1, "count": 2}


def test_a_tool_that_is_down_fails_the_leaf(make_config: Callable[..., RunConfig]) -> None:
    rollout = grown(make_config(TAGS, "env.tools.count=plugged:Down"), *CALLS, rounds=0)
    (leaf,) = rollout.groups[0].trees[0].leaves()
    assert (leaf.status, leaf.reward, leaf.observation) == ("failed", None, "")
    assert rollout.stats.as_dict()["error/refused/count"] == 1
    assert rollout.stats.tool_calls == 0


def test_a_run_trains_and_evaluates_with_prompt_and_tool(bed: Any, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("问：{question}", encoding="utf-8")
    own = ["env.grammar=plugged:Chatty", COUNT, f"env.prompt={prompt}", "reward.name=plugged:brief"]
    base = [a for a in bed.args if not a.startswith(("env.grammar", "reward.name"))]
    own += ["reward.args.price=0.125", "reward.scorer=plugged:level", "reward.scorer_args.value=0.75"]
    run_train([*base, *own, "trainer.steps=1", f"out={tmp_path / 'run'}"])
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["budget/tool_calls/count/count"] == row["budget/tool_calls"] > 0
    assert row["critic/score/mean"] == 0.75
    small = [a for a in [*base, *own] if a.startswith(("env.grammar", "env.tools", "env.prompt", "sampling", "search"))]
    test = [f"model.path={tmp_path / 'run' / 'model'}", f"env.test_questions={bed.world}", f"out={tmp_path / 'eval'}"]
    run_evaluate([*small, *test])
    saved = json.loads((tmp_path / "eval" / "evaluation.json").read_text(encoding="utf-8"))
    assert (saved["prompt_text"], saved["tools"]) == ("问：{question}", {"count": "plugged:Counter"})


def test_options_compose_from_the_command_line() -> None:
    config = compose(["env.tools.a=m:A", "env.tools.b.path=m:B", "env.tools.b.args.n=3", "reward.args.x=0.5"])
    assert config.env.tools == {"a": "m:A", "b": {"path": "m:B", "args": {"n": 3}}}
    assert config.reward.args == {"x": 0.5}
    config = compose(["env.tools={a: m:A}", "reward.args.x=两 个(词)", "env.prompt=提示.txt"])
    assert (config.env.tools, config.reward.args, config.env.prompt) == ({"a": "m:A"}, {"x": "两 个(词)"}, "提示.txt")
