"""One function a topic, continued: lengths and turns, search, reward, engine, data, the run itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.trainers.import_config.rules import ACTOR, PER_TURN, ROLLOUT
from turntree.trainers.import_config.translation import Translation

__all__ = ["SURROUNDINGS"]


def lengths(t: Translation) -> None:
    """Tokens of prompt, turn, observation and context; turns of an episode."""
    prompt, response = t.get("data.max_prompt_length"), t.get("data.max_response_length")
    whole = int(prompt) + int(response) if prompt is not None and response is not None else 0
    if t.flavour in PER_TURN:
        made = t.put(sampling__max_turn_tokens=response) if response is not None else ()
        t.say("data.max_response_length", "same", made, "of one turn, as there")
        made = t.put(sampling__max_context_tokens=whole) if whole else ()
        note = "a full context ends the episode; there the oldest tokens of the rolling context are dropped"
        t.say("data.max_prompt_length", "differs", made, note)
    else:
        made = t.put(sampling__max_turn_tokens=response) if response is not None else ()
        note = (
            "there one limit for all turns and tool results together; here of a turn, and the context bounds the rest"
        )
        t.say("data.max_response_length", "differs", made, note)
        made = t.put(sampling__max_context_tokens=whole) if whole else ()
        t.say("data.max_prompt_length", "differs", made, "the context holds prompt and response together")
    if t.has("data.max_obs_length"):
        made = t.put(env__max_observation_tokens=t.get("data.max_obs_length"))
        t.say("data.max_obs_length", "differs", made, "documents are cut inside the tags; there the closing tag may go")
    limit = ROLLOUT + "multi_turn.max_tool_response_length"
    t.say(limit, "none", note="counts characters; set env.max_observation_tokens")
    _turns(t)


def _turns(t: Translation) -> None:
    if t.flavour in PER_TURN:
        turns = t.get("max_turns")
        if turns is not None:
            made = t.put(env__max_turns=int(turns) + 1)
            t.say("max_turns", "same", made, "turns that may search, and there one more that may not")
        return
    turns = t.get(ROLLOUT + "multi_turn.max_assistant_turns", t.get(ROLLOUT + "multi_turn.max_turns"))
    calls = t.get(ROLLOUT + "tools.call_limit")
    if turns is not None:
        for key in ("max_assistant_turns", "max_turns"):
            note = "the last turn cannot search here"
            t.say(ROLLOUT + f"multi_turn.{key}", "differs", t.put(env__max_turns=turns), note)
    if calls is not None:
        made = t.put(env__max_searches=calls) + (t.put(env__max_turns=int(calls) + 1) if turns is None else ())
        t.say(ROLLOUT + "tools.call_limit", "differs", made, "calls of an episode; then one more turn to answer")
    for key in ("max_assistant_turns", "max_turns", "max_user_turns"):
        t.say(ROLLOUT + f"multi_turn.{key}", "handled", note="null: the length limits decide; set env.max_turns")


def protocol(t: Translation) -> None:
    """How searches and answers are written."""
    if t.flavour in ("atpo", "aepo"):
        t.put(env__grammar="turntree.envs.grammar:AtpoGrammar")
        return
    key = ROLLOUT + "multi_turn.format"
    if t.flavour == "verl" and any(k.startswith(ROLLOUT + "multi_turn.") for k in t.settings):
        made = t.put(env__grammar="turntree.envs.grammar:HermesGrammar", model__dialogue="tools")
        t.say(key, "differs", made, "calls as JSON in <tool_call>; compare the prompts")
    for name in ("actor_rollout_ref.actor.state_masking", "do_search"):
        if t.get(name) is False:
            why = (
                "only sampled tokens are ever trained"
                if "masking" in name
                else "for answers without search set env.max_turns=1"
            )
            t.say(name, "none", note=f"false has no counterpart: {why}")
        t.say(name, "same", note="always so")


def search(t: Translation) -> None:
    """Where searches go."""
    if t.has("retriever.url"):
        made = t.put(search__backend="http", search__args__url=t.get("retriever.url"))
        t.say("retriever.url", "same", made, "the server's own protocol (Search-R1)")
    if t.has("retriever.topk"):
        t.say("retriever.topk", "same", t.put(search__top_k=t.get("retriever.topk")))
    tool = ROLLOUT + "tools.tool_instances.search.params."
    if t.has(tool + "max_results"):
        t.say(tool + "max_results", "same", t.put(search__top_k=t.get(tool + "max_results")))
    for name in ("cache_file", "api_key", "zone", "location"):
        t.say(tool + name, "none", note="of its own search service; see search.backend=web and search.store")
    if t.has(ROLLOUT + "tools.retry_count"):
        t.say(ROLLOUT + "tools.retry_count", "same", t.put(env__tool_retries=t.get(ROLLOUT + "tools.retry_count")))


def reward(t: Translation) -> None:
    """What a trajectory is worth."""
    path, name = str(t.get("custom_reward_function.path") or ""), t.get("custom_reward_function.name")
    shaped = [
        key
        for key in ("structure_format_score", "final_format_score", "retrieval_score")
        if f"reward_model.{key}" in t.settings
    ]
    if shaped or "format" in t.program:
        t.put(reward="tree_grpo")
        targets = {"structure_format_score": "structure", "final_format_score": "final", "retrieval_score": "retrieval"}
        for key, target in targets.items():
            value = t.get(f"reward_model.{key}", 0)
            made = t.put(**{f"reward__args__{target}": value})
            t.say(f"reward_model.{key}", "same", made, "read from the model's own turns only")
    elif t.flavour in ("atpo", "aepo") and ("deep_research" in path or not path):
        made = t.put(reward="atpo")
        t.say("custom_reward_function.path", "same", made, "-1 for a bad format, 0, or exact match")
        t.say("custom_reward_function.name", "same")
    elif path:
        t.say(
            "custom_reward_function.path",
            "none",
            note=f"set reward.name to the import path of {name or 'the function'}",
        )
    else:
        made = t.put(reward="em")
        note = "verl chooses a reward for each row by its data_source; set reward.name for another one than exact match"
        t.imply("the reward of a data_source", made, note if t.flavour == "verl" else "exact match, as there")
    if t.flavour in ("atpo", "aepo"):
        t.say(
            "custom_reward_function.path",
            "differs",
            t.put(reward="atpo"),
            "taken for the reward of deep_research_em.py",
        )
    t.say("custom_reward_function.path", "handled", note="null: exact match of the answer")
    t.say("custom_reward_function.name", "handled", note="the function's name; see its path")
    manager = t.get("reward_model.reward_manager", "naive")
    t.say(
        "reward_model.reward_manager",
        "same" if manager == "naive" else "none",
        note=f"{manager}: one reward a trajectory",
    )
    if t.flag("reward_model.enable"):
        t.say("reward_model.enable", "none", note="a reward model has no counterpart; see reward.scorer")
    t.say("reward_model.enable", "same", note="no reward model")


def shaping(t: Translation) -> None:
    """DAPO's additions: dynamic sampling and the overlong penalty."""
    groups = "algorithm.filter_groups."
    on = t.flag(groups + "enable")
    if on:
        tries = t.get(groups + "max_num_gen_batches", 1) or 1
        made = t.put(algorithm__dynamic_sampling=tries)
        t.say(groups + "enable", "same", made, "groups of equal rewards are dropped")
        t.say(groups + "max_num_gen_batches", "differs", made, "0 means no bound there; here a bound is needed")
        t.say(groups + "metric", "differs", note="the whole reward is compared, penalties included")
    for name in ("enable", "metric", "max_num_gen_batches"):
        t.say(groups + name, "handled", note="dynamic sampling is off")
    for prefix in ("reward_model.overlong_buffer.", "reward_model.reward_kwargs.overlong_buffer_cfg."):
        if t.flag(prefix + "enable"):
            limit = t.get("data.max_response_length", 0)
            made = t.put(algorithm__overlong_tokens=limit, algorithm__overlong_buffer=t.get(prefix + "len", 1))
            made += t.put(algorithm__overlong_factor=t.get(prefix + "penalty_factor", 1.0))
            t.say(
                prefix + "enable",
                "differs",
                made,
                "sampled tokens count here, tool results too there; never more than the factor",
            )
            t.say(prefix + "len", "same", made[1:2])
            t.say(prefix + "penalty_factor", "same", made[2:])
        for name in ("enable", "len", "penalty_factor", "log"):
            t.say(prefix + name, "handled", note="the overlong penalty is off")


