"""Rules that a user names are tried on something tiny before a run: a bad one is refused before anything is sampled."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from turntree.envs.core import Action
from turntree.envs.grammar import Grammar, Observation, ParsedTurn, TurnRecord, Validity
from turntree.envs.rewards import Outcome, evaluate_reward
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, TurnTreeError
from turntree.search_backend.passage import Passage, SearchBackend
from turntree.trainers.credit import Advantages, CreditRule, credit_needs
from turntree.trainers.expansion import ExpansionRule, ask_rule
from turntree.trainers.losses import Denominators, Occurrences, Pairs, PolicyLoss
from turntree.trainers.objectives import LossFunction, PairLossFunction, loss_needs
from turntree.trainers.tree import Group, Node, Tree

__all__ = [
    "probe_backend",
    "probe_credit",
    "probe_expansion",
    "probe_grammar",
    "probe_loss",
    "probe_reward",
    "require_function",
    "require_rule",
]

Loss: TypeAlias = "LossFunction | PairLossFunction"

_QUESTION = Question("probe", "Who wrote Hamlet?", ("Shakespeare",))
_GRAMMAR_METHODS = ("prompt", "parse", "results", "correction", "last_turn_notice", "validity")


def require_rule(found: Any, *, option: str) -> Any:
    """``found`` if it can be called and is not of Python's own library. Raises ``ConfigError``."""
    if not callable(found):
        raise ConfigError(f"{option}: expected something that can be called, found {found!r:.100}")
    own = (getattr(found, "__module__", None) or "").partition(".")[0] in sys.stdlib_module_names
    if own and (inspect.isroutine(found) or inspect.isclass(found)):
        raise ConfigError(f"{option}: expected a rule of yours or of turntree, found {found!r} of Python's library")
    return found


def require_function(found: Any, *, option: str) -> Any:
    """A rule that takes one batch and is too dear to be tried: a function or an instance, not a class."""
    require_rule(found, option=option)
    if inspect.isclass(found):
        raise ConfigError(f"{option}: expected a function or an instance, found the class {found.__qualname__}")
    try:
        inspect.signature(found).bind([])
    except TypeError as error:
        raise ConfigError(f"{option}: expected a function of one batch of finished trajectories: {error}") from None
    except ValueError:  # compiled functions may have no signature
        return found
    return found


@contextmanager
def _trying(option: str, must: str = "") -> Iterator[None]:
    """Errors inside become a ``ConfigError`` that names ``option`` and says what it ``must`` do."""
    try:
        yield
    except Exception as error:  # rules of a user's own may fail in any way
        name = "" if isinstance(error, TurnTreeError) else f"{type(error).__name__}: "
        cure = f"; it must {must}" if must else ""
        raise ConfigError(f"{option} failed when it was tried: {name}{error}{cure}") from error


def probe_reward(rule: Callable[[Outcome], float], *, option: str) -> None:
    """Judge right, wrong and missing answers, well and badly formed. Raises ``ConfigError``."""
    for answer in ("Shakespeare", "Goethe", None):
        for valid in (True, False):
            outcome = Outcome(
                answer,
                _QUESTION.golden_answers,
                format_valid=valid,
                format_reason="" if valid else "incomplete:start",
                observations=("Hamlet is a tragedy by Shakespeare.",),
                tools_used=frozenset({"search"}),
                turns=2,
                stop_reason="turns" if answer is None else "answer",
            )
            with _trying(option, must="give a finite number for every Outcome, also of wrong and missing answers"):
                evaluate_reward(rule, outcome)


def probe_backend(backend: Any, *, option: str) -> SearchBackend:
    """Check the shape of a search backend, without a search. Raises ``ConfigError``."""
    missing = [name for name in ("search", "fingerprint") if not hasattr(backend, name)]
    if missing:
        raise ConfigError(
            f"{option}: expected an object with search(queries, k=...) and fingerprint, found {backend!r:.100} without "
            f"{', '.join(missing)}"
        )
    with _trying(option, must="have a method search(queries, *, k)"):
        inspect.signature(backend.search).bind([], k=1)
    found: SearchBackend = backend
    return found


