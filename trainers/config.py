"""Every option of a run, as frozen dataclasses whose fields carry one-line docs.

Hydra composes ``configs/*.yaml`` over these schemas (:func:`turntree.trainers.compose.compose`); nothing heavy is
imported and no heavy object sits in a config. Functions are given by import path, ``package.module:name``.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

from turntree.errors import ConfigError
from turntree.trainers.combinations import refusal
from turntree.trainers.surrogate import (
    AGGREGATIONS,
    CLIPS,
    GRADIENTS,
    LEVELS,
    TURN_RATIOS,
    Aggregation,
    Clip,
    RatioGradient,
    RatioLevel,
    TurnRatio,
    check_surrogate,
)

__all__ = [
    "AlgorithmConfig",
    "EngineConfig",
    "EnvConfig",
    "ModelConfig",
    "OpenAIConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "SearchConfig",
    "SftConfig",
    "TrainerConfig",
    "did_you_mean",
    "documented_options",
]


def opt(default: Any, doc: str) -> Any:
    """A field with a default and a one-line doc."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: default.copy(), metadata={"doc": doc})
    return field(default=default, metadata={"doc": doc})


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` or an empty string."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} is not known; expected one of {list(allowed)}.{did_you_mean(value, allowed)}"
        )


def _finite(prefix: str, section: Any) -> None:
    """Refuse nan and inf in every number of a section: nan passes or fails comparisons silently."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{prefix}.{f.name}={value}: expected a finite number")


def _at_least(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not value >= minimum:
        raise ConfigError(f"{name}={value} is out of range; expected a value >= {minimum}")


@dataclass(frozen=True)
class ModelConfig:
    """The policy network."""

    path: str = opt("", "Hugging Face folder of the policy (weights, config, tokenizer); required.")
    dtype: str = opt("float32", "float32 or bfloat16; of weights, rollout and update.")
    dialogue: str = opt(
        "inline", "observations: inline continues the model's message; chat: user messages; tools: of role tool."
    )

    def __post_init__(self) -> None:
        _one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        _one_of("model.dialogue", self.dialogue, ("inline", "chat", "tools"))


@dataclass(frozen=True)
class SearchConfig:
    """The retriever."""

    backend: str = opt("bm25", "bm25, or the import path of a factory that takes `corpus` and `args`.")
    corpus: str = opt("", "corpus.jsonl that is searched ('' : the corpus beside the questions).")
    top_k: int = opt(3, "passages shown for a search.")
    args: dict[str, Any] = opt({}, "further arguments of the backend (bm25: k1, b, stemmer).")

    def __post_init__(self) -> None:
        _at_least("search.top_k", self.top_k, 1)


@dataclass(frozen=True)
class EnvConfig:
    """The task: an environment by its id; from ``questions`` on, most options are those of question answering."""

    id: str = opt("turntree/SearchQA-v0", "Gymnasium id of the environment, [module:]namespace/Name-v0.")
    args: dict[str, Any] = opt({}, "its keyword arguments.")
    dev_args: dict[str, Any] = opt({}, "arguments for validation, on top of args ({} : none, see dev_questions).")
    test_args: dict[str, Any] = opt({}, "arguments that evaluate uses, on top of args ({} : dev_args).")
    questions: str = opt("", "training questions (FlashRAG jsonl or Search-R1 parquet); required for train and sft.")
    dev_questions: str = opt("", "validation questions ('' : no validation during training).")
    dev_corpus: str = opt("", "corpus of the validation questions ('' : the one beside them).")
    test_questions: str = opt("", "questions that evaluate uses ('' : dev_questions).")
    max_turns: int = opt(4, "model turns of an episode; the last one cannot search.")
    max_searches: int | None = opt(None, "searches of an episode (null: bounded by max_turns).")
    max_observation_tokens: int | None = opt(None, "tokens of one observation; documents are cut inside the tags.")
    on_length: str = opt("correct", "a turn cut at its limit: correct (one correction) or end (truncated).")
    grammar: str = opt("turntree.envs.grammar:TagGrammar", "import path of the turn grammar.")
    grammar_args: dict[str, Any] = opt({}, "its arguments (TagGrammar: think=optional|required).")
    prompt: str = opt("", "text file with {question}, in the place of the grammar's instructions ('' : the grammar's).")
    tools: dict[str, Any] = opt({}, "further tools: name -> import path of a class or factory, or {path, args}.")
    tool_retries: int = opt(2, "retries of a failed tool call before the leaf counts as failed.")

    def __post_init__(self) -> None:
        _at_least("env.max_turns", self.max_turns, 1)
        _one_of("env.on_length", self.on_length, ("correct", "end"))
        _at_least("env.max_observation_tokens", self.max_observation_tokens, 8)
        _at_least("env.tool_retries", self.tool_retries, 0)


@dataclass(frozen=True)
class RewardConfig:
    """What a finished trajectory is worth."""

    name: str = opt("em", "em, f1, tree_grpo (graded), atpo (-1/0/EM), or the import path of a reward function.")
    args: dict[str, Any] = opt({}, "its arguments (tree_grpo: structure, final, retrieval, metric).")
    scorer: str = opt("", "import path of a batched scorer that replaces the env's reward ('' : none).")
    scorer_args: dict[str, Any] = opt({}, "its arguments; a class or factory is called with them.")
    finisher: str = opt("", "import path of a finisher, which writes the answers before they are scored ('' : none).")
    finisher_args: dict[str, Any] = opt({}, "its arguments; a class or factory is called with them.")


@dataclass(frozen=True)
class SamplingConfig:
    """How turns are sampled; all limits are in tokens."""

    temperature: float = opt(1.0, "sampling temperature of rollouts; log-probs are taken at it too.")
    max_turn_tokens: int = opt(128, "tokens of one turn.")
    max_context_tokens: int = opt(2048, "tokens of prompt and trajectory together; a full context ends the episode.")
    eval_temperature: float = opt(0.0, "temperature of evaluation (0: greedy).")

    def __post_init__(self) -> None:
        _finite("sampling", self)
        if not self.temperature > 0:
            raise ConfigError(
                f"sampling.temperature={self.temperature}: rollouts must sample (> 0); greedy siblings would be equal"
            )
        _at_least("sampling.eval_temperature", self.eval_temperature, 0)
        _at_least("sampling.max_turn_tokens", self.max_turn_tokens, 1)
        _at_least("sampling.max_context_tokens", self.max_context_tokens, 2)


@dataclass(frozen=True)
class EngineConfig:
    """Where turns are generated."""

    name: str = opt("hf", "hf, vllm (in this process), vllm_server, openai (any such server), or auto.")
    max_batch_rows: int = opt(64, "hf: rows decoded together.")
    max_cached_tokens: int = opt(1_000_000, "hf: tokens of kept KV caches; least recently used ones are dropped.")
    max_concurrent_requests: int = opt(64, "vllm, servers: requests in flight.")
    block_size: int | None = opt(
        None, "vllm: tokens of a block of the prefix cache (null: 32 on CPU, vLLM's own on GPU)."
    )
    gpu_memory_utilization: float = opt(0.5, "vllm on GPU: share of the memory it takes; the trainer needs the rest.")
    kv_cache_gb: int = opt(1, "vllm on CPU: GiB of its KV cache.")
    enforce_eager: bool | None = opt(None, "vllm: do not compile the model (null: true on CPU, false on GPU).")
    args: dict[str, Any] = opt({}, "vllm: further arguments of vllm.LLM, such as tensor_parallel_size.")
    entropy_topk: int = opt(0, "vllm: entropies over this many most likely tokens (0: none; rules then use nll).")
    sync: str = opt("folder", "vllm: how weights get there: folder (in sync_folder), nccl or ipc (from GPU to GPU).")
    sync_folder: str = opt("", "folder of the weights on their way ('' : shared memory, else the temporary folder).")
    base_url: str = opt("", "servers: address up to /v1, such as http://127.0.0.1:8000/v1.")
    model: str = opt("", "servers: name under which the server knows the model.")
    timeout_s: float = opt(600.0, "servers: seconds until a request counts as failed.")
    retries: int = opt(3, "servers: retries of a request that got no answer.")

    def __post_init__(self) -> None:
        _finite("engine", self)
        _one_of("engine.name", self.name, ("hf", "vllm", "vllm_server", "openai", "auto"))
        _one_of("engine.sync", self.sync, ("folder", "nccl", "ipc"))
        for name in ("max_batch_rows", "max_concurrent_requests", "block_size", "kv_cache_gb"):
            _at_least(f"engine.{name}", getattr(self, name), 1)
        for name in ("entropy_topk", "retries", "timeout_s"):
            _at_least(f"engine.{name}", getattr(self, name), 0)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"engine.gpu_memory_utilization={self.gpu_memory_utilization} is not a share; expected 0 < share <= 1"
            )


@dataclass(frozen=True)
class OpenAIConfig:
    """What engine=openai adds to the address and limits of ``engine``."""

    protocol: str = opt("chat", "chat (messages and text), or completions (token ids; the server must return them).")
    api_key_env: str = opt("", "name of the environment variable that holds the API key ('' : no key is sent).")
    requests_per_minute: int | None = opt(None, "requests started in any minute (null: unbounded).")
    tokens_per_minute: int | None = opt(None, "prompt tokens plus token limits of these requests (null: unbounded).")
    prompt_price: float = opt(0.0, "price of a million prompt tokens.")
    completion_price: float = opt(0.0, "price of a million generated tokens.")
    max_cost: float | None = opt(None, "nothing new is started once this is spent (null: unbounded).")
    max_tokens_key: str = opt("max_tokens", "how the server calls the limit: max_tokens or max_completion_tokens.")
    sampling: dict[str, Any] = opt({}, "further sampling keys of each request (top_p, top_k, reasoning_effort, ...).")

    def __post_init__(self) -> None:
        from turntree.agents.engines.endpoint import Endpoint

        _one_of("openai.protocol", self.protocol, ("chat", "completions"))
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "protocol"}
        try:
            Endpoint("http://localhost", "any", **own)
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if message.startswith("openai.") else f"openai.{message}") from None


_PER_TURN = (
    "at2po",
    "at2po_reference",
    "at2po_centred",
    "tree_diff",
    "tree_diff_reference",
    "sibling_baseline",
    "shrunk_loo",
    "arpo",
)


def built_in(path: str) -> str:
    """The name of a built-in rule that an import path means; '' for a rule of somebody else."""
    module, _, name = path.partition(":")
    return name if module.startswith("turntree.trainers.") else ""


@dataclass(frozen=True)
class AlgorithmConfig:
    """One combination of expansion rule, credit rule and objective."""

    name: str = opt("custom", "name written into results.")
    trees: int = opt(1, "independent trees of a prompt.")
    chains: int = opt(8, "complete trajectories that start each tree.")
    rounds: int = opt(0, "rounds of expansion after them.")
    expansions: int = opt(0, "new trajectories that each round adds to each tree.")
    kept_leaves: int | None = opt(None, "leaves of a tree that are kept for training (null: all).")
    budget_leaves: int | None = opt(None, "trajectories of a prompt, checked at rounds (null: unbounded).")
    budget_tokens: int | None = opt(None, "generated tokens of a prompt, checked at rounds (null: unbounded).")
    budget_tool_calls: int | None = opt(None, "tool calls of a prompt, checked at rounds (null: unbounded).")
    adaptive: float | None = opt(
        None,
        "a prompt whose first chains all end after one turn, each of mean negative log-prob below this (nats), gives "
        "its expansions to the other prompts of the rollout (null: off).",
    )
    expansion: str = opt("turntree.trainers.expansion:chain", "import path of the expansion rule.")
    expansion_args: dict[str, Any] = opt({}, "keyword arguments of the expansion rule.")
    source: str = opt("policy", "who plays: policy, or teacher (supervised training on demonstrations, see sft.*).")
    dynamic_sampling: int = opt(
        0, "DAPO: drop groups of equal rewards and sample more prompts, up to this many batches a step (0: off)."
    )
    overlong_tokens: int | None = opt(
        None, "DAPO: sampled tokens of a trajectory at which the overlong penalty is full (null: no penalty)."
    )
    overlong_buffer: int = opt(1, "sampled tokens before overlong_tokens over which the penalty grows linearly.")
    overlong_factor: float = opt(1.0, "the full overlong penalty; it is never larger.")
    credit: str = opt("turntree.trainers.credit:grpo", "import path of the credit rule.")
    credit_args: dict[str, Any] = opt({}, "keyword arguments of the credit rule.")
    min_scored_leaves: int = opt(2, "groups with fewer scored leaves are dropped and counted.")
    shared_turns: str = opt("per_leaf", "weight of a turn shared by leaves: per_leaf (1) or once (1 / leaves).")
    entropy_balance: float = opt(
        0.0, "AEPO: advantages are multiplied by 1 + this x z-score of the token's entropy in the mini-batch (0: off)."
    )
    objective: str = opt(
        "", "import path of a loss f(occurrences, denominators), or f(pairs, denominators) ('' : the clipped ratio)."
    )
    objective_args: dict[str, Any] = opt({}, "keyword arguments of the objective.")
    pair_min_margin: float = opt(0.0, "objectives of pairs: siblings whose values differ by more than this are paired.")
    pair_max_per_parent: int | None = opt(None, "objectives of pairs: pairs of one parent, widest first (null: all).")
    ratio: str = opt("token", "level of the importance ratio: token, turn or sequence.")
    turn_ratio: str = opt("geometric", "ratio of a turn or sequence: geometric (mean of log-ratios) or product (sum).")
    ratio_gradient: str = opt(
        "straight_through", "straight_through: each token its own gradient; true: through the whole turn or sequence."
    )
    clip: str = opt("hard", "hard (PPO), soft (clipped tokens keep a gradient), soft_upper (AEPO), or cispo.")
    clip_low: float = opt(0.2, "ratios are clipped below 1 - clip_low.")
    clip_high: float = opt(0.2, "ratios are clipped above 1 + clip_high.")
    dual_clip: float | None = opt(None, "bound of the loss for negative advantages (null: none).")
    by_turns: list[dict[str, Any]] = opt(
        [],
        "other settings for trajectories of few turns: {max_turns, ratio, clip_low, clip_high} each, smallest first.",
    )
    aggregation: str = opt(
        "token-mean", "token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm or turn-mean."
    )
    sum_norm: float | None = opt(
        None, "divisor of seq-mean-token-sum-norm (null: the longest trajectory's sampled tokens)."
    )
    kl_coef: float = opt(0.0, "coefficient of the KL term against the reference model (0: no reference model).")
    kl_estimator: str = opt("k3", "k1, k2 or k3; with a trailing +: that value, the gradient of k2.")
    kl_in: str = opt("loss", "loss, or reward (subtracted from the reward of each sampled token; gives no gradient).")
    reference_every: int | None = opt(None, "steps after which the policy becomes the reference (null: frozen).")
    entropy_coef: float = opt(0.0, "coefficient of the entropy bonus.")
    value_coef: float = opt(0.5, "coefficient of the value loss; only for credit rules that need values.")
    value_clip: float | None = opt(0.5, "range of a value around the old one in the value loss (null: not clipped).")

    def __post_init__(self) -> None:
        _finite("algorithm", self)
        for name in ("trees", "chains", "min_scored_leaves"):
            _at_least(f"algorithm.{name}", getattr(self, name), 1)
        for name in (
            "rounds",
            "expansions",
            "clip_low",
            "clip_high",
            "kl_coef",
            "adaptive",
            "dynamic_sampling",
            "overlong_factor",
            "entropy_balance",
            "pair_min_margin",
            "value_coef",
            "value_clip",
        ):
            _at_least(f"algorithm.{name}", getattr(self, name), 0)
        for name in (
            "budget_leaves",
            "budget_tokens",
            "budget_tool_calls",
            "overlong_tokens",
            "overlong_buffer",
            "pair_max_per_parent",
            "reference_every",
        ):
            _at_least(f"algorithm.{name}", getattr(self, name), 1)
        if bool(self.rounds) != bool(self.expansions):
            raise ConfigError(
                f"algorithm.rounds={self.rounds} and algorithm.expansions={self.expansions}: "
                "set both above 0 to expand, or both to 0"
            )
        _one_of("algorithm.source", self.source, ("policy", "teacher"))
        _one_of("algorithm.shared_turns", self.shared_turns, ("per_leaf", "once"))
        _one_of("algorithm.ratio", self.ratio, LEVELS)
        _one_of("algorithm.turn_ratio", self.turn_ratio, TURN_RATIOS)
        _one_of("algorithm.ratio_gradient", self.ratio_gradient, GRADIENTS)
        _one_of("algorithm.clip", self.clip, CLIPS)
        _one_of("algorithm.kl_estimator", self.kl_estimator, ("k1", "k2", "k3", "k1+", "k2+", "k3+"))
        _one_of("algorithm.kl_in", self.kl_in, ("loss", "reward"))
        _one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        levels = self._levels()
        leaves = self.chains + self.rounds * self.expansions
        if self.kept_leaves is not None and not 1 <= self.kept_leaves <= leaves:
            raise ConfigError(f"algorithm.kept_leaves={self.kept_leaves}: a tree has {leaves} leaves")
        if self.trees * (self.kept_leaves or leaves) < self.min_scored_leaves:
            raise ConfigError(
                f"a prompt has {self.trees * (self.kept_leaves or leaves)} leaves but algorithm.min_scored_leaves="
                f"{self.min_scored_leaves}: every group would be dropped; raise trees, chains or expansions"
            )
        reason = next(chain(self._impossible_trees(), self._impossible_losses(levels)), None)
        if reason is not None:
            raise ConfigError(reason)

    def _levels(self) -> tuple[RatioLevel, ...]:
        """The ratio levels in use, once the options of the clipped ratio were checked."""
        ratio = cast("RatioLevel", self.ratio)
        try:
            bands = check_surrogate(
                ratio=ratio,
                turn_ratio=cast("TurnRatio", self.turn_ratio),
                ratio_gradient=cast("RatioGradient", self.ratio_gradient),
                clip=cast("Clip", self.clip),
                clip_low=self.clip_low,
                clip_high=self.clip_high,
                dual_clip=self.dual_clip,
                by_turns=self.by_turns,
                aggregation=cast("Aggregation", self.aggregation),
                sum_norm=self.sum_norm,
            )
        except ConfigError as error:
            raise ConfigError(f"algorithm.{error}") from None
        return (ratio, *(band.ratio for band in bands))

    def _impossible_trees(self) -> Iterator[str]:
        """Why trees cannot be grown as asked; nothing if they can."""
        leaves = self.chains + self.rounds * self.expansions
        if built_in(self.credit).startswith("tree_grpo") and (self.kept_leaves or leaves) == 1:
            yield "algorithm.credit=tree_grpo compares the leaves of a tree, but each tree has one: raise chains"
        if self.source == "teacher" and (self.rounds or self.trees * self.chains > 1 or not self.objective):
            yield (
                "algorithm.source=teacher plays each question once and has no ratio: set trees=1, chains=1, rounds=0, "
                "expansions=0 and an objective such as turntree.trainers.losses:nll"
            )
        if self.adaptive is not None and not self.rounds:
            yield "algorithm.adaptive moves expansions between prompts, but algorithm.rounds=0: there are none to move"
        if built_in(self.expansion) != "chain" and not self.rounds:
            yield (
                f"algorithm.expansion={self.expansion} is asked between rounds, but algorithm.rounds=0: set rounds and "
                "expansions above 0, or expansion=turntree.trainers.expansion:chain"
            )
        for name in ("budget_leaves", "budget_tokens", "budget_tool_calls"):
            if getattr(self, name) is not None and not self.rounds:
                yield (
                    f"algorithm.{name} ends the expansion of a tree, but algorithm.rounds=0: first chains always run, "
                    "so bound them by chains and the limits of a turn"
                )

    def _impossible_losses(self, levels: Iterable[RatioLevel]) -> Iterator[str]:
        """Why credit and objective do not go together; nothing if they do."""
        expansion, credit = (built_in(path) for path in (self.expansion, self.credit))
        for level in levels:
            why = refusal(expansion, credit, level)
            if why and not self.objective:
                yield f"expansion {expansion}, credit {credit} and ratio {level} do not go together: {why}"
        compares = self.kl_coef > 0 or (self.objective and built_in(self.objective) != "nll")
        if self.reference_every is not None and not compares:
            yield "algorithm.reference_every renews the reference model, but algorithm.kl_coef=0: there is none"
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            yield (
                f"algorithm.overlong_buffer={self.overlong_buffer} is more than algorithm.overlong_tokens="
                f"{self.overlong_tokens}; expected at most as much"
            )
        if self.kl_in == "reward" and self.kl_estimator.endswith("+"):
            yield (
                f"algorithm.kl_estimator={self.kl_estimator} with algorithm.kl_in=reward: a reward has no gradient; "
                f"use {self.kl_estimator[:-1]}"
            )
        if self.ratio_gradient == "true" and "sequence" in levels and credit in _PER_TURN:
            yield (
                f"algorithm.ratio_gradient=true with ratio=sequence, credit {credit}: the sequence has one ratio but "
                "an advantage for each turn; use straight_through or ratio=turn"
            )


@dataclass(frozen=True)
class TrainerConfig:
    """The update loop."""

    steps: int = opt(100, "rollouts (each followed by its updates).")
    max_generated_tokens: int | None = opt(None, "stop once this many tokens were sampled (null: steps decide).")
    prompts_per_step: int = opt(16, "prompts of a rollout.")
    prompts_per_update: int | None = opt(None, "prompts of a mini-batch (null: all of the rollout).")
    epochs: int = opt(1, "passes over a rollout.")
    learning_rate: float = opt(1e-6, "peak learning rate of AdamW.")
    warmup_steps: int = opt(0, "optimiser steps of linear warm-up.")
    weight_decay: float = opt(0.0, "decoupled weight decay.")
    adam_beta2: float = opt(0.999, "second-moment decay of AdamW.")
    max_grad_norm: float = opt(1.0, "gradients are clipped to this norm.")
    max_pack_tokens: int = opt(4096, "unique tokens of one forward pass.")
    max_concurrent_trees: int | None = opt(None, "trees in flight in a rollout (null: all).")
    importance_cap: float | None = opt(None, "cap of importance weights against the sampler (null: not corrected).")
    eval_every: int = opt(0, "steps between validations (0: only at the end).")
    eval_questions: int | None = opt(None, "validation questions used during training (null: all).")
    save_every: int = opt(10, "steps between checkpoints.")
    keep_checkpoints: int = opt(2, "newest checkpoints kept (the best one is kept too).")
    store_sample: float = opt(1.0, "share of groups written to the rollout store.")
    store_max_mb: int = opt(512, "size cap of the rollout store.")
    check_packed: bool = opt(True, "compare packed against one row per leaf on the first batch.")
    threads: int | None = opt(None, "torch threads (null: torch's default).")
    device: str = opt("cpu", "torch device of model and engine.")

    def __post_init__(self) -> None:
        _finite("trainer", self)
        for name in (
            "steps",
            "prompts_per_step",
            "epochs",
            "max_pack_tokens",
            "save_every",
            "keep_checkpoints",
            "store_max_mb",
        ):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("prompts_per_update", "max_concurrent_trees", "max_generated_tokens", "threads", "eval_questions"):
            _at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in ("eval_every", "warmup_steps", "weight_decay", "max_grad_norm", "learning_rate"):
            _at_least(f"trainer.{name}", getattr(self, name), 0)
        _at_least("trainer.importance_cap", self.importance_cap, 0)
        if not 0 <= self.adam_beta2 < 1:
            raise ConfigError(f"trainer.adam_beta2={self.adam_beta2}: expected 0 <= beta < 1")
        if not 0 <= self.store_sample <= 1:
            raise ConfigError(f"trainer.store_sample={self.store_sample} is not a share; expected 0..1")


@dataclass(frozen=True)
class SftConfig:
    """Cold start: supervised training on a teacher's turns."""

    steps: int = opt(400, "optimiser steps.")
    demonstrations: int = opt(1000, "questions that the teacher plays.")
    batch_size: int = opt(32, "trajectories of a step.")
    learning_rate: float = opt(3e-4, "peak learning rate of AdamW.")
    warmup_steps: int = opt(20, "optimiser steps of linear warm-up; cosine decay to a tenth afterwards.")
    weight_decay: float = opt(0.01, "decoupled weight decay.")
    adam_beta2: float = opt(0.98, "second-moment decay of AdamW.")
    max_seconds: float | None = opt(None, "stop after this many seconds of training (null: steps decide).")
    save_every: int = opt(100, "steps between checkpoints.")
    laziness: float = opt(0.5, "teacher: probability to answer early instead of making the next gold search.")
    error: float = opt(0.1, "teacher: probability that a step goes wrong.")

    def __post_init__(self) -> None:
        _finite("sft", self)
        for name in ("steps", "demonstrations", "batch_size", "save_every"):
            _at_least(f"sft.{name}", getattr(self, name), 1)
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_seconds"):
            _at_least(f"sft.{name}", getattr(self, name), 0)
        if not 0 <= self.adam_beta2 < 1:
            raise ConfigError(f"sft.adam_beta2={self.adam_beta2}: expected 0 <= beta < 1")
        for name in ("laziness", "error"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"sft.{name}={getattr(self, name)} is not a probability; expected 0..1")


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    out: str = opt("", "run folder ('' : runs/<command>-<algorithm>-seed<seed>).")
    seed: int = opt(0, "seed of everything random in the run.")
    resume: bool = opt(False, "continue the run in `out` from its newest good checkpoint.")
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    sft: SftConfig = field(default_factory=SftConfig)

    def __post_init__(self) -> None:
        objective = built_in(self.algorithm.objective)
        if objective and self.trainer.importance_cap is not None:
            raise ConfigError(
                f"trainer.importance_cap weighs the tokens of the clipped ratio, which algorithm.objective={objective} "
                "takes the place of; set importance_cap=null"
            )


def documented_options(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """``(dotted key, default, doc)`` of every option, sections in order."""
    for f in dataclasses.fields(schema):
        factory: Any = f.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from documented_options(factory, f"{prefix}{f.name}.")
        else:
            default = factory() if f.default is dataclasses.MISSING else f.default
            yield prefix + f.name, default, f.metadata["doc"]
