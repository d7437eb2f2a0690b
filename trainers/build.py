"""From a configuration to the objects of a run; every function given by import path is resolved here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from turntree.agents.dialogue import Dialogue, Style
from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.protocol import Engine, SamplingParams
from turntree.agents.models import load_model
from turntree.agents.scorer import Finisher, Scorer
from turntree.envs.datasets import load_questions
from turntree.envs.rewards import Reward, load_reward
from turntree.envs.search_qa import Limits as EnvLimits
from turntree.envs.search_qa import OnLength, SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError, DataError
from turntree.search_backend import SearchBackend
from turntree.search_backend.bm25 import BM25Backend, BM25Settings
from turntree.trainers.compose import import_object
from turntree.trainers.config import AlgorithmConfig, RunConfig
from turntree.trainers.credit import CreditRule
from turntree.trainers.probe import (
    probe_credit,
    probe_expansion,
    probe_grammar,
    probe_loss,
    probe_reward,
    require_function,
    require_rule,
)
from turntree.trainers.rollout import Budget, GrowthPlan, Limits

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from turntree.trainers.objectives import LossFunction

__all__ = [
    "Bench",
    "Task",
    "build_bench",
    "build_task",
    "credit_rule",
    "eval_sampling",
    "finisher",
    "first",
    "growth_plan",
    "limits",
    "loss_function",
    "provenance",
    "rollout_sampling",
    "run_path",
    "scorer",
]


@dataclass(frozen=True, slots=True)
class Task:
    """Questions and the environment's rules that they are played under."""

    questions: tuple[Question, ...]
    core: SearchQACore


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with everything that lets it talk: tokenizer, dialogue, engine."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    dialogue: Dialogue
    engine: Engine


def build_bench(config: RunConfig) -> Bench:
    """Load the policy and put an engine on its weights."""
    if not config.model.path:
        raise ConfigError(
            "model.path is empty: expected a Hugging Face folder (try `turntree model tiny --out DIR` or "
            "`turntree model smollm2 --out DIR`)"
        )
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    model, tokenizer = load_model(Path(config.model.path), dtype=config.model.dtype, device=config.trainer.device)
    _check_context(config, model)
    dialogue = Dialogue(tokenizer, style=cast("Style", config.model.dialogue))
    engine = HFEngine(
        model,
        tokenizer,
        max_batch_rows=config.engine.max_batch_rows,
        max_cached_tokens=config.engine.max_cached_tokens,
    )
    return Bench(model, tokenizer, dialogue, engine)


def _check_context(config: RunConfig, model: PreTrainedModel) -> None:
    """Refuse a context that the model has no positions for, instead of failing the trajectories that reach it."""
    positions, limit = getattr(model.config, "max_position_embeddings", None), config.sampling.max_context_tokens
    if positions is not None and limit > positions:
        raise ConfigError(
            f"sampling.max_context_tokens={limit}, but the model in {config.model.path} has {positions} positions; "
            f"set it to at most {positions}"
        )


def build_task(config: RunConfig, tokenizer: Any, *, questions: str, corpus: str = "", option: str) -> Task:
    """Read questions and their corpus, and set up the environment.

    The corpus is ``corpus``, else the ``corpus.jsonl`` beside the questions, else ``search.corpus``. Raises
    ``ConfigError`` or ``DataError``, naming ``option`` where it is at fault.
    """
    if not questions:
        raise ConfigError(f"{option} is empty: expected a questions file (FlashRAG jsonl or Search-R1 parquet)")
    path = Path(questions)
    if path.is_dir():
        path = path / "questions.jsonl"
    rows = load_questions(path)
    if not rows:
        raise DataError(f"{option}: expected at least one question, found none in {path}")
    grammar = _construct(config.env.grammar, config.env.grammar_args, option="env.grammar")
    probe_grammar(grammar, option=f"env.grammar={config.env.grammar}")
    core = SearchQACore(
        build_backend(config, _corpus(config, path, corpus)),
        limits=EnvLimits(
            max_turns=config.env.max_turns,
            max_searches=config.env.max_searches,
            top_k=config.search.top_k,
            on_length=cast("OnLength", config.env.on_length),
            max_observation_tokens=config.env.max_observation_tokens,
        ),
        grammar=grammar,
        reward=_reward(config),
        tokenizer=tokenizer,
    )
    return Task(tuple(rows), core)


