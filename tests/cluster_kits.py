"""What rollout workers are made of in tests: a scripted engine on a generated world, and faults on demand.

Workers import this module by its name, ``cluster_kits``; whoever uses it puts this folder on ``sys.path``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.datasets import load_questions
from turntree.envs.search_qa import SearchQACore
from turntree.errors import ConfigError
from turntree.search_backend.bm25 import BM25Backend
from turntree.trainers.cluster.wire import Ticket
from turntree.trainers.expansion import entropy
from turntree.trainers.plan import GrowthPlan, Limits, Prompt
from turntree.trainers.rollout import Rollout, grow
from turntree.trainers.store import StoredTree, encode_line
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Tree

# Ray would end workers of a machine that is short of memory for other reasons.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

PLAN = GrowthPlan(trees=3, chains=2, rounds=1, expansions=2, rule=entropy)
TOKENS = ByteTokenizer()
TURNS = (
    "<search>the river of the north</search>",
    "<search>who founded the town</search>",
    "<answer>yes</answer>",
    "<answer>北京</answer>",
    "hm",
)


def speak(context: str, seed: int) -> str:
    return TURNS[seed % len(TURNS)]


class ScriptedKit:
    """Grows PLAN's trees of a world's questions with scripted turns.

    ``fault``: the path of a file that the first worker to finish a few trees removes; what then happens its content
    says: ``kill`` (the process ends at once), ``deadly`` (it stays, and so ends every worker that comes so far),
    ``hang`` (the worker writes its node's id to ``<path>.node`` and does nothing),
    ``raise``. ``old``: it never notices new weights.
    """

    def __init__(self, world: str, fault: str = "", old: bool = False) -> None:
        self.questions = load_questions(Path(world) / "questions.jsonl")
        self.core = SearchQACore(BM25Backend.from_corpus(Path(world) / "corpus.jsonl"), tokenizer=TOKENS)
        self.scripted = (_Old if old else ScriptedEngine)(speak, TOKENS)
        self.fault = fault
        self.finished = 0

    @property
    def engine(self) -> ScriptedEngine:
        return self.scripted

    @property
    def model(self) -> torch.nn.Module | None:
        return None

    def prompts(self, count: int, *, first: int = 0) -> list[Prompt]:
        return [Prompt(f"0/{i}", self.questions[i]) for i in range(first, first + count)]

    def grow(self, ticket: Ticket, on_counted: Callable[[Tree, Tally], None]) -> Rollout:
        def counted(tree: Tree, tally: Tally) -> None:
            self.finished += 1
            if self.fault and self.finished >= 3:
                _meet(Path(self.fault))
            on_counted(tree, tally)

        return self.roll(ticket.prompts, ticket.only, counted)

    def roll(
        self,
        prompts: Sequence[Prompt],
        only: Mapping[str, Sequence[int]] | None = None,
        on_counted: Callable[[Tree, Tally], None] | None = None,
    ) -> Rollout:
        return grow(
            prompts,
            core=self.core,
            engine=self.engine,
            dialogue=Dialogue(TOKENS),
            plan=PLAN,
            sampling=SamplingParams(64, 1.0, stop=tuple(self.core.stop)),
            limits=Limits(max_turn_tokens=64, max_context_tokens=4000, max_concurrent_trees=2),
            run_seed=7,
            on_counted=on_counted,
            only=only,
        )

    def usage(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to let go of."""


class _Old(ScriptedEngine):
    def update_weights(self, version: int) -> None:
        """Weights that never arrive."""


def _meet(fault: Path) -> None:
    try:
        kind = fault.read_text(encoding="utf-8")
        if kind != "deadly":
            fault.unlink()
    except FileNotFoundError:  # another worker met it
        return
    if kind in ("kill", "deadly"):
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ConfigError("a rule broke its contract")
    import ray

    note = fault.with_suffix(".tmp")
    note.write_text(ray.get_runtime_context().get_node_id(), encoding="utf-8")
    note.rename(fault.with_suffix(".node"))
    threading.Event().wait(300)


def fingerprint(rollout: Rollout) -> str:
    """A hash of everything of all trees, in order."""
    lines = [encode_line(StoredTree(0, tree, {})) for group in rollout.groups for tree in group.trees]
    return hashlib.sha256(b"".join(lines)).hexdigest()


def wait_for(path: Path, *, seconds: float = 120.0) -> str:
    """The text of a file, once it is there."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear within {seconds} s"
        time.sleep(0.05)
    return path.read_text(encoding="utf-8")
