"""One function a topic: from the settings of verl, Search-R1, Tree-GRPO, AT2PO and AEPO to overrides."""

from __future__ import annotations

from typing import Any

from turntree.trainers.import_config.translation import Translation

__all__ = ["RULES"]

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
PER_TURN = ("search_r1", "tree_grpo")
"""Flavours whose lengths are those of one turn."""


# Trees ----------------------------------------------------------------------------------------------------------------


def samples(t: Translation) -> int:
    """Trajectories of one prompt."""
    if t.flavour == "tree_grpo" and t.flag(ROLLOUT + "tree_search"):
        return int(t.get(ROLLOUT + "ts_m", 1)) * int(t.get(ROLLOUT + "ts_k", 1))
    return max(1, int(t.get(ROLLOUT + "n", 1)) * int(t.get(ROLLOUT + "n_agent", 1)))


def trees(t: Translation) -> None:
    """How many trajectories a prompt gets, and how they branch."""
    if t.flavour == "tree_grpo" and t.flag(ROLLOUT + "tree_search"):
        _tree_grpo(t)
    elif t.flavour == "atpo":
        _atpo(t)
    elif t.flavour == "aepo":
        _aepo(t)
    else:
        _flat(t)


def _tree_grpo(t: Translation) -> None:
    t.say(ROLLOUT + "tree_search", "same", t.put(algorithm="tree_grpo"))
    m, n, rounds, kept = (int(t.get(ROLLOUT + f"ts_{letter}", 1)) for letter in "mnlk")
    t.say(ROLLOUT + "ts_m", "same", t.put(algorithm__trees=m), "M: independent trees of a prompt")
    t.say(
        ROLLOUT + "ts_n", "same", t.put(algorithm__expansions=n if rounds else 0), "N: expansions of a tree in a round"
    )
    t.say(ROLLOUT + "ts_l", "same", t.put(algorithm__rounds=rounds if n else 0), "L: rounds of expansion")
    if not (n and rounds):
        t.put(algorithm__expansion="turntree.trainers.expansion:chain")
    leaves = 1 + n * rounds
    note = f"K: leaves kept of {leaves}; here a chain that failed is never kept (AT2PO's K means expansions)"
    t.say(ROLLOUT + "ts_k", "same", t.put(algorithm__kept_leaves=min(kept, leaves)), note)
    mode = t.get(ROLLOUT + "expand_mode", "random")
    if not (n and rounds):
        t.say(ROLLOUT + "expand_mode", "handled", note="there are no rounds of expansion")
    elif mode == "random":
        note = "the root is a candidate, leaves are not, as there"
        t.say(
            ROLLOUT + "expand_mode",
            "same",
            t.put(algorithm__expansion="turntree.trainers.expansion:random_nodes"),
            note,
        )
    else:
        t.say(ROLLOUT + "expand_mode", "none", note=f"expansion {mode!r} has no counterpart; random nodes are taken")
    t.say(ROLLOUT + "n_agent", "handled", note="the trees of a prompt are counted by ts_m")
    mode = t.get(ROLLOUT + "reward_mode", "base")
    if mode == "tree_diff":
        made = t.put(algorithm__credit="turntree.trainers.credit:tree_diff_reference")
        t.say(
            ROLLOUT + "reward_mode",
            "differs",
            made,
            "there it rewrites rewards before adv_estimator, here it is the credit",
        )
    else:
        t.say(ROLLOUT + "reward_mode", "same" if mode == "base" else "none", note="base: leaves keep their reward")


