"""The rules of SearchQA: limits, corrections, scores and what the info says."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from turntree.envs import Limits, Outcome, Question, SearchQACore, SearchQAEnv, TagGrammar, register_envs
from turntree.envs.check import FORK_LAWS, check_fork
from turntree.errors import ConfigError, DataError, TurnTreeError
from turntree.search_backend import Passage

SEARCH = "<think>t</think><search>Hamlet</search>"
NOTICE = TagGrammar().last_turn_notice()


def play(env: SearchQAEnv, *turns: str, index: int = 0) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    env.reset(seed=0, options={"index": index})
    return [env.step(turn) for turn in turns]


def test_a_whole_episode(make_env: Callable[..., SearchQAEnv]) -> None:
    first, last = play(make_env(), SEARCH, "<think>t</think><answer>Shakespeare</answer>")
    assert first == (
        "\n\n<information>Doc 1(Title: Hamlet) A tragedy written by William Shakespeare.</information>\n\n",
        0.0,
        False,
        False,
        {
            "action": "search",
            "turns": 1,
            "searches": 1,
            "overrun": False,
            "other_dialect": False,
            "argument": "Hamlet",
            "retrieved": [{"id": "d1", "title": "Hamlet"}],
            "observation_truncated": False,
        },
    )
    assert last == (
        "",
        1.0,
        True,
        False,
        {
            "action": "answer",
            "turns": 2,
            "searches": 1,
            "overrun": False,
            "other_dialect": False,
            "stop_reason": "answer",
            "answer": "Shakespeare",
            "em": 1.0,
            "f1": 1.0,
            "format_valid": True,
            "format_reason": "",
        },
    )


def test_malformed_turns_are_corrected_and_cost_a_turn(make_env: Callable[..., SearchQAEnv]) -> None:
    steps = play(make_env(max_turns=3), "I do not know", "<search> </search>", "<answer>Hamlet")
    assert [step[4].get("invalid_reason") for step in steps] == ["no_action", "empty_query", "unclosed_answer"]
    assert "<information>" not in steps[0][0]
    assert not steps[0][0].endswith(NOTICE)
    assert steps[1][0].endswith(NOTICE)
    assert [step[2:4] for step in steps] == [(False, False), (False, False), (False, True)]
    assert steps[2][4]["stop_reason"] == "turns"
    assert steps[2][4]["answer"] is None
    assert steps[2][4]["format_reason"] == "unexpected_text:start"


def test_max_searches_is_announced_and_kept(make_env: Callable[..., SearchQAEnv], backend: Any) -> None:
    steps = play(make_env(max_turns=5, max_searches=1), SEARCH, SEARCH, "<answer>x</answer>")
    assert steps[0][0].endswith(NOTICE)
    assert steps[1][4]["invalid_reason"] == "no_searches_left"
    assert steps[1][4]["searches"] == 1
    assert len(backend.batches) == 1
    assert steps[2][2] is True


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_searches": 0}])
def test_without_any_search_the_prompt_says_so(make_env: Callable[..., SearchQAEnv], limits: dict[str, int]) -> None:
    prompt, _ = make_env(**limits).reset(seed=0)
    assert prompt.endswith(NOTICE.strip())


def test_nothing_found_is_an_honest_result(make_env: Callable[..., SearchQAEnv]) -> None:
    (step,) = play(make_env(), "<search>nothing-like-this</search>")
    assert "No results were found" in step[0]
    assert step[4]["retrieved"] == []
    assert step[4]["searches"] == 1


def test_retrieved_text_never_answers(make_env: Callable[..., SearchQAEnv]) -> None:
    first, last = play(make_env(max_turns=2), "<search>Trap</search>", "I am done.")
    assert "<answer>" not in first[0].removesuffix(NOTICE)
    assert last[4]["answer"] is None


def test_a_length_cut_ends_or_corrects(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env()
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step(SEARCH, finish="length")
    assert (terminated, truncated, info["stop_reason"]) == (False, True, "length")
    assert info["invalid_reason"] == "cut_at_length"


def test_truncation_from_outside_is_scored(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env(reward="atpo")
    env.reset(seed=0)
    env.step(SEARCH)
    core, state = env.core, env.snapshot().state
    step = core.truncate(state, "context")
    assert (step.truncated, step.terminated, step.reward, step.observation) == (True, False, -1.0, "")
    assert step.info["stop_reason"] == "context"
    assert step.state.turns == 1
    with pytest.raises(TurnTreeError, match=r"over \(context\)"):
        core.act(step.state, "x")
    with pytest.raises(TurnTreeError, match=r"over \(context\)"):
        core.truncate(step.state, "turns")


def test_rewards_see_the_whole_episode(make_env: Callable[..., SearchQAEnv]) -> None:
    seen: list[Outcome] = []

    def rule(outcome: Outcome) -> float:
        seen.append(outcome)
        return 0.25

    steps = play(make_env(reward=rule, max_searches=1), SEARCH, "oops", "<think>t</think><answer>x</answer>")
    assert steps[-1][1] == 0.25
    (outcome,) = seen
    assert outcome.answer == "x"
    assert outcome.golden_answers == ("William Shakespeare", "Shakespeare")
    assert outcome.tools_used == {"search"}
    assert (outcome.turns, outcome.format_valid, outcome.format_reason) == (3, False, "unexpected_text:information")
    assert outcome.observations == (steps[0][0].removesuffix(NOTICE),)
    assert steps[0][0].endswith(NOTICE)


def test_the_unicode_normaliser_reaches_info_and_reward(make_env: Callable[..., SearchQAEnv]) -> None:
    for normalizer, em in (("squad", 0.0), ("unicode", 1.0)):
        (step,) = play(make_env(normalizer=normalizer), "<answer>曹雪芹。</answer>", index=1)
        assert (step[1], step[4]["em"]) == (em, em)


def test_think_can_be_required(make_env: Callable[..., SearchQAEnv]) -> None:
    steps = play(make_env(think="required"), "<think>open<search>Hamlet</search>", SEARCH)
    assert steps[0][4]["invalid_reason"] == "inside_think"
    assert steps[1][4]["action"] == "search"
    (step,) = play(make_env(think="optional"), "<think>open<search>Hamlet</search>")
    assert step[4]["action"] == "search"


class BoxedGrammar(TagGrammar):
    """Somebody's own grammar: a class that the configuration names by import path."""


