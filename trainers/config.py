"""Every option of a run, as frozen dataclasses whose fields carry one-line docs.

Hydra composes ``configs/*.yaml`` over these schemas (:func:`turntree.trainers.compose.compose`); nothing heavy is
imported and no heavy object sits in a config. Functions are given by import path, ``package.module:name``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from turntree.envs.metrics import Normalizer
from turntree.errors import ConfigError
from turntree.trainers.agent_config import AgentConfig
from turntree.trainers.algorithm_config import AlgorithmConfig, built_in
from turntree.trainers.cluster_config import ClusterConfig
from turntree.trainers.coldstart_config import ColdStartConfig
from turntree.trainers.deepspeed_config import DeepSpeedConfig
from turntree.trainers.eval_config import EvalConfig
from turntree.trainers.loggers import check_names
from turntree.trainers.options import at_least, finite, one_of, opt
from turntree.trainers.plan import Schedule
from turntree.trainers.rltr_config import RltrConfig
from turntree.trainers.watch_config import WatchConfig

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "ClusterConfig",
    "ColdStartConfig",
    "DeepSpeedConfig",
    "EngineConfig",
    "EnvConfig",
    "EvalConfig",
    "ModelConfig",
    "OpenAIConfig",
    "RewardConfig",
    "RltrConfig",
    "RunConfig",
    "SamplingConfig",
    "SearchConfig",
    "SftConfig",
    "TrainerConfig",
    "documented_options",
]


SELECTIVE_FROM = 256
"""Hidden size from which ``trainer.activation_checkpointing=auto`` is ``selective``."""


@dataclass(frozen=True)
class ModelConfig:
    """The policy network."""

    path: str = opt("", "Hugging Face folder of the policy (weights, config, tokenizer); required.")
    dtype: str = opt("float32", "float32 or bfloat16; of weights, rollout and update.")
    dialogue: str = opt(
        "inline", "observations: inline continues the model's message; chat: user messages; tools: of role tool."
    )
    lora_rank: int = opt(0, "rank of a LoRA adapter that is trained in the place of the weights (0: no adapter).")
    lora_alpha: float | None = opt(None, "the adapter is scaled by lora_alpha / lora_rank (null: twice the rank).")
    lora_targets: str = opt("all-linear", "layers with an adapter: all-linear, or names such as 'q_proj,v_proj'.")

    def __post_init__(self) -> None:
        finite("model", self)
        at_least("model.lora_rank", self.lora_rank, 0)
        one_of("model.dtype", self.dtype, ("float32", "bfloat16"))
        one_of("model.dialogue", self.dialogue, ("inline", "chat", "tools"))


@dataclass(frozen=True)
class SearchConfig:
    """The retriever."""

    backend: str = opt(
        "bm25", "bm25, http (a server), web (a search API), or the import path of a factory (`corpus`, `args`)."
    )
    corpus: str = opt("", "corpus file that is searched ('' : the corpus beside the questions).")
    index: str = opt("", "index folder (turntree index build) that is searched instead; args: its search options.")
    top_k: int = opt(3, "passages shown for a search.")
    args: dict[str, Any] = opt(
        {}, "further arguments of the backend (bm25: k1, b, stemmer; http, web: url, timeout_s)."
    )
    store: str = opt("", "SQLite file in which what was found is kept ('' : none).")
    store_mode: str = opt("readthrough", "readthrough, record (ask anew), or replay (never ask; a miss is an error).")
    store_fingerprint: str = opt("", "replay of a server or the web: whose answers, where the store has several.")

    def __post_init__(self) -> None:
        at_least("search.top_k", self.top_k, 1)
        one_of("search.store_mode", self.store_mode, ("readthrough", "record", "replay"))
        if not self.store and (self.store_mode != "readthrough" or self.store_fingerprint):
            raise ConfigError("search.store_mode and search.store_fingerprint say how search.store is used; set it too")


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
    language: str = opt("en", "en or zh: of what the grammar says (prompt, results, corrections), and of made worlds.")
    normalizer: str = opt("", "how answers are compared: squad, unicode, zh, cmrc ('' : by the questions' language).")
    tools: dict[str, Any] = opt({}, "further tools: name -> import path of a class or factory, or {path, args}.")
    tool_retries: int = opt(2, "retries of a failed tool call before the leaf counts as failed.")

    def __post_init__(self) -> None:
        at_least("env.max_turns", self.max_turns, 1)
        one_of("env.on_length", self.on_length, ("correct", "end"))
        one_of("env.language", self.language, ("en", "zh"))
        one_of("env.normalizer", self.normalizer, ("", *get_args(Normalizer)))
        at_least("env.max_observation_tokens", self.max_observation_tokens, 8)
        at_least("env.tool_retries", self.tool_retries, 0)


@dataclass(frozen=True)
class RewardConfig:
    """What a finished trajectory is worth."""

    name: str = opt("em", "em, f1, tree_grpo (graded), atpo (-1/0/EM), or the import path of a reward function.")
    args: dict[str, Any] = opt({}, "its arguments (tree_grpo: structure, final, retrieval, metric).")
    scorer: str = opt("", "import path of a batched scorer that replaces the env's reward ('' : none).")
    scorer_args: dict[str, Any] = opt({}, "its arguments; a class or factory is called with them.")
    finisher: str = opt("", "import path of a finisher, which writes the answers before they are scored ('' : none).")
    finisher_args: dict[str, Any] = opt({}, "its arguments; a class or factory is called with them.")
    in_evaluation: bool = opt(True, "validation and evaluation run the scorer too; its parts join their results.")


@dataclass(frozen=True)
class SamplingConfig:
    """How turns are sampled; all limits are in tokens."""

    temperature: float = opt(1.0, "sampling temperature of rollouts; log-probs are taken at it too.")
    max_turn_tokens: int = opt(128, "tokens of one turn.")
    max_context_tokens: int = opt(2048, "tokens of prompt and trajectory together; a full context ends the episode.")
    eval_temperature: float = opt(0.0, "temperature of evaluation (0: greedy).")

    def __post_init__(self) -> None:
        finite("sampling", self)
        if not self.temperature > 0:
            raise ConfigError(
                f"sampling.temperature={self.temperature}: rollouts must sample (> 0); greedy siblings would be equal"
            )
        at_least("sampling.eval_temperature", self.eval_temperature, 0)
        at_least("sampling.max_turn_tokens", self.max_turn_tokens, 1)
        at_least("sampling.max_context_tokens", self.max_context_tokens, 2)


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
    sleep: bool = opt(
        False, "vllm on GPU: leaves its memory to the trainer between rollouts (weights go to CPU memory)."
    )
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
        finite("engine", self)
        one_of("engine.name", self.name, ("hf", "vllm", "vllm_server", "openai", "auto"))
        one_of("engine.sync", self.sync, ("folder", "nccl", "ipc"))
        if self.sleep and self.name not in ("vllm", "auto"):
            raise ConfigError(f"engine.sleep=true is for engine=vllm, found engine={self.name}; leave engine.sleep out")
        for name in ("max_batch_rows", "max_concurrent_requests", "block_size", "kv_cache_gb"):
            at_least(f"engine.{name}", getattr(self, name), 1)
        for name in ("max_cached_tokens", "entropy_topk", "retries"):
            at_least(f"engine.{name}", getattr(self, name), 0)
        if self.timeout_s <= 0:
            raise ConfigError(f"engine.timeout_s={self.timeout_s}: expected seconds above 0, in all for one request")
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

        one_of("openai.protocol", self.protocol, ("chat", "completions"))
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "protocol"}
        try:
            Endpoint("http://localhost", "any", **own)
        except ConfigError as error:
            message = str(error)
            raise ConfigError(message if message.startswith("openai.") else f"openai.{message}") from None


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
    max_skipped_updates: int | None = opt(
        5, "stop after so many updates in a row whose gradient is not finite, and save the batch (null: go on)."
    )
    max_pack_tokens: int = opt(4096, "unique tokens of one forward pass.")
    activation_checkpointing: str = opt(
        "auto",
        "what of a layer is computed again in the backward pass: none, selective (all but matrix products and "
        "attention), full (or true; everything), or auto (selective for hidden sizes of 256 and more).",
    )
    max_concurrent_trees: int | None = opt(None, "trees in flight in a rollout (null: all).")
    schedule: str = opt("auto", "whether searches run while the engine generates: fixed, overlap, or auto.")
    importance_cap: float | None = opt(None, "cap of importance weights against the sampler (null: not corrected).")
    eval_every: int = opt(0, "steps between validations (0: only at the end).")
    eval_questions: int | None = opt(None, "validation questions used during training (null: all).")
    save_every: int = opt(10, "steps between checkpoints.")
    keep_checkpoints: int = opt(2, "newest checkpoints kept (the best one is kept too).")
    store_sample: float = opt(1.0, "share of groups written to the rollout store.")
    store_max_mb: int = opt(512, "size cap of the rollout store.")
    loggers: list[str] = opt(
        ["tensorboard"],
        "trackers beside metrics.jsonl: tensorboard, wandb, csv, mlflow, trackio, or an import path ([] : none).",
    )
    logger_args: dict[str, Any] = opt({}, "their arguments by logger, such as {wandb: {project: mine, mode: online}}.")
    check_packed: bool = opt(True, "compare packed against one row per leaf on the first batch.")
    threads: int | None = opt(None, "torch threads (null: torch's default).")
    device: str = opt("cpu", "torch device of model and engine.")
    strategy: str = opt("single", "single (one process), or deepspeed (ZeRO, see deepspeed.*, on one rank or many).")
    ranks: int | None = opt(
        None, "deepspeed: processes that train and sft start on this machine (null: one, or those of torchrun)."
    )

    def __post_init__(self) -> None:
        finite("trainer", self)
        one_of("trainer.strategy", self.strategy, ("single", "deepspeed"))
        at_least("trainer.ranks", self.ranks, 1)
        if self.ranks is not None and self.strategy != "deepspeed":
            raise ConfigError(f"trainer.ranks={self.ranks} needs trainer.strategy=deepspeed, found {self.strategy}")
        for name in (
            "steps",
            "prompts_per_step",
            "epochs",
            "max_pack_tokens",
            "save_every",
            "keep_checkpoints",
            "store_max_mb",
        ):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        for name in (
            "prompts_per_update",
            "max_concurrent_trees",
            "max_generated_tokens",
            "max_skipped_updates",
            "threads",
            "eval_questions",
        ):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        one_of("trainer.schedule", self.schedule, get_args(Schedule))
        # true and false are what the option was before it had names.
        how = str(self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", {"true": "full", "false": "none"}.get(how.lower(), how))
        allowed = ("auto", "none", "selective", "full")
        one_of("trainer.activation_checkpointing", self.activation_checkpointing, allowed)
        check_names(self.loggers, self.logger_args)
        for name in ("eval_every", "warmup_steps", "weight_decay", "max_grad_norm", "learning_rate"):
            at_least(f"trainer.{name}", getattr(self, name), 0)
        at_least("trainer.importance_cap", self.importance_cap, 0)
        if not 0 <= self.adam_beta2 < 1:
            raise ConfigError(f"trainer.adam_beta2={self.adam_beta2}: expected 0 <= beta < 1")
        if not 0 <= self.store_sample <= 1:
            raise ConfigError(f"trainer.store_sample={self.store_sample} is not a share; expected 0..1")


@dataclass(frozen=True)
class SftConfig:
    """Cold start: supervised training on a teacher's turns."""

    data: str = opt(
        "", "kept.jsonl of turntree coldstart, or its folder ('' : trajectories of coldstart.* are played)."
    )
    unfit: str = opt("error", "a trajectory that the student cannot learn from: error, or drop (and count) it.")
    steps: int = opt(400, "optimiser steps.")
    demonstrations: int = opt(1000, "questions that the teacher plays.")
    batch_size: int = opt(32, "trajectories of a step.")
    learning_rate: float = opt(3e-4, "peak learning rate of AdamW.")
    warmup_steps: int = opt(20, "optimiser steps of linear warm-up; cosine decay to a tenth afterwards.")
    weight_decay: float = opt(0.01, "decoupled weight decay.")
    adam_beta2: float = opt(0.98, "second-moment decay of AdamW.")
    max_seconds: float | None = opt(None, "stop after this many seconds of training (null: steps decide).")
    save_every: int = opt(100, "steps between checkpoints.")
    max_skipped_updates: int | None = opt(
        5, "stop after so many steps in a row whose gradient is not finite, and save the batch (null: go on)."
    )
    laziness: float = opt(0.5, "teacher: probability to answer early instead of making the next gold search.")
    error: float = opt(0.1, "teacher: probability that a step goes wrong.")

    def __post_init__(self) -> None:
        finite("sft", self)
        one_of("sft.unfit", self.unfit, ("error", "drop"))
        for name in ("steps", "demonstrations", "batch_size", "save_every", "max_skipped_updates"):
            at_least(f"sft.{name}", getattr(self, name), 1)
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_seconds"):
            at_least(f"sft.{name}", getattr(self, name), 0)
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
    agent: AgentConfig = field(default_factory=AgentConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    coldstart: ColdStartConfig = field(default_factory=ColdStartConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rltr: RltrConfig = field(default_factory=RltrConfig)

    def __post_init__(self) -> None:
        self._check_cluster()
        if self.agent.splits and self.reward.finisher:
            raise ConfigError(
                f"reward.finisher={self.reward.finisher} writes the answers, and so does the summariser of "
                "agent=planner_summarizer; name it in agent.summarizer, or use agent=react"
            )
        objective = built_in(self.algorithm.objective)
        if objective and self.trainer.importance_cap is not None:
            raise ConfigError(
                f"trainer.importance_cap weighs the tokens of the clipped ratio, which algorithm.objective={objective} "
                "takes the place of; set importance_cap=null"
            )

    def _check_cluster(self) -> None:
        if self.cluster.name == "local":
            return
        refused = {
            "algorithm.adaptive moves budgets between all trees of a rollout, which no worker sees": (
                self.algorithm.adaptive is not None
            ),
            "algorithm.source=teacher grows no trees": self.algorithm.source == "teacher",
            "engine=openai cannot take the trainer's weights": self.engine.name == "openai",
            "every worker would send its weights to the one server of engine=vllm_server; use engine=vllm": (
                self.engine.name == "vllm_server"
            ),
            f"engine.sync={self.engine.sync} needs trainer and engine in one process; use engine.sync=folder": (
                self.engine.name in ("vllm", "auto") and self.engine.sync != "folder"
            ),
            "engine.sleep frees memory for a trainer in the same process; leave it out": self.engine.sleep,
        }
        for reason, found in refused.items():
            if found:
                raise ConfigError(f"cluster={self.cluster.name}: {reason}")


def documented_options(schema: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """``(dotted key, default, doc)`` of every option, sections in order."""
    for f in dataclasses.fields(schema):
        factory: Any = f.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            yield from documented_options(factory, f"{prefix}{f.name}.")
        else:
            default = factory() if f.default is dataclasses.MISSING else f.default
            yield prefix + f.name, default, f.metadata["doc"]