def _atpo(t: Translation) -> None:
    t.put(algorithm="at2po")
    chains, rounds = int(t.get(ROLLOUT + "initial_rollouts", 1)), int(t.get(ROLLOUT + "expansion_iterations", 0))
    beam = int(t.get(ROLLOUT + "beam_size", 1))
    t.say(ROLLOUT + "initial_rollouts", "same", t.put(algorithm__chains=chains), "M: chains that start the one tree")
    t.say(ROLLOUT + "expansion_iterations", "same", t.put(algorithm__rounds=rounds), "L: rounds of expansion")
    made = t.put(algorithm__expansions=beam if rounds else 0)
    t.say(ROLLOUT + "beam_size", "same", made, "K: expansions in a round (Tree-GRPO's K means kept leaves)")
    if not rounds:
        t.put(algorithm__expansion="turntree.trainers.expansion:chain")
    leaves = chains + rounds * beam
    for key in ("samples_per_tree", "n"):
        kept = t.get(ROLLOUT + key)
        if kept is None or int(kept) == leaves:
            t.say(ROLLOUT + key, "handled", note=f"a tree has M + L K = {leaves} leaves, and all are trained")
        elif int(kept) < leaves:
            t.say(
                ROLLOUT + key, "same", t.put(algorithm__kept_leaves=int(kept)), f"of {leaves} leaves, drawn at random"
            )
        else:
            t.say(ROLLOUT + key, "differs", note=f"a tree has {leaves} leaves; none is repeated to fill the rest")
    mode = t.get(ROLLOUT + "expansion_mode", "entropy")
    if mode == "entropy":
        note = "score H - 0.05 (alternatives - 1), as there; set algorithm.expansion_args.alpha for another penalty"
        t.say(
            ROLLOUT + "expansion_mode", "same", t.put(algorithm__expansion="turntree.trainers.expansion:entropy"), note
        )
    else:
        made = t.put(algorithm__expansion="turntree.trainers.expansion:random_nodes")
        t.say(
            ROLLOUT + "expansion_mode",
            "differs",
            made,
            "there a drawn turn is sampled again, here a child grows below it",
        )
    for key in ("branch_probability", "entropy_weight"):
        t.say(ROLLOUT + key, "handled", note="the tree search there does not use it either")


def _aepo(t: Translation) -> None:
    t.put(algorithm="aepo")
    chains, total = int(t.get(ROLLOUT + "initial_rollouts", 1)), int(t.get(ROLLOUT + "n", 1))
    t.say(ROLLOUT + "initial_rollouts", "same", t.put(algorithm__chains=chains))
    made = t.put(algorithm__budget_leaves=total)
    t.say(
        ROLLOUT + "n", "same", made, "trajectories of a prompt; algorithm.rounds x expansions must be able to reach it"
    )
    names = {"beam_size": "beam_size", "branch_probability": "branch_probability", "entropy_weight": "entropy_weight"}
    for key, name in names.items():
        if t.has(ROLLOUT + key):
            t.say(ROLLOUT + key, "same", t.put(**{f"algorithm__expansion_args__{name}": t.get(ROLLOUT + key)}))
    dynamic = t.flag(ROLLOUT + "enable_dynamic_rollouts")
    if dynamic:
        made = t.put(algorithm__expansion_args__dynamic=True, algorithm__expansion_args__rollouts=total)
        t.say(ROLLOUT + "enable_dynamic_rollouts", "differs", made, "set algorithm.expansion_args.vocab_size too")
    t.say(ROLLOUT + "enable_dynamic_rollouts", "same", note="off here too")


def _flat(t: Translation) -> None:
    count = samples(t)
    for key in ("n", "n_agent"):
        if t.get(ROLLOUT + key) is not None:
            t.say(ROLLOUT + key, "same", t.put(algorithm__chains=count), "independent trajectories of a prompt")
    t.overrides.setdefault("algorithm.chains", str(count))
    if t.flavour == "tree_grpo":
        t.say(ROLLOUT + "tree_search", "same", note="off: independent chains")


# Credit ---------------------------------------------------------------------------------------------------------------

