"""Settings of peers that need no translation, or have none; and what their configuration files set by default."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

__all__ = ["DEFAULTS", "Flavour", "counterpart"]

Flavour = Literal["verl", "search_r1", "tree_grpo", "atpo", "aepo"]
"""Whose settings: verl and scripts made for it, Search-R1, Tree-GRPO, AT2PO (repository ATPO), AEPO and ARPO."""

_MEMORY = "how memory and time are spent: packs of trainer.max_pack_tokens take its place"
_PARALLEL = (
    "ranks share the data, a model lies on one device (see trainer.strategy and deepspeed.*); has no counterpart"
)
_LOGS = "metrics.jsonl is always written; see trainer.loggers for TensorBoard, W&B and others"

# The first pattern that fits counts. True: needs no counterpart here; False: has none.
_PATTERNS: tuple[tuple[str, bool, str], ...] = (
    ("*.fsdp_config.*", True, _MEMORY),
    ("*micro_batch_size*", True, _MEMORY),
    ("*.use_dynamic_bsz", True, _MEMORY),
    ("*.log_prob_max_token_len_per_gpu", True, _MEMORY),
    ("*.forward_max_token_len_per_gpu", True, _MEMORY),
    ("*.log_prob_use_dynamic_bsz", True, _MEMORY),
    ("*.use_remove_padding", True, "there is no padding: trees are packed"),
    ("*.use_torch_compile", True, _MEMORY),
    ("*.use_fused_kernels", True, _MEMORY),
    ("*.use_liger", True, _MEMORY),
    ("*.ulysses_sequence_parallel_size", False, _PARALLEL),
    ("*.strategy", False, _PARALLEL),
    ("trainer.n_gpus_per_node", False, "see trainer.strategy=deepspeed and trainer.ranks"),
    ("trainer.nnodes", False, "see trainer.strategy=deepspeed; torchrun starts processes on several machines"),
    ("trainer.balance_batch", False, _PARALLEL),
    ("trainer.ray_wait_register_center_timeout", False, _PARALLEL),
    ("ray_*", False, _PARALLEL),
    ("actor_rollout_ref.hybrid_engine", True, "engine and trainer always share a machine"),
    ("*.enable_gradient_checkpointing", True, "see trainer.activation_checkpointing, which is for all networks"),
    ("*.enable_activation_offload", False, "activations are kept; has no counterpart"),
    ("*.lora_*", False, "see model.lora_rank and model.lora_alpha"),
    ("*.target_modules", False, "see model.lora_targets"),
    ("trainer.logger", True, _LOGS),
    ("trainer.project_name", False, _LOGS),
    ("trainer.experiment_name", False, _LOGS),
    ("trainer.log_val_generations", False, _LOGS),
    ("trainer.rollout_data_dir", True, "the rollout store keeps trees in the run folder (trainer.store_sample)"),
    ("trainer.validation_data_dir", False, "validation answers are not stored; has no counterpart"),
    ("trainer.default_hdfs_dir", False, "runs are folders; has no counterpart"),
    ("trainer.resume_*", True, "resume=true goes on from the newest good checkpoint in out"),
    ("trainer.val_before_train", True, "validation runs before the first update where there are questions for it"),
    ("trainer.val_only", False, "use turntree evaluate for it"),
    ("trainer.critic_warmup", False, "the value head learns from the first update on; has no counterpart"),
    ("critic.optim.*", False, "the value head shares the policy's network and optimiser; has no counterpart"),
    ("critic.*", False, "the value head shares the policy's network; has no counterpart"),
    ("data.shuffle*", True, "training questions are always shuffled, by seed"),
    ("data.prompt_key", True, "question files are read by content"),
    ("data.reward_fn_key", True, "one reward a run, see reward.name"),
    ("data.return_*", True, "needed by verl's own data loader"),
    ("data.truncation", True, "nothing is cut: a prompt that is too long is an error"),
    ("data.filter_overlong_prompts*", False, "a prompt that is too long is an error; has no counterpart"),
    ("data.val_batch_size", True, "all validation questions are played; the order does not matter"),
    ("data.tokenizer", True, "the model's own is used"),
    ("data.max_start_length", False, "a prompt is never cut; it must fit sampling.max_context_tokens"),
    ("data.gen_batch_size", False, "dynamic sampling draws trainer.prompts_per_step prompts at a time"),
    ("*_data_num", False, "take fewer rows by cutting the file; has no counterpart"),
    ("*_max_samples", False, "take fewer rows by cutting the file; has no counterpart"),
    ("*.trust_remote_code", False, "code of a model folder is never run; has no counterpart"),
    ("actor_rollout_ref.rollout.*num_batched_tokens", True, "the engine's own default; engine.args takes it"),
    ("actor_rollout_ref.rollout.max_num_seqs", True, "the engine's own default; engine.args takes it"),
    ("actor_rollout_ref.rollout.disable_log_stats", True, "the engine says nothing"),
    ("actor_rollout_ref.rollout.enable_chunked_prefill", True, "the engine's own default; engine.args takes it"),
    ("actor_rollout_ref.rollout.free_cache_engine", True, "the engine keeps its memory between rollouts"),
    ("actor_rollout_ref.rollout.ignore_eos", False, "a turn ends at its end token; has no counterpart"),
    ("actor_rollout_ref.rollout.load_format", True, "weights reach the engine through engine.sync"),
    ("actor_rollout_ref.rollout.mode", True, "rollouts are always driven turn by turn"),
    ("actor_rollout_ref.rollout.multi_turn.enable", True, "every environment has turns"),
    ("actor_rollout_ref.rollout.multi_turn.tool_config_path", False, "tools are given by env.tools; read that file"),
    ("actor_rollout_ref.rollout.tools.tool_instances.*", False, "a tool's own setting; see env.tools and search.args"),
    ("actor_rollout_ref.rollout.tools.max_workers", True, "searches of all episodes are batched"),
    ("actor_rollout_ref.rollout.tools.verbose_logging", True, _LOGS),
    ("actor_rollout_ref.rollout.tools.fail_on_error", True, "a tool that cannot be loaded is always an error"),
    ("actor_rollout_ref.actor.shuffle", True, "the order of mini-batches is drawn by seed"),
    ("actor_rollout_ref.actor.checkpoint.*", True, "checkpoints hold weights, optimiser and state"),
    ("actor_rollout_ref.actor.optim.*", False, "the learning rate stays constant after its warm-up"),
    ("algorithm.no_think_rl", False, "every sampled token is trained; has no counterpart"),
    ("algorithm.state_masking.*", True, "masks come from who wrote a token, not from markers"),
    ("config-path", True, "where the script's own defaults lie: pass that file with --base"),
    ("config-name", True, "the script's own defaults: pass that file with --base"),
    ("config-dir", True, "where the script's own defaults lie: pass that file with --base"),
    ("hydra.*", False, "has no counterpart; out names the run folder"),
    ("*._target_", True, "a class of verl's own"),
    ("*profiler*", False, _LOGS),
    ("*.prometheus.*", False, _LOGS),
    ("*.trace.*", False, _LOGS),
    ("*.use_shm", True, "files are read where they lie"),
    ("*.rollout_n", True, "of a prompt, see rollout.n"),
    ("*.mtp*", False, "tokens are predicted one at a time; has no counterpart"),
    ("*.tiled_mlp.*", True, _MEMORY),
    ("*.fused_kernel_options.*", True, _MEMORY),
    ("*.router_replay.*", False, "mixtures of experts; has no counterpart"),
    ("*entropy_from_logits_with_chunking", True, _MEMORY),
    ("*entropy_checkpointing", True, _MEMORY),
    ("*sum_pi_squared*", True, "of an estimator that is not used"),
    ("*.calculate_entropy", True, "entropies are computed where a rule needs them"),
    ("*.calculate_log_probs", True, "the sampler's log-probs are always kept"),
    ("*.use_prefix_grouper", True, "shared prefixes are packed once"),
    ("*.external_lib", False, "has no counterpart; grammars, tools and rewards are import paths"),
    ("*.policy_loss.*", True, "of a loss that is not used"),
    ("*data_parallel_size", False, _PARALLEL),
    ("*expert_parallel_size", False, _PARALLEL),
    ("*pipeline_model_parallel_size", False, _PARALLEL),
    ("*.nccl_timeout", False, _PARALLEL),
    ("actor_rollout_ref.rollout.agent.*", True, "rollouts are always driven turn by turn"),
    ("actor_rollout_ref.rollout.checkpoint_engine.*", True, "weights reach the engine through engine.sync"),
    ("actor_rollout_ref.rollout.layered_summon", True, "weights reach the engine through engine.sync"),
    ("actor_rollout_ref.rollout.skip_*", True, "every rollout is played"),
    ("actor_rollout_ref.rollout.quantization*", False, "the engine has the trainer's weights; has no counterpart"),
    ("actor_rollout_ref.rollout.enable_prefix_caching", True, "always on: branches share their prefix"),
    ("actor_rollout_ref.rollout.logprobs_mode", True, "log-probs are taken at the sampling temperature"),
    ("actor_rollout_ref.rollout.prompt_length", True, "see data.max_prompt_length"),
    ("actor_rollout_ref.rollout.response_length", True, "see data.max_response_length"),
    ("data.image_*", False, "texts only; has no counterpart"),
    ("data.video_*", False, "texts only; has no counterpart"),
    ("data.custom_cls.*", False, "question files are read by content; has no counterpart"),
    ("data.sampler.*", False, "questions are drawn in shuffled epochs; has no counterpart"),
    ("data.datagen.*", False, "has no counterpart"),
    ("data.dataloader_num_workers", True, "question files are read at once"),
    ("data.validation_shuffle", True, "the order does not matter"),
    ("data.tool_config_path", False, "tools are given by env.tools; read that file"),
    ("reward_manager.*", False, "one reward a run: reward.name, or reward.scorer"),
    ("reward_model.*", False, "a reward model has no counterpart; see reward.scorer"),
    ("algorithm.use_pf_ppo", False, "has no counterpart"),
    ("algorithm.pf_ppo.*", False, "has no counterpart"),
    ("trainer.del_local_ckpt_after_load", True, "see trainer.keep_checkpoints"),
)


def counterpart(key: str) -> tuple[bool, str] | None:
    """Whether a setting needs no counterpart (else it has none), and why; None for a setting that is not known."""
    return next(((fine, why) for pattern, fine, why in _PATTERNS if fnmatchcase(key, pattern)), None)


_OLD = {
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.kl_coef": "0.001",
    "algorithm.kl_penalty": "kl",
    "actor_rollout_ref.actor.clip_ratio": "0.2",
    "actor_rollout_ref.actor.entropy_coeff": "0.001",
    "actor_rollout_ref.actor.use_kl_loss": "false",
    "actor_rollout_ref.actor.kl_loss_coef": "0.001",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "256",
    "actor_rollout_ref.actor.optim.weight_decay": "0.01",
    "actor_rollout_ref.rollout.top_p": "0.95",
    "data.train_batch_size": "1024",
}
_NEW = _OLD | {
    "actor_rollout_ref.actor.clip_ratio_c": "3.0",
    "actor_rollout_ref.actor.entropy_coeff": "0",
    "actor_rollout_ref.rollout.top_p": "1",
}
DEFAULTS: Mapping[Flavour, Mapping[str, str]] = {
    "search_r1": _OLD | {"max_turns": "10"},
    "tree_grpo": _OLD | {"actor_rollout_ref.actor.clip_ratio_c": "3.0", "max_turns": "10"},
    "verl": _NEW,
    "atpo": _NEW | {"actor_rollout_ref.rollout.tools.call_limit": "6"},
    "aepo": _NEW | {"actor_rollout_ref.rollout.tools.call_limit": "6"},
}
"""What the peers' own configuration files say where a script says nothing, as far as it changes the training."""
