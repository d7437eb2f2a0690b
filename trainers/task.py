"""The task as configured: the environment that ``env.id`` names, its tasks, and what a result says about both."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turntree.agents.engines.protocol import SamplingParams
from turntree.envs.core import TurnCore
from turntree.envs.datasets import load_questions
from turntree.envs.grammar.hermes import HermesGrammar
from turntree.envs.language import language_of
from turntree.envs.registry import turn_env
from turntree.envs.search_code_qa import SEARCH_CODE_QA, python_tool
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError, DataError
from turntree.search_backend import SearchBackend
from turntree.trainers.agent import agent_grammar
from turntree.trainers.config import EnvConfig, RewardConfig, RunConfig
from turntree.trainers.plugins import load_env, load_reward
from turntree.trainers.retrieval import REMOTE, build_backend

__all__ = [
    "QUESTION_ANSWERING",
    "SEARCH_QA",
    "Split",
    "Task",
    "build_task",
    "eval_sampling",
    "first",
    "has_split",
    "provenance",
    "question_tools",
    "questions_file",
    "rollout_sampling",
]

_log = logging.getLogger(__name__)

Split = Literal["train", "dev", "test"]
"""Which questions of a run."""

SEARCH_QA = "turntree/SearchQA-v0"
"""The Gymnasium id of question answering by search."""
QUESTION_ANSWERING = (SEARCH_QA, SEARCH_CODE_QA)
"""Environments that are made from the options of ``env``, ``search`` and ``reward``: questions, corpora, grammar."""

#: Options of every environment; all others are those of question answering.
_COMMON = ("id", "args", "dev_args", "test_args", "max_observation_tokens", "tool_retries")


@dataclass(frozen=True, slots=True)
class Task:
    """What episodes are about, and the rules that they are played under.

    ``source``: the questions file, or the environment's id; ``arguments``: the environment's own, as configured.
    """

    questions: tuple[Any, ...]
    core: TurnCore[Any]
    source: str = ""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def has_split(config: RunConfig, split: Split) -> bool:
    """Whether there are tasks for ``split``: a questions file, or arguments of its own."""
    env = config.env
    if env.id not in QUESTION_ANSWERING:
        return split != "dev" or bool(env.dev_args)
    return bool({"train": env.questions, "dev": env.dev_questions}.get(split, env.test_questions or env.dev_questions))


def build_task(
    config: RunConfig,
    tokenizer: Any,
    *,
    split: Split = "train",
    given: tuple[Path, Sequence[Question]] | None = None,
    search: SearchBackend | None = None,
) -> Task:
    """Make the environment ``env.id`` for ``split``.

    Of question answering the questions are ``env.questions``, ``env.dev_questions`` or ``env.test_questions`` (else the
    dev ones), and the corpus the one given for them, else the ``corpus.jsonl`` beside them, else ``search.corpus``.
    ``given``: a questions file that was read already, and which of its questions count, instead of the split's own.
    ``search`` takes the place of the configured retriever, whose corpus must be there all the same.
    Other environments get ``env.args``, with ``env.dev_args`` or ``env.test_args`` (else the dev ones) on top of it.

    Raises ``ConfigError`` or ``DataError``, naming the option that is at fault.
    """
    env = config.env
    arguments = _arguments(env, split)
    if env.id in QUESTION_ANSWERING:
        made_of, source = _search_qa(config, tokenizer, split, given, search)
        taken = next((name for name in arguments if name in made_of), None)
        if taken is not None:
            raise ConfigError(f"env.args.{taken} of {env.id} has an option of its own; leave it out of env.args")
        made = turn_env(env.id, {**made_of, **arguments})
        return Task(tuple(made.tasks), made.core, source, arguments)
    _refuse_questions(config)
    made = turn_env(env.id, arguments)
    core = made.core
    if config.agent.splits and not getattr(core, "deferred", False):
        raise ConfigError(
            f"agent=planner_summarizer plays question answering, where an episode can end without an answer; env.id="
            f"{env.id} reads turns in its own way: use agent=react"
        )
    if env.max_observation_tokens is not None:
        core = core.limited(env.max_observation_tokens, tokenizer)
    return Task(tuple(made.tasks), core, env.id, arguments)


def question_tools(env: EnvConfig, tools: Mapping[str, Any]) -> dict[str, Any]:
    """The tools besides the search of a question-answering environment, ``tools`` being those of ``env.tools``."""
    return {"python": python_tool(env.args.get("python")), **tools} if env.id == SEARCH_CODE_QA else dict(tools)


def _arguments(env: EnvConfig, split: Split) -> dict[str, Any]:
    own = {"train": {}, "dev": env.dev_args, "test": env.test_args or env.dev_args}[split]
    return {**env.args, **own}


def _refuse_questions(config: RunConfig) -> None:
    """Options that only question answering has must not be given to another environment as if they counted."""
    for field in dataclasses.fields(EnvConfig):
        if field.name not in _COMMON and getattr(config.env, field.name) != getattr(EnvConfig(), field.name):
            raise ConfigError(
                f"env.{field.name} is an option of {SEARCH_QA}, but env.id={config.env.id}; give arguments of this "
                f"environment as env.args.NAME"
            )
    reward, default = config.reward, RewardConfig()
    if (reward.name, reward.args) != (default.name, default.args):
        _log.warning("reward.name=%s judges answers and has no effect: %s gives rewards", reward.name, config.env.id)


# -- question answering ---------------------------------------------------------------------------------------


def _check_hermes(grammar: object, style: str) -> None:
    """Refuse tools that nobody would list; warn where turns do not end after their calls."""
    if not isinstance(grammar, HermesGrammar):
        return
    if grammar.schemas == "template":
        raise ConfigError(
            "env.grammar_args.schemas=template: expected schemas=prompt, since a run does not hand the tools to the "
            "chat template and nothing would list them; schemas=template is for turntree.agents.Dialogue(tools=...)"
        )
    if style == "inline" and grammar.max_calls > 1:
        _log.warning(
            "model.dialogue=inline with env.grammar_args.max_calls=%d: a turn has no stop string and ends only where "
            "the model ends its message; use model.dialogue=tools or chat, or max_calls=1",
            grammar.max_calls,
        )


def _search_qa(
    config: RunConfig,
    tokenizer: Any,
    split: Split,
    loaded: tuple[Path, Sequence[Question]] | None,
    search: SearchBackend | None,
) -> tuple[dict[str, Any], str]:
    """The arguments of the question-answering environment, and the questions file."""
    env = config.env
    name = _questions(env, split) if loaded is None else str(loaded[0])
    path = questions_file(name)
    rows = _rows(path, split) if loaded is None else list(loaded[1])
    if not rows:
        raise DataError(f"{_option(split)}: expected at least one question, found none in {path}")
    grammar, prompt, tools = load_env(env)
    _check_hermes(grammar, config.model.dialogue)
    grammar = agent_grammar(config, grammar)
    if search is not None and config.search.backend not in REMOTE:
        _corpus(config, path, split)
    given = {
        "questions": rows,
        "search": build_backend(config.search, lambda: _corpus(config, path, split)) if search is None else search,
        "max_turns": env.max_turns,
        "max_searches": env.max_searches,
        "top_k": config.search.top_k,
        "on_length": env.on_length,
        "max_observation_tokens": env.max_observation_tokens,
        "tokenizer": tokenizer,
        "grammar": grammar,
        "reward": load_reward(config.reward),
        "tools": tools,
        "prompt": prompt,
    }
    if env.normalizer:
        given["normalizer"] = env.normalizer
    if prompt is None and env.language == "en" and language_of(rows) == "zh":
        _log.info("the questions in %s are Chinese, the prompt is English; env.language=zh makes it Chinese", path)
    return given, name


def questions_file(name: str) -> Path:
    """The file itself, or ``questions.jsonl`` in a folder."""
    return Path(name) / "questions.jsonl" if Path(name).is_dir() else Path(name)


def _rows(path: Path, split: Split) -> list[Question]:
    try:
        return list(load_questions(path))
    except DataError as error:
        raise DataError(f"{_option(split)}: {error}") from error


def _questions(env: EnvConfig, split: Split) -> str:
    """The file, or folder, of a split's questions."""
    name = {"train": env.questions, "dev": env.dev_questions, "test": env.test_questions or env.dev_questions}[split]
    if not name:
        raise ConfigError(f"{_option(split)} is empty: expected a questions file (FlashRAG jsonl or Search-R1 parquet)")
    return name