_ESTIMATORS = {
    "grpo": ("grpo", "grpo", {}),
    "grpo_vectorized": ("grpo", "grpo", {}),
    "rloo": ("rloo", "rloo", {}),
    "rloo_vectorized": ("rloo", "rloo", {}),
    "opo": ("", "opo", {}),
    "gae": ("ppo", "gae", {}),
    "reinforce_plus_plus": ("reinforce_pp", "reinforce_pp", {}),
    "reinforce_plus_plus_baseline": ("reinforce_pp_baseline", "reinforce_pp_baseline", {}),
    "tree": ("", "tree_grpo", {}),
    "tree_inner": ("", "tree_grpo", {"estimator": "intra"}),
    "tree_2norm": ("", "tree_grpo", {"estimator": "2norm"}),
}


def credit(t: Translation) -> None:
    """Which advantage the turns get."""
    key, name = "algorithm.adv_estimator", t.get("algorithm.adv_estimator", "gae")
    if t.flavour == "atpo":
        _atpo_credit(t)
        t.say(key, "handled", note="advantages come from node_adv_mode there")
        return
    found = _ESTIMATORS.get(name)
    if found is None:
        t.say(key, "none", note=f"{name!r} has no counterpart; choose algorithm.credit by hand")
        return
    preset, rule, arguments = found
    if "algorithm" not in t.overrides:
        t.put(algorithm=preset or "grpo")
    if name == "grpo" and t.get("algorithm.norm_adv_by_std_in_grpo") is False:
        rule = "dr_grpo"
        t.say("algorithm.norm_adv_by_std_in_grpo", "same", note="becomes credit dr_grpo")
    t.say("algorithm.norm_adv_by_std_in_grpo", "same", note="divided by the deviation here too")
    made = t.put(algorithm__credit=f"turntree.trainers.credit:{rule}")
    made += t.put(**{f"algorithm__credit_args__{k}": v for k, v in arguments.items()})
    note = "a group of one trajectory gets 0 here, its raw reward there (credit_args.singleton=raw)"
    if rule == "gae":
        t.put(algorithm__min_scored_leaves=1)
        t.say(key, "differs", made, "the critic is a head on the policy's own network")
        for factor in ("gamma", "lam"):
            if t.has(f"algorithm.{factor}"):
                made = t.put(**{f"algorithm__credit_args__{factor}": t.get(f"algorithm.{factor}")})
                t.say(f"algorithm.{factor}", "same", made)
    else:
        t.say(key, "differs" if rule in ("grpo", "dr_grpo", "tree_grpo") else "same", made, note)
    for factor in ("gamma", "lam"):
        t.say(f"algorithm.{factor}", "handled", note="this credit rule discounts nothing")


def _atpo_credit(t: Translation) -> None:
    mode = t.get(ROLLOUT + "node_value_mode", "child_mean")
    made = t.put(algorithm__credit="turntree.trainers.credit:at2po")
    if mode == "child_softmax":
        made += t.put(algorithm__credit_args__weights="softmax")
        t.say(ROLLOUT + "node_value_mode", "same", made, "the paper weighs children by entropy itself (weights=linear)")
    else:
        made += t.put(algorithm__credit_args__value=mode)
        t.say(ROLLOUT + "node_value_mode", "same", made)
    adv = t.get(ROLLOUT + "node_adv_mode", "vanilla")
    t.say(ROLLOUT + "node_adv_mode", "same", t.put(algorithm__credit_args__advantage=adv))
    norm = t.flag(ROLLOUT + "leaf_value_norm")
    t.say(ROLLOUT + "leaf_value_norm", "same", t.put(algorithm__credit_args__normalise_leaves=norm))


# Loss -----------------------------------------------------------------------------------------------------------------

_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
_SEQUENCE = ("gspo", "gspo_turn")