def engine(t: Translation) -> None:
    """The engine and how it samples."""
    name = t.get(ROLLOUT + "name", "vllm")
    made = t.put(engine="hf" if name == "hf" else "vllm")
    note = "" if name in ("hf", "vllm") else f"{name} has no counterpart: vllm is taken"
    t.say(ROLLOUT + "name", "differs" if note else "same", made, note)
    simple = {
        "gpu_memory_utilization": "engine__gpu_memory_utilization",
        "enforce_eager": "engine__enforce_eager",
        "tensor_model_parallel_size": "engine__args__tensor_parallel_size",
        "max_model_len": "engine__args__max_model_len",
        "temperature": "sampling__temperature",
        "val_kwargs.temperature": "sampling__eval_temperature",
    }
    for key, target in simple.items():
        if (
            t.has(ROLLOUT + key)
            and t.get(ROLLOUT + key) is not None
            and (name != "hf" or target.startswith("sampling"))
        ):
            t.say(ROLLOUT + key, "same", t.put(**{target: t.get(ROLLOUT + key)}))
        t.say(ROLLOUT + key, "handled", note="null, or of an engine that is not used")
    for key, off in (
        ("top_p", (1, 1.0)),
        ("top_k", (-1, 0)),
        ("val_kwargs.top_p", (1, 1.0)),
        ("val_kwargs.top_k", (-1, 0)),
    ):
        value = t.get(ROLLOUT + key)
        if value is None or value in off:
            t.say(
                ROLLOUT + key,
                "same" if ROLLOUT + key in t.settings else "handled",
                note="off here too" if key in t.settings else "",
            )
        else:
            t.say(ROLLOUT + key, "none", note="sampling is never cut: log-probs would be of another distribution")
    t.say(ROLLOUT + "do_sample", "handled", note="rollouts sample, evaluation is greedy at temperature 0")
    t.say(ROLLOUT + "val_kwargs.do_sample", "handled", note="evaluation is greedy at temperature 0")
    t.say(ROLLOUT + "val_kwargs.n", "handled", note="one trajectory a validation question")
    t.say(
        ROLLOUT + "dtype", "differs", t.put(model__dtype="bfloat16"), "weights, rollout and update have one type here"
    )
    if "correction" in " ".join(t.settings):
        correction = "algorithm.rollout_correction."
        level = t.get(correction + "rollout_is")
        if level == "token":
            made = t.put(trainer__importance_cap=t.get(correction + "rollout_is_threshold", 2.0))
            t.say(correction + "rollout_is", "same", made)
            t.say(correction + "rollout_is_threshold", "same", made)
        elif level is not None:
            t.say(correction + "rollout_is", "none", note=f"weights of a {level} have no counterpart")
        for key in [k for k in t.settings if k.startswith(correction)]:
            t.say(key, "handled", note="the mismatch with the engine is not corrected")