def _reward(config: RunConfig) -> Reward:
    option = f"reward.name={config.reward.name}"
    try:
        found = load_reward(config.reward.name)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    probe_reward(require_rule(found, option=option), option=option)
    return found


def _corpus(config: RunConfig, questions: Path, corpus: str) -> Path:
    beside = questions.parent / "corpus.jsonl"
    path = Path(corpus) if corpus else beside if beside.is_file() else Path(config.search.corpus or beside)
    if not path.is_file():
        raise ConfigError(f"no corpus at {path}: put corpus.jsonl beside {questions.name} or set search.corpus")
    return path


@functools.lru_cache(maxsize=4)
def _bm25(corpus: str, modified: float, args: tuple[tuple[str, Any], ...]) -> BM25Backend:
    del modified  # part of the key: a rewritten corpus is indexed again
    return BM25Backend.from_corpus(Path(corpus), **dict(args))


def build_backend(config: RunConfig, corpus: Path) -> SearchBackend:
    """The retriever over ``corpus``."""
    args = dict(config.search.args)
    if config.search.backend == "bm25":
        _check_arguments(BM25Settings, args, option="search.args")
        return _bm25(str(corpus.resolve()), corpus.stat().st_mtime, tuple(sorted(args.items())))
    backend: SearchBackend = _construct(config.search.backend, {"corpus": corpus, **args}, option="search.backend")
    return backend


def growth_plan(algorithm: AlgorithmConfig) -> GrowthPlan:
    """The shape of a prompt's trees."""
    rule = _rule(algorithm.expansion, algorithm.expansion_args, option="algorithm.expansion")
    probe_expansion(rule, option=_words("algorithm.expansion", algorithm.expansion, algorithm.expansion_args))
    return GrowthPlan(
        trees=algorithm.trees,
        chains=algorithm.chains,
        rounds=algorithm.rounds,
        expansions=algorithm.expansions,
        kept_leaves=algorithm.kept_leaves,
        rule=rule,
        budget=Budget(algorithm.budget_leaves, algorithm.budget_tokens, algorithm.budget_tool_calls),
    )


def credit_rule(algorithm: AlgorithmConfig) -> CreditRule:
    """The credit rule with its arguments bound, after it was tried on a tiny group."""
    rule: CreditRule = _rule(algorithm.credit, algorithm.credit_args, option="algorithm.credit")
    probe_credit(rule, option=_words("algorithm.credit", algorithm.credit, algorithm.credit_args))
    return rule


def loss_function(algorithm: AlgorithmConfig) -> LossFunction | None:
    """The policy loss that replaces the clipped ratio, after it was tried; None without one."""
    if not algorithm.objective:
        return None
    found: LossFunction = _rule(algorithm.objective, algorithm.objective_args, option="algorithm.objective")
    probe_loss(found, option=_words("algorithm.objective", algorithm.objective, algorithm.objective_args))
    return found


def scorer(config: RunConfig) -> Scorer | None:
    """The scorer that replaces the environment's reward; None without one."""
    return cast("Scorer | None", _batched(config.reward.scorer, option="reward.scorer"))


def finisher(config: RunConfig) -> Finisher | None:
    """What writes the answers of finished trajectories before they are scored; None without one."""
    return cast("Finisher | None", _batched(config.reward.finisher, option="reward.finisher"))


def _batched(path: str, *, option: str) -> Any:
    return require_function(import_object(path, option=option), option=f"{option}={path}") if path else None