def loss(t: Translation) -> None:
    """Ratio, clips and aggregation."""
    name = _policy_loss(t)
    _clips(t, name)
    mode = t.get(ACTOR + "loss_agg_mode", "token-mean")
    key = ACTOR + "loss_agg_mode"
    if name in _SEQUENCE:
        made = t.put(algorithm__aggregation="seq-mean-token-mean")
        t.say(key, "handled", made, f"the loss {name} aggregates so, whatever is set")
    else:
        note = "over the whole mini-batch here; there means of micro-batches are averaged"
        t.say(key, "differs", t.put(algorithm__aggregation=mode), note)
    if t.has(ACTOR + "loss_scale_factor") and t.get(ACTOR + "loss_scale_factor") is not None:
        t.say(ACTOR + "loss_scale_factor", "same", t.put(algorithm__sum_norm=t.get(ACTOR + "loss_scale_factor")))
    t.say(ACTOR + "loss_scale_factor", "handled", note="null: the longest trajectory; there the padded width")
    value = t.get(ACTOR + "entropy_coeff")
    if value is not None:
        t.say(ACTOR + "entropy_coeff", "same", t.put(algorithm__entropy_coef=value))


def _policy_loss(t: Translation) -> str:
    key = next(
        (k for k in (ACTOR + "policy_loss", ACTOR + "policy_loss.loss_mode") if k in t.settings), ACTOR + "policy_loss"
    )
    name = str(t.get(key, "vanilla"))
    if t.flag(ACTOR + "enable_policy_loss_gspo"):
        name = "gspo"
    t.say(ACTOR + "enable_policy_loss_gspo", "same", note=f"the loss is {name}")
    known: dict[str, dict[str, Any]] = {
        "vanilla": {"ratio": "token"},
        "grpo": {"ratio": "token"},
        "gspo": {"ratio": "sequence", "turn_ratio": "geometric"},
        "gspo_turn": {"ratio": "turn", "turn_ratio": "geometric", "ratio_gradient": "straight_through"},
        "turn": {"ratio": "turn", "turn_ratio": "geometric", "ratio_gradient": "true"},
        "cispo": {"ratio": "token", "clip": "cispo"},
    }
    if name not in known:
        t.say(
            key,
            "none",
            t.put(algorithm__ratio="token"),
            f"loss {name!r} has no counterpart; the clipped ratio is taken",
        )
        return name
    made = t.put(**{f"algorithm__{k}": v for k, v in known[name].items()})
    if name == "gspo" and t.flavour == "tree_grpo":
        made += t.put(algorithm__ratio_gradient="true")
    t.say(key, "same", made, {"turn": "there turns from the tenth on get ratio 0"}.get(name, ""))
    return name


def _clips(t: Translation, name: str) -> None:
    plain = t.get(ACTOR + "clip_ratio", 0.2)
    sides = {side: t.get(ACTOR + f"clip_ratio_{side}") for side in ("low", "high")}
    low, high = (plain if value is None else value for value in sides.values())
    made = t.put(algorithm__clip_low=low, algorithm__clip_high=high)
    for side, value in sides.items():
        if value is not None:
            t.say(ACTOR + f"clip_ratio_{side}", "same", t.put(**{f"algorithm__clip_{side}": value}))
    both = all(value is not None for value in sides.values())
    wide = name == "gspo" and high > 0.01
    note = "low and high count" if both else "far wider than the 3e-4 and 4e-4 of the paper on GSPO" if wide else ""
    t.say(ACTOR + "clip_ratio", "handled" if both else "same", () if both else made, note)
    bound = t.get(ACTOR + "clip_ratio_c")
    exempt = (name in _SEQUENCE and not (name == "gspo" and t.flavour == "tree_grpo")) or name == "cispo"
    made = t.put(algorithm__dual_clip=None if exempt or bound is None else bound)
    t.say(
        ACTOR + "clip_ratio_c",
        "handled" if exempt else "same",
        made,
        f"the loss {name} has no dual clip" if exempt else "",
    )
    if t.flavour == "aepo":
        _aepo_loss(t)