def data(t: Translation) -> None:
    """Model and questions."""
    targets = {
        "actor_rollout_ref.model.path": "model__path",
        "data.train_files": "env__questions",
        "data.val_files": "env__dev_questions",
    }
    for key, target in targets.items():
        value: Any = t.get(key)
        if isinstance(value, list):
            made = t.put(**{target: value[0]}) if value else ()
            note = "one file here: join several beforehand" if len(value) > 1 else ""
            t.say(key, "differs" if note else "same", made, note)
        elif value is not None:
            note = "a folder on this machine" if "model" in key else ""
            path = str(Path(value).expanduser()) if str(value).startswith("~/") else value
            t.say(key, "same", t.put(**{target: path}), note)
    for key in ("data.seed", ACTOR + "data_loader_seed"):
        if t.has(key) and t.get(key) is not None:
            t.say(key, "differs", t.put(seed=t.get(key)), "the seed of everything random, other draws than there")
        t.say(key, "handled", note="null")


def run(t: Translation) -> None:
    """Checkpoints, validation, the run folder."""
    for key, target, never in (
        ("save_freq", "trainer__save_every", 1_000_000),
        ("test_freq", "trainer__eval_every", 0),
    ):
        value = t.get(f"trainer.{key}")
        if value is not None and int(value) > 0:
            t.say(f"trainer.{key}", "same", t.put(**{target: int(value)}))
        elif value is not None:
            t.say(f"trainer.{key}", "differs", t.put(**{target: never}), "at the end only")
    kept = t.get("trainer.max_actor_ckpt_to_keep")
    if kept is not None:
        t.say(
            "trainer.max_actor_ckpt_to_keep",
            "differs",
            t.put(trainer__keep_checkpoints=kept),
            "the best one is kept too",
        )
    for name in ("actor", "critic"):
        t.say(
            f"trainer.max_{name}_ckpt_to_keep",
            "handled",
            note="null keeps all there; here trainer.keep_checkpoints are kept",
        )
    if t.has("trainer.default_local_dir"):
        t.say("trainer.default_local_dir", "same", t.put(out=t.get("trainer.default_local_dir")), "the run folder")
    t.say("trainer.default_local_dir", "none", note="set out to the run folder")
    device = t.get("trainer.device", "cuda")
    t.say("trainer.device", "same", t.put(trainer__device=device))


def processes(t: Translation) -> None:
    """How many processes train, and what they keep in memory."""
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if t.has(checkpointing):
        made = t.put(trainer__activation_checkpointing="full" if t.flag(checkpointing) else "none")
        t.say(checkpointing, "same", made)
    machines, devices = t.get("trainer.nnodes", 1), t.get("trainer.n_gpus_per_node", 1)
    if not isinstance(machines, int) or not isinstance(devices, int):
        return
    if machines * devices > 1:
        made = t.put(trainer__strategy="deepspeed")
        if machines == 1:
            made += t.put(trainer__ranks=devices)
        start = "" if machines == 1 else f"; start {machines} x {devices} processes with torchrun"
        note = f"ZeRO stage 2 (deepspeed.stage) takes the place of FSDP; every rank has an engine{start}"
        t.say("trainer.n_gpus_per_node", "differs", made, note)
        t.say("trainer.nnodes", "handled" if machines == 1 else "differs", note="see trainer.n_gpus_per_node")
    t.say("trainer.n_gpus_per_node", "same", note="one process")
    t.say("trainer.nnodes", "same", note="one machine")


SURROUNDINGS = (lengths, protocol, search, reward, shaping, engine, data, run, processes)
"""Translations of what surrounds the algorithm."""