def test_a_grammar_is_replaceable(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env(grammar="turntree.envs.grammar:TagGrammar")
    assert env.core.fingerprint == make_env().core.fingerprint == make_env(grammar="tags").core.fingerprint
    own = BoxedGrammar()
    assert make_env(grammar=own).core.grammar is own
    with pytest.raises(ConfigError, match="leave think out"):
        make_env(grammar=own, think="required")
    with pytest.raises(ConfigError, match="methods of Grammar"):
        make_env(grammar="turntree.envs.grammar:is_other_dialect")


def test_every_option_changes_the_fingerprint(make_env: Callable[..., SearchQAEnv], backend: Any) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"max_turns": 5}, {"max_searches": 1}, {"top_k": 1}, {"on_length": "correct"}, {"think": "required"},
        {"reward": "f1"}, {"normalizer": "unicode"},
    ]  # fmt: skip
    prints = {make_env(**change).core.fingerprint for change in changes}
    backend.fingerprint = "another corpus"
    prints.add(make_env().core.fingerprint)
    assert len(prints) == len(changes) + 1


@pytest.mark.parametrize(
    "wrong", [{"max_turns": 0}, {"max_searches": -1}, {"top_k": 0}, {"max_turns": 2.5}, {"max_turns": True}]
)
def test_limits_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


def test_data_arguments_are_checked(backend: Any, tmp_path: Any) -> None:
    question = Question("q", "Why?", ("so",))
    with pytest.raises(ConfigError, match="nothing to search"):
        SearchQAEnv([question])
    with pytest.raises(ConfigError, match="no questions"):
        SearchQAEnv(search=backend)
    with pytest.raises(ConfigError, match="found both"):
        SearchQAEnv([question], search=backend, corpus=[])
    with pytest.raises(DataError, match="Question objects"):
        SearchQAEnv(["Why?"], search=backend)  # type: ignore[list-item]
    with pytest.raises(DataError, match="question 'empty'"):
        SearchQAEnv([Question("empty", " ", ("x",))], search=backend).reset(seed=0)
    core = SearchQACore(backend)
    not_a_question: Any = "Why?"
    with pytest.raises(DataError, match="found str"):
        core.initial(not_a_question, seed=0)


def test_questions_and_corpus_from_files(tmp_path: Any) -> None:
    questions, corpus = tmp_path / "questions.jsonl", tmp_path / "corpus.jsonl"
    questions.write_text('{"id": "1", "question": "谁？", "golden_answers": ["曹雪芹"]}\n', encoding="utf-8")
    corpus.write_text('{"id": "d", "title": "红楼梦", "text": "曹雪芹著"}\n', encoding="utf-8")
    env = gymnasium.make("turntree/SearchQA-v0", questions=str(questions), corpus=str(corpus))
    assert "谁？" in env.reset(seed=0)[0]
    assert env.step("<search>红楼梦</search>")[4]["retrieved"] == [{"id": "d", "title": "红楼梦"}]
    by_passages = SearchQAEnv(str(questions), corpus=[Passage("d", "红楼梦", "曹雪芹著")])
    assert by_passages.core.fingerprint == env.unwrapped.core.fingerprint  # type: ignore[attr-defined]


def test_the_registered_environment_works_without_arguments() -> None:
    register_envs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make("turntree/SearchQA-v0")
        check_env(env.unwrapped)
        laws = check_fork(gymnasium.make("turntree/SearchQA-v0", max_turns=128))
    assert env.spec is not None
    assert env.spec.max_episode_steps is None
    assert set(laws) == FORK_LAWS.keys() - {"interface"}


def test_info_of_every_step_is_json_able(make_env: Callable[..., SearchQAEnv]) -> None:
    import json

    texts: Sequence[str] = [SEARCH, "oops", "<answer>x</answer>"]
    for step in play(make_env(), *texts):
        assert json.loads(json.dumps(step[4])) == step[4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"golden_answers": "Cy"}, "golden_answers is 'Cy'"),
        ({"golden_answers": [1]}, "golden_answers"),
        ({"question": None}, "question is None"),
    ],
)
def test_a_task_whose_answers_are_one_text_is_refused(change: dict[str, Any], words: str) -> None:
    """Each of its letters would pass for an answer."""
    row = {"id": "q", "question": "Who?", "golden_answers": ["Cy"], **change}
    with pytest.raises(TypeError, match=words):
        Question.from_json(row)
    with pytest.raises(ConfigError, match="expected a Question or its JSON form"):
        SearchQAEnv().reset(options={"task": row})