def _aepo_loss(t: Translation) -> None:
    soft = t.flag(ACTOR + "enable_entropy_balanced_clipping")
    made = t.put(algorithm__clip="soft_upper" if soft else "hard")
    t.say(ACTOR + "enable_entropy_balanced_clipping", "same", made)
    on = t.flag(ACTOR + "enable_entropy_balanced_advantage")
    made = t.put(algorithm__entropy_balance=0.2 if on else 0)
    note = "the published code computes no entropy while entropy_coeff is 0, so that there it stays off"
    t.say(ACTOR + "enable_entropy_balanced_advantage", "differs" if on else "same", made, note if on else "")


def kl(t: Translation) -> None:
    """The KL term, in the loss or in the reward."""
    in_loss = t.flag(ACTOR + "use_kl_loss")
    in_reward = (not in_loss) if t.flavour == "search_r1" else t.flag("algorithm.use_kl_in_reward")
    coefficient = t.get(ACTOR + "kl_loss_coef", 0.001) if in_loss else t.get("algorithm.kl_ctrl.kl_coef", 0.001)
    word = str(t.get(ACTOR + "kl_loss_type", "low_var_kl") if in_loss else t.get("algorithm.kl_penalty", "kl"))
    on = in_loss or in_reward
    value = float(coefficient) if on else 0.0
    made = t.put(algorithm__kl_coef=value, algorithm__kl_in="loss" if in_loss or not on else "reward")
    plain = word.rstrip("+")
    estimator = _KL.get(plain, "k3") + ("+" if word.endswith("+") and in_loss else "")
    shape = t.put(algorithm__kl_estimator=estimator) if on else ()
    t.say(ACTOR + "use_kl_loss", "same", made[1:], "" if in_loss else "no KL term in the loss")
    t.say(
        ACTOR + "kl_loss_coef",
        "same" if in_loss else "handled",
        made[:1] if in_loss else (),
        "" if in_loss else "not used there",
    )
    t.say(
        ACTOR + "kl_loss_type",
        "same" if in_loss else "handled",
        shape if in_loss else (),
        "" if in_loss else "not used there",
    )
    t.say(
        "algorithm.use_kl_in_reward",
        "same",
        made[1:] if in_reward else (),
        "" if in_reward else "no KL term in the reward",
    )
    for key, part in (("algorithm.kl_ctrl.kl_coef", made[:1]), ("algorithm.kl_penalty", shape)):
        t.say(key, "same" if in_reward else "handled", part if in_reward else (), "" if in_reward else "not used there")
    if t.get("algorithm.kl_ctrl.type", "fixed") != "fixed":
        t.say("algorithm.kl_ctrl.type", "none", note="the coefficient stays fixed")
    t.say("algorithm.kl_ctrl.type", "same", note="fixed here too")
    for name in ("horizon", "target_kl"):
        t.say(f"algorithm.kl_ctrl.{name}", "handled", note="of an adaptive coefficient")
    if in_loss and in_reward:
        t.say("algorithm.kl_ctrl.kl_coef", "none", note="a KL term in loss and reward at once has no counterpart")


# Batches and steps ----------------------------------------------------------------------------------------------------