def _option(split: Split) -> str:
    return "env.questions" if split == "train" else f"env.{split}_questions"


def _corpus(config: RunConfig, questions: Path, split: Split) -> Path:
    """What the questions are asked of: the corpus given for them, else the one beside them, else ``search.corpus``.

    A folder is an index: ``search.index``, or one in the place of a corpus.
    """
    env, search = config.env, config.search
    if search.index and (search.corpus or search.backend != "bm25"):
        other = f"search.corpus={search.corpus}" if search.corpus else f"search.backend={search.backend}"
        raise ConfigError(f"search.index={search.index} names kind and corpus itself; leave {other} out")
    corpus = (env.dev_corpus or search.index) if split == "dev" else search.index or search.corpus
    if split == "test" and not env.test_questions:
        corpus = corpus or env.dev_corpus
    beside = questions.parent / "corpus.jsonl"
    path = Path(corpus) if corpus else beside if beside.is_file() else Path(search.corpus or beside)
    if not path.exists():
        if search.index and path == Path(search.index):
            raise ConfigError(f"no index at search.index={path}: build one (turntree index build), or check the path")
        raise ConfigError(f"no corpus at {path}: put corpus.jsonl beside {questions.name} or set search.corpus")
    return path


# -- what a run needs of it -----------------------------------------------------------------------------------


