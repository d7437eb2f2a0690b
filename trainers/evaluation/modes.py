"""The ways in which the questions of a set are played: once, sampled, as trees, without tools."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turntree.agents.scorer import Finished, Scorer
from turntree.errors import ConfigError
from turntree.trainers.agent_config import AgentConfig
from turntree.trainers.algorithm_config import AlgorithmConfig
from turntree.trainers.build import growth_plan
from turntree.trainers.compose import import_object
from turntree.trainers.config import RewardConfig, RunConfig
from turntree.trainers.evaluate import read_rows, write_rows
from turntree.trainers.evaluation.journal import Journal, read_journal
from turntree.trainers.evaluation.play import Played, Players, Valuer, play
from turntree.trainers.evaluation.rows import ANSWERS, EvalRow, file_rows
from turntree.trainers.rollout import GrowthPlan
from turntree.trainers.task import SEARCH_QA

__all__ = ["Folder", "blind", "closed_book", "honest_scorer", "plan_facts", "play_saved", "sample_plan", "tree_plan"]


@dataclass(frozen=True, slots=True)
class Folder:
    """Where a set's results lie, and whether what is there counts (``resume``)."""

    path: Path
    resume: bool = False


def play_saved(
    name: str,
    questions: Sequence[Any],
    players: Players,
    folder: Folder,
    *,
    facts: Mapping[str, Any],
    saved: bool,
    plan: GrowthPlan | None = None,
    batch: int = 64,
    valuer: Valuer | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    keep_partial: bool = False,
) -> Played:
    """Play into ``<name>.jsonl``; the journal ``<name>.partial.jsonl`` holds what was played until then, and stays.

    ``saved``: the rows in the file were made as ``facts`` say. Questions with a failed trajectory are played again.
    """
    file, journal_file = folder.path / f"{name}.jsonl", folder.path / f"{name}.partial.jsonl"
    done: dict[str, tuple[EvalRow, ...]] = {}
    if folder.resume:
        if saved and file.is_file():
            done = _read(file) if plan is not None else {key: (row,) for key, row in read_rows(file).items()}
        done |= read_journal(journal_file, facts)
        done = {key: rows for key, rows in done.items() if not any(row.failed for row in rows)}
    journal = Journal(journal_file, facts, list(done.values()))

    def write(count: int, rows: Sequence[Sequence[EvalRow]]) -> None:
        journal.write(rows)
        report(count, len(questions))

    with closing(journal):
        played = play(
            questions,
            players,
            plan=plan,
            batch=batch,
            valuer=valuer,
            done=done,
            on_rows=write,
            keep_partial=keep_partial,
        )
    write_rows(file, [row for rows in played.rows for row in rows])
    return played


def drop_journal(folder: Path, name: str) -> None:
    """Delete a journal, once the folder's document says how the rows of ``<name>.jsonl`` were made."""
    (folder / f"{name}.partial.jsonl").unlink(missing_ok=True)


def sample_plan(config: RunConfig) -> GrowthPlan:
    """So many independent trajectories of each question."""
    return GrowthPlan(chains=config.eval.drawn)


def tree_plan(config: RunConfig, vocab_size: int | None) -> GrowthPlan:
    """The tree of a question under the budget of ``eval.tree_leaves`` and ``eval.tree_tokens``.

    Raises ``ConfigError`` for a rule that reads rewards where nothing but the gold answers could give them.
    """
    options = config.eval
    rule = import_object(options.tree_rule, option="eval.tree_rule")
    if getattr(rule, "__module__", "").endswith("expansion.outcomes") and not config.reward.scorer:
        raise ConfigError(
            f"eval.tree_rule={options.tree_rule} grows by rewards, which at test time only a scorer can give: set "
            "reward.scorer, or choose another rule (entropy, random_nodes)"
        )
    algorithm = AlgorithmConfig(
        trees=1,
        chains=options.tree_chains,
        rounds=math.ceil((options.tree_leaves - options.tree_chains) / options.tree_expansions),
        expansions=options.tree_expansions,
        expansion=options.tree_rule,
        expansion_args=dict(options.tree_rule_args),
        budget_leaves=options.tree_leaves,
        budget_tokens=options.tree_tokens,
    )
    return growth_plan(algorithm, vocab_size=vocab_size)


def blind(finished: Sequence[Finished]) -> list[float]:
    """The scorer of trees without another one: the environment's reward knows the gold answers."""
    return [0.0 for _ in finished]


def honest_scorer(config: RunConfig, judge: Scorer | None, metric: str) -> Scorer | None:
    """What may judge the leaves of a growing tree: the configured scorer, or nothing that knows gold answers.

    Of a task without gold answers (another ``metric``) it is the judge of the task.
    """
    if metric not in ANSWERS or (config.reward.scorer and judge is not None):
        return judge
    return blind


def closed_book(config: RunConfig) -> RunConfig:
    """The same questions, model and limits; one turn, no tools, no planner."""
    env = config.env
    args = {key: value for key, value in env.args.items() if key != "python"}
    alone = replace(
        env, id=SEARCH_QA, args=args, max_turns=1, max_searches=None, tools={}, prompt=config.eval.closed_book_prompt
    )
    reward: RewardConfig = replace(config.reward, scorer="", scorer_args={}, finisher="", finisher_args={})
    return replace(config, env=alone, agent=AgentConfig(), reward=reward)


def plan_facts(plan: GrowthPlan, config: RunConfig) -> dict[str, Any]:
    """What a plan adds to the facts of a result."""
    shape = {key: getattr(plan, key) for key in ("trees", "chains", "rounds", "expansions")}
    budget = asdict(plan.budget) if plan.budget is not None else None
    rule = {"rule": config.eval.tree_rule, "rule_args": dict(config.eval.tree_rule_args)} if plan.rounds else {}
    return {"plan": {**shape, "budget": budget, **rule}}


def _read(path: Path) -> dict[str, tuple[EvalRow, ...]]:
    """Rows of a file with several a question."""
    found: dict[str, list[EvalRow]] = {}
    for row in file_rows(path):
        found.setdefault(row.id, []).append(row)
    return {key: tuple(rows) for key, rows in found.items()}
