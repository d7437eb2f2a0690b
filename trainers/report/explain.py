"""The arithmetic of a credit rule on stored trees."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import turntree.trainers.credit as credit_rules
from turntree.envs.loading import check_arguments, reject_unknown, resolve
from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.credit import CreditRule, credit_needs, explain
from turntree.trainers.report.selection import interest, step_trees, tree_at
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import StoredTree, group_trees
from turntree.trainers.tree import Group

__all__ = ["built_in_rules", "explain_stored", "explain_trees"]


def explain_stored(
    path: Path, *, credit: str | None, arguments: Mapping[str, Any], step: int | None, index: int | None
) -> str:
    """What ``turntree explain`` prints: formula and numbers of a rule on all stored trees of one prompt and step.

    Args:
        path: a run folder, or one file of its rollout store.
        credit: name of a built-in rule or an import path; None for the run's own rule with its arguments.
        arguments: of the rule; they go before those of the run.
        step: training step, the newest one by default.
        index: one of the prompt's stored trees as ``turntree view --list`` counts them; by default of the prompt whose
            rewards differ and that has the most scored leaves.

    Raises:
        ConfigError: the rule is unknown or does not take the arguments.
        DataError: there are no such trees.
    """
    return explain_trees(step_trees(path, step), path, credit=credit, arguments=arguments, index=index)


def explain_trees(
    trees: Sequence[StoredTree], path: Path, *, credit: str | None, arguments: Mapping[str, Any], index: int | None
) -> str:
    """As :func:`explain_stored`, for trees of one step that were read already. Values that were stored are used."""
    groups = group_trees(trees)
    if index is None:
        group = max(groups, key=lambda g: interest(g.scored_leaves()))
    else:
        uid = tree_at(trees, index).tree.prompt_uid
        group = next(g for g in groups if g.uid == uid)
    name, own = (credit, {}) if credit is not None else _configured(path)
    rule = resolve(name, built_in_rules(), what="--credit")
    signals = _signals(rule, group, trees)
    return f"{_heading(group, trees[0].step)}\n{_explained(group, rule, {**signals, **own, **arguments}, name)}"


def _signals(rule: CreditRule, group: Group, trees: Sequence[StoredTree]) -> dict[str, Any]:
    """The stored values of every sampled token of the group, if the rule wants values and all are there."""
    stored = {node: np.array(row) for item in trees for node, row in item.tokens.get("value", {}).items()}
    needed = [node for leaf in group.scored_leaves() for node in leaf.trajectory()]
    if "values" not in credit_needs(rule) or not all(node in stored for node in needed):
        return {}
    others = [node for tree in group.trees for node in tree.nodes() if node not in stored]
    return {"values": stored | {node: np.zeros(len(node.turn_ids)) for node in others}}


def built_in_rules() -> dict[str, CreditRule]:
    """The credit rules of turntree by name."""
    found = {name: getattr(credit_rules, name) for name in credit_rules.__all__}
    return {name: rule for name, rule in found.items() if inspect.isfunction(rule) and _is_rule(rule)}


def _is_rule(function: Callable[..., Any]) -> bool:
    signature = inspect.signature(function)
    return next(iter(signature.parameters), None) == "groups" and signature.return_annotation == "Advantages"


def _configured(path: Path) -> tuple[str, dict[str, Any]]:
    """Import path and arguments of the rule that the run trained with."""
    run = RunFolder(path if path.is_dir() else path.resolve().parent.parent)
    if not run.exists:
        raise ConfigError(f"{path} lies in no run folder, so nothing tells its credit rule; name one with --credit")
    algorithm = run.load_config().get("algorithm")
    if not isinstance(algorithm, dict) or not isinstance(algorithm.get("credit"), str):
        raise ConfigError(
            f"{run.path / 'config.yaml'}: expected the credit rule of a training run under algorithm.credit, found "
            "none (imported trees come without one); name a rule with --credit"
        )
    return algorithm["credit"], dict(algorithm.get("credit_args") or {})


def _heading(group: Group, step: int) -> str:
    task = group.trees[0].task
    question = f": {task.question}" if task is not None else ""
    return f"step {step}, prompt {group.uid}, {len(group.trees)} trees{question}"


def _explained(group: Group, rule: CreditRule, arguments: Mapping[str, Any], name: str) -> str:
    what = f"--credit={name}"
    _check_names(rule, arguments, what)
    check_arguments(rule, arguments, what=what)
    try:
        return explain(group, rule, **arguments)
    except TurnTreeError:
        raise
    except Exception as error:  # a rule of the user's may fail in any way
        given = f" with {dict(arguments)}" if arguments else ""
        raise ConfigError(f"{what}{given} failed: {type(error).__name__}: {error}") from error


def _check_names(rule: CreditRule, arguments: Mapping[str, Any], what: str) -> None:
    """Unknown arguments with a did-you-mean, unless the rule takes any."""
    parameters = list(inspect.signature(rule).parameters.values())[1:]
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        reject_unknown(arguments, [p.name for p in parameters], what=f"argument of {what}")