def _rule(path: str, arguments: dict[str, Any], *, option: str) -> Any:
    rule = require_rule(import_object(path, option=option), option=f"{option}={path}")
    return _partial(rule, arguments, option=f"{option}_args") if arguments else rule


def _words(option: str, path: str, arguments: dict[str, Any]) -> str:
    """The option as messages name it, with the arguments that may be at fault."""
    given = " ".join(f"{option}_args.{name}={value}" for name, value in arguments.items())
    return f"{option}={path} {given}".rstrip()


def _partial(function: Callable[..., Any], arguments: dict[str, Any], *, option: str) -> Any:
    """``functools.partial`` that keeps the attributes of a rule (``needs``)."""
    _check_arguments(function, arguments, option=option)
    bound = functools.partial(function, **arguments)
    return functools.update_wrapper(bound, function)


def _construct(path: str, arguments: dict[str, Any], *, option: str) -> Any:
    """Call what an import path names."""
    factory = import_object(path, option=option)
    _check_arguments(factory, arguments, option=option)
    try:
        return factory(**arguments)
    except (ConfigError, TypeError, ValueError) as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        given = f" with {arguments}" if arguments else ""
        raise ConfigError(f"{option}={path}{given}: {kind}{error}") from error


def _check_arguments(function: Callable[..., Any], arguments: dict[str, Any], *, option: str) -> None:
    """Refuse arguments that ``function`` does not take, before anything was done with them."""
    if not callable(function):
        raise ConfigError(f"{option}: expected something that can be called, found {function!r}")
    try:
        inspect.signature(function).bind_partial(**arguments)
    except TypeError as error:
        raise ConfigError(f"{option}: {getattr(function, '__qualname__', function)} {error}") from None
    except ValueError:  # built-in functions may have no signature
        return


def limits(config: RunConfig) -> Limits:
    """Token limits and retries of a rollout."""
    return Limits(
        max_turn_tokens=config.sampling.max_turn_tokens,
        max_context_tokens=config.sampling.max_context_tokens,
        tool_retries=config.env.tool_retries,
        max_concurrent_trees=config.trainer.max_concurrent_trees,
    )


def provenance(config: RunConfig, task: Task, *, questions: str) -> dict[str, Any]:
    """What a result must name besides its sampling: model, questions, rules and limits; plain JSON."""
    return {
        "model": config.model.path,
        "questions": questions,
        "max_turns": config.env.max_turns,
        "max_searches": config.env.max_searches,
        "max_turn_tokens": config.sampling.max_turn_tokens,
        "max_context_tokens": config.sampling.max_context_tokens,
        "grammar": task.core.grammar.fingerprint,
        "env": task.core.fingerprint,
        "normalizer": task.core.normalizer,
        "finisher": config.reward.finisher,
    }


def rollout_sampling(config: RunConfig, core: SearchQACore) -> SamplingParams:
    """Sampling of training rollouts: full support, so that log-probs are those of the policy."""
    return SamplingParams(
        max_tokens=config.sampling.max_turn_tokens,
        temperature=config.sampling.temperature,
        stop=tuple(core.grammar.stop),
    )


def eval_sampling(config: RunConfig, core: SearchQACore) -> SamplingParams:
    """Sampling of evaluation."""
    return SamplingParams(
        max_tokens=config.sampling.max_turn_tokens,
        temperature=config.sampling.eval_temperature,
        stop=tuple(core.grammar.stop),
    )


def first(questions: Sequence[Question], count: int | None) -> tuple[Question, ...]:
    """The first ``count`` questions in file order (all for None)."""
    return tuple(questions[:count] if count is not None else questions)


def run_path(config: RunConfig, command: str) -> Path:
    """``config.out``, or ``runs/<command>-<algorithm>-seed<seed>``, numbered: the first free, the last to resume."""
    if config.out:
        return Path(config.out)
    base = Path("runs") / f"{command}-{config.algorithm.name}-seed{config.seed}"
    number, path = 1, base
    while (path if not config.resume else base.with_name(f"{base.name}-{number + 1}")).exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path
