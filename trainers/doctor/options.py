"""The configuration itself: what it names is made and tried as at the start of a run, but for weights and index."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.config import RunConfig
from turntree.trainers.doctor.check import Check

if TYPE_CHECKING:
    from turntree.agents.dialogue import Style
    from turntree.trainers.task import Split

__all__ = ["options"]


def options(config: RunConfig, *, model_ok: bool) -> Iterator[Check]:
    """Rules, tools and loggers by name; questions and corpora; tokenizer and chat template. One line for each fault.

    ``model_ok``: the model folder can be read. Nothing for a configuration without a choice of the user's.
    """
    if config == _standard():
        return
    faults: list[str] = []
    made: dict[str, Any] = {}
    for step in (_loggers, _strategy, _rules, _grammar, _reward, _scorers, _tokenizer if model_ok else None, _tasks):
        try:
            if step is not None:
                step(config, made)
        except TurnTreeError as error:
            if str(error) not in faults:
                faults.append(str(error))
        except OSError as error:
            faults.append(str(error))
    for fault in faults:
        yield Check("config", "fail", "as given", fault, "correct what it names; turntree train --help lists all")
    if not faults:
        yield Check("config", "ok", made.get("found", "no questions"), "its rules, tools and files were tried")


@functools.cache
def _standard() -> RunConfig:
    from turntree.trainers.compose import compose

    return compose()


def _loggers(config: RunConfig, made: dict[str, Any]) -> None:
    from turntree.trainers.loggers import check_packages

    check_packages(config.trainer.loggers)


def _strategy(config: RunConfig, made: dict[str, Any]) -> None:
    from turntree.trainers.distributed.setup import require_deepspeed

    if config.trainer.strategy == "deepspeed":
        require_deepspeed()


def _rules(config: RunConfig, made: dict[str, Any]) -> None:
    """Expansion, credit and loss, each tried on something tiny, and whether they go together."""
    from turntree.trainers.build import check_adapter, credit_rule, growth_plan, loss_function, pair_chooser

    check_adapter(config)
    algorithm = config.algorithm
    growth_plan(algorithm, vocab_size=1000)
    credit = credit_rule(algorithm)
    pair_chooser(algorithm, loss_function(algorithm), credit)


def _grammar(config: RunConfig, made: dict[str, Any]) -> None:
    """Grammar, prompt and tools."""
    from turntree.trainers.plugins import load_env

    load_env(config.env)


def _reward(config: RunConfig, made: dict[str, Any]) -> None:
    from turntree.trainers.plugins import load_reward

    load_reward(config.reward)


def _scorers(config: RunConfig, made: dict[str, Any]) -> None:
    """Scorers and finishers are found, not made: making one may start a model."""
    from turntree.trainers.compose import import_object

    for option in ("scorer", "finisher"):
        if path := getattr(config.reward, option):
            import_object(path, option=f"reward.{option}")


def _tokenizer(config: RunConfig, made: dict[str, Any]) -> None:
    """The tokenizer, and its chat template by the dialogues that a run renders at its start."""
    from turntree.agents.dialogue import Dialogue
    from turntree.agents.models import load_tokenizer

    made["tokenizer"] = load_tokenizer(config.model.path)
    Dialogue(made["tokenizer"], style=cast("Style", config.model.dialogue))


def _tasks(config: RunConfig, made: dict[str, Any]) -> None:
    """Questions and corpora of each split that is given; the index itself has a line of its own."""
    from turntree.agents.tokenizer import ByteTokenizer
    from turntree.trainers.build_training import check_validation
    from turntree.trainers.retrieval import check_search_args
    from turntree.trainers.task import build_task

    check_validation(config)
    check_search_args(config.search)
    counts = []
    for split in _splits(config):
        task = build_task(config, made.get("tokenizer") or ByteTokenizer(), split=split, search=_Unasked())
        counts.append(f"{len(task.questions)} {split} tasks")
    made["found"] = ", ".join(counts) or "no questions"


def _splits(config: RunConfig) -> Iterator[Split]:
    from turntree.trainers.task import QUESTION_ANSWERING

    env = config.env
    if env.id not in QUESTION_ANSWERING:
        yield "train"
        if env.dev_args:
            yield "dev"
        return
    if env.questions:
        yield "train"
    if env.dev_questions:
        yield "dev"
    if env.test_questions:
        yield "test"


class _Unasked:
    """In the place of the search backend, which another line tries."""

    fingerprint = "unasked"

    def search(self, queries: Any, *, k: int) -> Any:
        raise ConfigError("the configuration is checked without a search; the line `retriever` makes one")
