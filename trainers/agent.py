"""The agent as configured: the planner's grammar, and who writes the answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from turntree.agents.scorer import Finisher
from turntree.agents.summarizer import RuleSummarizer, llm_summarizer
from turntree.agents.texts import EngineTexts
from turntree.envs.grammar import Grammar, PlannerGrammar
from turntree.envs.loading import check_arguments, construct
from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig
from turntree.trainers.plugins import load_batched

if TYPE_CHECKING:
    from turntree.trainers.build import Bench
    from turntree.trainers.remote import RemoteBench

__all__ = ["agent_grammar", "summarizer", "summarizer_usage"]


def agent_grammar(config: RunConfig, grammar: Grammar) -> Grammar:
    """``grammar`` with a planner's ending where the agent is split. Raises ``ConfigError`` where it cannot have one."""
    if not config.agent.splits:
        return grammar
    try:
        return PlannerGrammar(grammar, cast("Any", config.agent.language or config.env.language))
    except ConfigError as error:
        raise ConfigError(f"agent=planner_summarizer with env.grammar={config.env.grammar}: {error}") from error


def summarizer(config: RunConfig, bench: Bench | RemoteBench | None, *, evaluating: bool = False) -> Finisher:
    """What writes the planner's answers; close it after use where it can be closed.

    ``bench``: the planner, whose engine ``agent.summarizer=planner`` asks. Raises ``ConfigError``, naming the option.
    """
    name, arguments = config.agent.writer(evaluating=evaluating)
    option = "agent.eval_summarizer" if evaluating and config.agent.eval_summarizer else "agent.summarizer"
    if ":" in name:
        return cast("Finisher", load_batched(name, arguments, option=option))
    makers: dict[str, Any] = {"rule": RuleSummarizer, "llm": llm_summarizer, "planner": llm_summarizer}
    if name not in makers:
        raise ConfigError(f"{option}={name}: expected planner, llm, rule, or an import path package.module:name")
    given = dict(arguments)
    if name != "rule":
        given.setdefault("language", config.agent.language or config.env.language)
    if name == "planner":
        given["texts"] = _own_texts(config, bench, given, option=option)
    check_arguments(makers[name], given, what=f"{option}_args")
    return cast("Finisher", construct(makers[name], given, what=f"{option}={name}"))


def _own_texts(
    config: RunConfig, bench: Bench | RemoteBench | None, given: dict[str, Any], *, option: str
) -> EngineTexts:
    if bench is None:
        raise ConfigError(f"{option}=planner asks the planner's own engine, but there is none here; use llm or rule")
    for name in ("model", "base_url", "engine", "dtype", "device"):
        if name in given:
            raise ConfigError(f"{option}_args.{name} is an argument of {option}=llm; the planner's own model answers")
    limit, temperature = int(given.pop("max_tokens", 256)), float(given.pop("temperature", 0.0))
    return EngineTexts(bench.engine, bench.dialogue, config.model.path or config.engine.model, limit, temperature)


def summarizer_usage(finisher: Finisher | None, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """What a summariser used since ``before`` (an earlier call's total): requests, tokens, cost, failed answers.

    Empty without a summariser, and for finishers that do not count.
    """
    usage = getattr(finisher, "usage", None)
    if usage is None:
        return {}
    keys = ("requests", "prompt_tokens", "completion_tokens", "cost")
    total = {key: float(getattr(usage, key)) for key in keys} | {"failed": float(getattr(finisher, "failed", 0))}
    return {key: value - (before or {}).get(key, 0.0) for key, value in total.items()}