def probe_grammar(grammar: Any, *, option: str) -> Grammar:
    """Write a prompt and observations, read and judge one turn. Raises ``ConfigError``."""
    missing = [name for name in ("fingerprint", "stop", *_GRAMMAR_METHODS) if not hasattr(grammar, name)]
    if missing:
        raise ConfigError(f"{option}: expected a turn grammar, found {grammar!r:.100} without {', '.join(missing)}")
    with _trying(option, must="read and write any turn without raising"):
        parsed = grammar.parse("hello")
        made: dict[str, tuple[Any, type | tuple[type, ...]]] = {
            "fingerprint": (grammar.fingerprint, str),
            "stop": (grammar.stop, (tuple, list)),
            "prompt()": (grammar.prompt(_QUESTION.question), str),
            "parse()": (parsed, ParsedTurn),
            "parse().action": (getattr(parsed, "action", None), Action),
            "results()": (grammar.results([Passage("d1", "Hamlet", "A tragedy.")]), Observation),
            "correction()": (grammar.correction("no_action"), str),
            "last_turn_notice()": (grammar.last_turn_notice(), str),
            "validity()": (grammar.validity([TurnRecord("hello", Action("invalid", "no_action"))]), Validity),
        }
    for name, (value, expected) in made.items():
        if not isinstance(value, expected):
            kinds = expected if isinstance(expected, tuple) else (expected,)
            words = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{option}: expected {words} from {name}, found {value!r:.100}")
    found: Grammar = grammar
    return found


def probe_credit(rule: CreditRule, *, option: str) -> None:
    """Give credit for no group, and for one of two trees with two scored leaves each. Raises ``ConfigError``."""
    group = Group("probe", [_tree(0), _tree(1)])
    turns = {n: np.zeros(len(n.turn_ids)) for tree in group.trees for n in tree.nodes()}
    with _trying(option):
        signals: dict[str, Any] = dict.fromkeys(credit_needs(rule), turns)
    for groups in ((), (group,)):
        with _trying(option):
            found: Any = rule(groups, **signals)
        if not isinstance(found, Advantages):
            raise ConfigError(f"{option}: expected Advantages, found {found!r:.100}")
        lengths = [len(leaves) for leaves in found.values]
        if lengths != [len(g.scored_leaves()) for g in groups]:
            raise ConfigError(f"{option}: expected one row for each scored leaf of each group, found {lengths}")


def probe_expansion(rule: ExpansionRule, *, option: str) -> None:
    """Ask for two places in a small finished tree. Raises ``ConfigError``."""
    with _trying(option):
        ask_rule(rule, _tree(0), 2, np.random.default_rng(0))


def probe_loss(loss: Loss, *, option: str) -> None:
    """The loss of two trajectories of two tokens each, or of one pair of turns. Raises ``ConfigError``."""
    column = torch.tensor([-0.5, -1.0, -0.2, -0.8])
    leaf = torch.tensor([0, 0, 1, 1])
    occurrences = Occurrences(
        logp=column.clone().requires_grad_(),
        old_logp=column,
        advantage=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        weight=torch.ones(4),
        leaf=leaf,
        turn=leaf,
        n_leaves=2,
        n_turns=2,
        ref_logp=column,
        sampler_logp=column,
        entropy=torch.ones(4),
        importance=torch.ones(4),
    )
    denominators = Denominators(weight=4.0, rows=2.0, width=2.0, turns=2.0, pairs=1.0)
    with _trying(option), torch.enable_grad():
        if loss_needs(loss) == "pairs":
            one = column[:1]
            found: Any = cast("PairLossFunction", loss)(
                Pairs(one.clone().requires_grad_(), one, one, one, one + 1), denominators
            )
        else:
            found = cast("LossFunction", loss)(occurrences, denominators)
    if not isinstance(found, PolicyLoss) or not isinstance(found.loss, torch.Tensor) or found.loss.ndim:
        raise ConfigError(f"{option}: expected a PolicyLoss with a scalar loss, found {found!r:.100}")


def _tree(index: int) -> Tree:
    """A search, then a right and a wrong answer, with the infos of the question-answering task."""
    root = Node(observation_ids=(1, 2), observation=_QUESTION.question, text="")
    turn = {"turns": 1, "searches": 1, "overrun": False, "other_dialect": False}
    retrieved = ({"id": "d1", "title": "Hamlet"},)
    search = Node(
        turn_ids=(3, 4),
        logprobs=(-0.5, -1.0),
        entropies=(0.5, 1.0),
        observation_ids=(5,),
        entropy=0.75,
        text="<search>Hamlet</search>",
        action="search",
        observation="Hamlet is a tragedy.",
        info=FrozenDict({**turn, "action": "search", "retrieved": retrieved, "observation_truncated": False}),
    )
    root.add_child(search)
    for ordinal, (answer, right) in enumerate((("Shakespeare", 1.0), ("Goethe", 0.0))):
        ended = {"stop_reason": "answer", "answer": answer, "em": right, "f1": right, "format_valid": True}
        leaf = Node(
            ordinal=ordinal,
            turn_ids=(6, 7),
            logprobs=(-0.2, -0.8),
            entropies=(0.2, 0.8),
            entropy=0.5,
            text=f"<answer>{answer}</answer>",
            action="answer",
            status="answered",
            reward=right,
            step_reward=right,
            info=FrozenDict({**turn, "turns": 2, "action": "answer", "format_reason": "", **ended}),
        )
        search.add_child(leaf)
    return Tree(root, "probe", index, _QUESTION, rounds=0)