def provenance(config: RunConfig, task: Task) -> dict[str, Any]:
    """What a result must name besides its sampling: model, tasks, rules and limits; plain JSON."""
    about = {
        "model": config.model.path,
        "questions": task.source,
        "max_turn_tokens": config.sampling.max_turn_tokens,
        "max_context_tokens": config.sampling.max_context_tokens,
        "env_id": config.env.id,
        "env_args": task.arguments,
        "env": task.core.fingerprint,
        "finisher": config.reward.finisher,
        "agent": config.agent.name,
        "scorer": config.reward.scorer if config.reward.in_evaluation else "",
        "scorer_args": dict(config.reward.scorer_args) if config.reward.in_evaluation else {},
    }
    if config.agent.splits:
        about["summarizer"], about["summarizer_args"] = config.agent.writer(evaluating=True)
    core = task.core
    if isinstance(core, SearchQACore):
        about |= {
            "max_turns": config.env.max_turns,
            "max_searches": config.env.max_searches,
            "grammar": core.grammar.fingerprint,
            "prompt": config.env.prompt,
            "prompt_text": core.prompt.text if core.prompt else "",
            "tools": config.env.tools,
            "normalizer": core.normalizer,
        }
    return about


def rollout_sampling(config: RunConfig, core: TurnCore[Any]) -> SamplingParams:
    """Sampling of training rollouts: full support, so that log-probs are those of the policy."""
    return SamplingParams(
        max_tokens=config.sampling.max_turn_tokens, temperature=config.sampling.temperature, stop=tuple(core.stop)
    )


def eval_sampling(config: RunConfig, core: TurnCore[Any]) -> SamplingParams:
    """Sampling of evaluation."""
    return replace(rollout_sampling(config, core), temperature=config.sampling.eval_temperature)


def first(questions: Sequence[Any], count: int | None) -> tuple[Any, ...]:
    """The first ``count`` questions in file order (all for None)."""
    return tuple(questions[:count] if count is not None else questions)
