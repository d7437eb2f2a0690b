"""From a configuration to the objects of a run; every function given by import path is resolved here."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from turntree.agents.dialogue import Dialogue, Style
from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.protocol import Engine
from turntree.agents.lora import add_adapter
from turntree.agents.models import load_model, save_weights
from turntree.agents.scorer import Finisher, Scorer
from turntree.agents.summarizer import WrittenAnswers
from turntree.agents.tokenizer import Tokenizer, end_ids
from turntree.envs.core import TurnCore
from turntree.envs.search_qa import SearchQACore
from turntree.errors import ConfigError
from turntree.trainers.agent import summarizer
from turntree.trainers.cluster.engine import cluster_engine
from turntree.trainers.compose import import_object
from turntree.trainers.config import AlgorithmConfig, RunConfig
from turntree.trainers.credit import CreditRule, credit_needs
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.objectives import LossFunction, PairLossFunction, loss_needs
from turntree.trainers.pairs import Pair, sibling_pairs
from turntree.trainers.plan import Schedule
from turntree.trainers.plugins import load_batched, load_rule, spelled
from turntree.trainers.probe import probe_credit, probe_expansion, probe_loss
from turntree.trainers.recompute import Recompute, recompute_activations
from turntree.trainers.remote import RemoteBench, refuse_training
from turntree.trainers.rollout import Budget, GrowthPlan, Limits
from turntree.trainers.seeds import derive_seed
from turntree.trainers.shaping import Overlong
from turntree.trainers.tree import Group

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


__all__ = [
    "Bench",
    "build_bench",
    "check_adapter",
    "credit_rule",
    "finisher",
    "growth_plan",
    "kl_reward",
    "limits",
    "loss_function",
    "overlong",
    "pair_chooser",
    "run_path",
    "scorer",
]


_log = logging.getLogger(__name__)

AnyLoss: TypeAlias = "LossFunction | PairLossFunction"


@dataclass(frozen=True, slots=True)
class Bench:
    """A model with everything that lets it talk: tokenizer, dialogue, engine."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    dialogue: Dialogue
    engine: Engine

    def close(self) -> None:
        """Let go of what the engine holds outside this process: vLLM's processes, connections."""
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()

    def rest(self) -> None:
        """The engine has nothing to do for a while: one that can sleep does."""
        rest = getattr(self.engine, "rest", None)
        if rest is not None:
            rest()


def build_bench(config: RunConfig) -> Bench:
    """Load the policy and put an engine on its weights."""
    config, reason = resolve_engine(config, trains=True)
    if reason:
        _log.info("engine=auto is %s: %s", config.engine.name, reason)
    refuse_training(config)
    if not config.model.path:
        raise ConfigError(
            "model.path is empty: expected a Hugging Face folder (try `turntree model tiny --out DIR` or "
            "`turntree model smollm2 --out DIR`)"
        )
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    model, tokenizer = load_model(Path(config.model.path), dtype=config.model.dtype, device=config.trainer.device)
    _check_context(config, model)
    _add_adapter(config, model)
    recompute_activations(model, cast("Recompute", config.trainer.activation_checkpointing))
    dialogue = Dialogue(tokenizer, style=cast("Style", config.model.dialogue))
    return Bench(model, tokenizer, dialogue, _engine(config, model, tokenizer))


def check_adapter(config: RunConfig) -> None:
    """Raise ``ConfigError`` where the engine cannot be sent an adapter."""
    if config.model.lora_rank and config.engine.name == "vllm" and config.engine.sync != "folder":
        raise ConfigError(
            f"engine.sync={config.engine.sync} sends the parameters as they are, and model.lora_rank="
            f"{config.model.lora_rank} needs them merged; use engine.sync=folder"
        )


def _add_adapter(config: RunConfig, model: PreTrainedModel) -> None:
    """The LoRA adapter of ``model.lora_rank``, equal for equal seeds; nothing without one."""
    options = config.model
    if not options.lora_rank:
        return
    check_adapter(config)
    add_adapter(
        model,
        rank=options.lora_rank,
        alpha=options.lora_alpha,
        targets=options.lora_targets,
        seed=derive_seed(config.seed, "lora"),
    )