def batches(t: Translation) -> None:
    """Prompts of a rollout, of an update; epochs, steps, warm-up."""
    prompts = int(t.get("data.train_batch_size", 1024))
    t.say("data.train_batch_size", "same", t.put(trainer__prompts_per_step=prompts), "prompts, not trajectories")
    mini, of = int(t.get(ACTOR + "ppo_mini_batch_size", 256)), samples(t)
    fixed = t.get(ACTOR + "ppo_mini_batch_size_fixed")
    rows = int(fixed) if fixed is not None else mini if t.flavour == "search_r1" else None
    key = ACTOR + ("ppo_mini_batch_size_fixed" if fixed is not None else "ppo_mini_batch_size")
    if rows is not None:
        multiplied = int(t.get(ROLLOUT + "n", 1)) if fixed is None else 1
        update = max(1, min(prompts, round(rows * multiplied / of)))
        note = f"there it counts trajectories ({rows}, of {of} a prompt), here prompts, whole groups"
        t.say(key, "differs", t.put(trainer__prompts_per_update=update), note)
    else:
        update = min(prompts, mini)
        t.say(key, "same", t.put(trainer__prompts_per_update=update), "prompts, each with all its trajectories")
    t.say(ACTOR + "ppo_mini_batch_size", "handled", note="ppo_mini_batch_size_fixed counts")
    if t.has(ACTOR + "ppo_epochs"):
        t.say(ACTOR + "ppo_epochs", "same", t.put(trainer__epochs=t.get(ACTOR + "ppo_epochs")))
    steps = t.get("trainer.total_training_steps")
    if steps is not None:
        t.say(
            "trainer.total_training_steps", "same", t.put(trainer__steps=steps), "a step is a rollout and its updates"
        )
        t.say("trainer.total_epochs", "differs", note="steps end the run here; there the epochs may end it before")
    else:
        t.say("trainer.total_training_steps", "handled", note="null: epochs decide")
        note = f"set trainer.steps to epochs x questions / {prompts}; epochs have no counterpart"
        t.say("trainer.total_epochs", "none", note=note)
    _optimiser(t, steps, -(-prompts // update) * int(t.get(ACTOR + "ppo_epochs", 1)))
    limit = t.get(ACTOR + "ppo_max_token_len_per_gpu")
    if t.has(ACTOR + "ppo_max_token_len_per_gpu"):
        note = "tokens of one forward pass: padding-free and per GPU there, unique tokens of trees here"
        t.say(ACTOR + "ppo_max_token_len_per_gpu", "differs", t.put(trainer__max_pack_tokens=limit), note)


def _optimiser(t: Translation, steps: Any, updates: int) -> None:
    rate = ACTOR + "optim.lr"
    if t.has(rate):
        t.say(rate, "same", t.put(trainer__learning_rate=t.get(rate)))
    t.say(rate, "none", note="set trainer.learning_rate")
    share, count = t.get(ACTOR + "optim.lr_warmup_steps_ratio"), t.get(ACTOR + "optim.lr_warmup_steps", -1)
    warm = int(count) if count is not None and int(count) >= 0 else None
    key = ACTOR + ("optim.lr_warmup_steps" if warm is not None else "optim.lr_warmup_steps_ratio")
    if warm is None and share is not None:
        warm = 0 if not float(share) else None if steps is None else int(float(share) * int(steps))
    if warm is None:
        t.say(key, "none", note="a share of a number of steps that is not known: set trainer.warmup_steps")
    else:
        note = f"in updates, {updates} a step; there the rate rises once a step"
        t.say(key, "differs" if warm else "same", t.put(trainer__warmup_steps=warm * updates), note if warm else "")
    t.say(ACTOR + "optim.lr_warmup_steps", "handled", note="negative: the ratio counts")
    t.say(ACTOR + "optim.lr_warmup_steps_ratio", "handled", note="lr_warmup_steps counts")
    style = t.get(ACTOR + "optim.warmup_style") or t.get(ACTOR + "optim.lr_scheduler_type") or "constant"
    for key in (ACTOR + "optim.warmup_style", ACTOR + "optim.lr_scheduler_type"):
        constant = style in ("constant", None)
        note = "constant after the warm-up" if constant else f"{style!r} has no counterpart: constant after the warm-up"
        t.say(key, "same" if constant else "none", note=note)
    decay = t.get(ACTOR + "optim.weight_decay")
    if decay is not None:
        t.say(ACTOR + "optim.weight_decay", "same", t.put(trainer__weight_decay=decay))
    clip = t.get(ACTOR + "grad_clip")
    if clip is not None:
        t.say(ACTOR + "grad_clip", "same", t.put(trainer__max_grad_norm=clip))


RULES = (trees, credit, loss, kl, batches)
"""Translations of what the algorithm is."""