def _engine(config: RunConfig, model: PreTrainedModel, tokenizer: Tokenizer) -> Engine:
    """The engine that ``engine.name`` asks for, on the weights of ``model``."""
    if config.cluster.name == "ray":
        return cluster_engine(config, model.state_dict)
    makers = {"hf": _hf, "vllm": _vllm, "vllm_server": _vllm_server}
    if config.engine.name not in makers:
        raise ConfigError(f"engine={config.engine.name} generates no token ids to train on; choose from {list(makers)}")
    return makers[config.engine.name](config, model, tokenizer)


def _hf(config: RunConfig, model: PreTrainedModel, tokenizer: Tokenizer) -> Engine:
    options = config.engine
    return HFEngine(
        model, tokenizer, max_batch_rows=options.max_batch_rows, max_cached_tokens=options.max_cached_tokens
    )


def _publish(model: PreTrainedModel) -> Callable[[Path], object]:
    """Writes the weights for vLLM, which on CPU needs the output layer as a tensor of its own."""
    return functools.partial(save_weights, model, untie=not torch.cuda.is_available())


def _vllm(config: RunConfig, model: PreTrainedModel, tokenizer: Tokenizer) -> Engine:
    from turntree.agents.engines.vllm import VLLMEngine

    options = config.engine
    return VLLMEngine(
        config.model.path,
        tokenizer,
        dtype=config.model.dtype,
        max_context_tokens=config.sampling.max_context_tokens,
        stop_ids=end_ids(tokenizer, model.generation_config),
        publish=_publish(model),
        module=model,
        sync=cast("Any", options.sync),
        sync_folder=options.sync_folder or None,
        max_concurrent_requests=options.max_concurrent_requests,
        block_size=options.block_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_gb=options.kv_cache_gb,
        enforce_eager=options.enforce_eager,
        entropy_topk=options.entropy_topk,
        sleep=options.sleep,
        options=options.args,
    )


def _vllm_server(config: RunConfig, model: PreTrainedModel, tokenizer: Tokenizer) -> Engine:
    from turntree.agents.engines.vllm_server import VLLMServerEngine

    options = config.engine
    return VLLMServerEngine(
        options.base_url,
        tokenizer,
        model=options.model,
        max_context_tokens=config.sampling.max_context_tokens,
        stop_ids=end_ids(tokenizer, model.generation_config),
        publish=_publish(model),
        sync_folder=options.sync_folder or None,
        max_concurrent_requests=options.max_concurrent_requests,
        entropy_topk=options.entropy_topk,
        timeout_s=options.timeout_s,
        retries=options.retries,
    )


def _check_context(config: RunConfig, model: PreTrainedModel) -> None:
    """Refuse a context that the model has no positions for, instead of failing the trajectories that reach it."""
    positions, limit = getattr(model.config, "max_position_embeddings", None), config.sampling.max_context_tokens
    if positions is not None and limit > positions:
        raise ConfigError(
            f"sampling.max_context_tokens={limit}, but the model in {config.model.path} has {positions} positions; "
            f"set it to at most {positions}"
        )


def growth_plan(algorithm: AlgorithmConfig, *, vocab_size: int | None = None) -> GrowthPlan:
    """The shape of a prompt's trees. ``vocab_size`` goes to rules that take one and were not given it."""
    option, path, arguments = "algorithm.expansion", algorithm.expansion, dict(algorithm.expansion_args)
    if vocab_size is not None and _takes(import_object(path, option=option), "vocab_size"):
        arguments.setdefault("vocab_size", vocab_size)
    rule = load_rule(path, arguments, option=option)
    probe_expansion(rule, option=spelled(option, path, algorithm.expansion_args))
    return GrowthPlan(
        trees=algorithm.trees,
        chains=algorithm.chains,
        rounds=algorithm.rounds,
        expansions=algorithm.expansions,
        kept_leaves=algorithm.kept_leaves,
        rule=rule,
        budget=Budget(algorithm.budget_leaves, algorithm.budget_tokens, algorithm.budget_tool_calls),
        adaptive=algorithm.adaptive,
    )


def _takes(function: Any, argument: str) -> bool:
    try:
        return argument in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a function, or one without a signature
        return False


def credit_rule(algorithm: AlgorithmConfig) -> CreditRule:
    """The credit rule with its arguments bound, after it was tried on a tiny group."""
    rule: CreditRule = load_rule(algorithm.credit, algorithm.credit_args, option="algorithm.credit")
    probe_credit(rule, option=spelled("algorithm.credit", algorithm.credit, algorithm.credit_args))
    return rule


def loss_function(algorithm: AlgorithmConfig) -> AnyLoss | None:
    """The loss that replaces the clipped ratio, after it was tried; None without one.

    ``algorithm.aggregation`` goes to losses that take one and were not given it.
    """
    if not algorithm.objective:
        return None
    option, path, arguments = "algorithm.objective", algorithm.objective, dict(algorithm.objective_args)
    if _takes(import_object(path, option=option), "aggregation"):
        arguments.setdefault("aggregation", algorithm.aggregation)
    found: AnyLoss = load_rule(path, arguments, option=option)
    probe_loss(found, option=spelled(option, path, algorithm.objective_args))
    return found


def _check_pairs(algorithm: AlgorithmConfig, credit: CreditRule) -> None:
    option = f"algorithm.objective={algorithm.objective}"
    reasons = {
        "algorithm.entropy_balance": algorithm.entropy_balance > 0,
        f"algorithm.shared_turns={algorithm.shared_turns}": algorithm.shared_turns != "per_leaf",
        "algorithm.kl_in=reward": algorithm.kl_coef > 0 and algorithm.kl_in == "reward",
        f"algorithm.credit={algorithm.credit}, which needs values,": "values" in credit_needs(credit),
    }
    for what, found in reasons.items():
        if found:
            raise ConfigError(
                f"{option} trains on pairs of turns, without advantages and weights: {what} has no effect"
            )
    if not algorithm.rounds and algorithm.chains < 2:
        raise ConfigError(f"{option} needs sibling turns, but each tree is a single chain; raise chains or set rounds")


def pair_chooser(
    algorithm: AlgorithmConfig, loss: AnyLoss | None, credit: CreditRule
) -> Callable[[Group], list[Pair]] | None:
    """Which siblings are compared; None for a loss that takes no pairs.

    Raises ``ConfigError`` for options that only an objective with advantages could follow.
    """
    if loss is None or loss_needs(loss) != "pairs":
        return None
    _check_pairs(algorithm, credit)
    return functools.partial(
        sibling_pairs, min_margin=algorithm.pair_min_margin, max_pairs_per_parent=algorithm.pair_max_per_parent
    )


def overlong(algorithm: AlgorithmConfig) -> Overlong | None:
    """DAPO's penalty of long trajectories; None without one."""
    if algorithm.overlong_tokens is None:
        return None
    return Overlong(algorithm.overlong_tokens, algorithm.overlong_buffer, algorithm.overlong_factor)


def kl_reward(algorithm: AlgorithmConfig) -> tuple[float, str] | None:
    """Coefficient and estimator of a KL penalty in the reward; None where it is in the loss."""
    inside = algorithm.kl_in == "reward" and algorithm.kl_coef > 0
    return (algorithm.kl_coef, algorithm.kl_estimator) if inside else None


def scorer(config: RunConfig, core: TurnCore[Any] | None = None) -> Scorer | None:
    """The scorer that replaces the environment's reward; None without one.

    A planner's episode ends without an answer: there the environment's reward is that of the summariser's.
    """
    if config.agent.splits and not config.reward.scorer and isinstance(core, SearchQACore):
        return WrittenAnswers(core)
    return cast("Scorer | None", load_batched(config.reward.scorer, config.reward.scorer_args, option="reward.scorer"))


def finisher(
    config: RunConfig, bench: Bench | RemoteBench | None = None, *, evaluating: bool = False
) -> Finisher | None:
    """What writes the answers of finished trajectories before they are scored; None without one.

    Of a split agent the summariser, in ``evaluating`` that of evaluation; ``bench`` is the planner.
    """
    if config.agent.splits:
        return summarizer(config, bench, evaluating=evaluating)
    return cast(
        "Finisher | None", load_batched(config.reward.finisher, config.reward.finisher_args, option="reward.finisher")
    )


def limits(config: RunConfig) -> Limits:
    """Token limits and retries of a rollout."""
    return Limits(
        max_turn_tokens=config.sampling.max_turn_tokens,
        max_context_tokens=config.sampling.max_context_tokens,
        tool_retries=config.env.tool_retries,
        max_concurrent_trees=config.trainer.max_concurrent_trees,
        schedule=cast(Schedule, config.trainer.schedule),
    )


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
