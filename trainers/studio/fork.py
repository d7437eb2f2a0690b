"""Fork here: the environment's state at a stored node, another turn, and what the environment answers.

The store holds no states. A node's state is made again by playing its path in the run's own environment: the same
prompt, the same turns, the same random streams. What the environment says on the way is compared with what was stored.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.agents.stops import find_stop
from turntree.envs.core import Finish, Pending, Step, ToolFailure, ToolResult, TurnCore
from turntree.envs.task import thaw
from turntree.envs.tools import execute
from turntree.errors import ConfigError, DataError, ToolError
from turntree.trainers.config import RunConfig
from turntree.trainers.report.reading import read_turn
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.seeds import derive_seed
from turntree.trainers.store import StoredTree
from turntree.trainers.studio.data import node_name
from turntree.trainers.studio.tokens import pieces
from turntree.trainers.tree import Node

__all__ = ["ForkDesk", "Standing", "model_at_hand"]

_KEPT_STATES = 256
_MAX_TURNS = 64
_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a fork stands: the environment's state and the tokens of the context, or how the episode ended.

    ``differs`` names the first stored node at which the environment said something else than the store does.
    """

    state: Any
    ids: tuple[int, ...]
    done: bool = False
    differs: str | None = None


def model_at_hand(folder: RunFolder, configured: str, given: Path | None = None) -> tuple[str, str]:
    """(folder, what it is) of the model that can sample: the given one, the run's final, its newest checkpoint's, ...

    Both are empty where there is none. A checkpoint is loaded into the configured model.
    """
    final = folder.path / "model"
    if given is not None:
        return str(given), "given with --model"
    if (final / "config.json").is_file():
        return str(final), "the run's final model"
    if configured and (Path(configured) / "config.json").is_file():
        trained = any(folder.checkpoints.glob("step-*")) if folder.checkpoints.is_dir() else False
        return configured, "the newest checkpoint" if trained else "the model that the run began with"
    return "", ""


class ForkDesk:
    """Plays turns from stored nodes of one run. One caller at a time; what it needs is loaded on first use."""

    def __init__(self, folder: RunFolder, *, model: Path | None = None) -> None:
        self.folder = folder
        self._given = model
        self._lock = threading.Lock()
        self._setting: _Setting | None = None
        self._engine: Any = None
        self._standings: OrderedDict[tuple[Any, ...], Standing] = OrderedDict()

    def describe(self) -> dict[str, Any]:
        """What can be done here, without loading anything: is there a model, where from."""
        configured = str(_section(self.folder.load_config(), "model").get("path") or "")
        path, what = model_at_hand(self.folder, configured, self._given)
        return {"model": path, "model_source": what}

    def play(self, stored: StoredTree, node: str, turns: Sequence[str], text: str) -> dict[str, Any]:
        """The environment's answer to ``text``, written after ``turns``, at ``node``.

        Raises:
            ConfigError: the run's environment cannot be made here.
            DataError: no such node, a node that ended, or one that cannot be replayed.
            ToolError: a tool failed; nothing was played.
        """
        if not text.strip():
            raise DataError("expected a turn to play, found an empty text")
        with self._lock:
            standing = self._stand(stored, node, turns)
            setting = self._ready()
            step, ids = setting.turn(standing, text)
            self._keep(stored, node, (*turns, text), _after(standing, step, ids))
            return _answer(step, text, standing.differs)

    def sample(self, stored: StoredTree, node: str, turns: Sequence[str], *, seed: int, temperature: float) -> Any:
        """A turn that the model at hand writes after ``turns`` at ``node``: its text, tokens and log-probs.

        It is not played: pass it to :meth:`play`. Raises as :meth:`play`, and ``ConfigError`` without a model.
        """
        if not 0.0 <= temperature <= _TEMPERATURE:
            raise DataError(f"expected a temperature from 0 to {_TEMPERATURE:g}, found {temperature}")
        with self._lock:
            standing = self._stand(stored, node, turns)
            if standing.done:
                raise DataError("the episode has ended here; fork at an earlier node")
            return self._sampler().sample(standing.ids, seed=seed, temperature=temperature)

    def prompt(self, stored: StoredTree, node: str, turns: Sequence[str]) -> dict[str, Any]:
        """Whether ``node`` can be resumed, and what a turn may look like. Raises as :meth:`play`."""
        with self._lock:
            standing = self._stand(stored, node, turns)
            setting = self._ready()
            return {
                "done": standing.done,
                "differs": standing.differs,
                "stop": list(setting.core.stop),
                "tools": sorted(setting.core.tools),
                "context": len(standing.ids),
                "limit": setting.config.sampling.max_context_tokens,
                "text": setting.core.render(standing.state),
            }

    def _ready(self) -> _Setting:
        if self._setting is None:
            self._setting = _Setting.of(self.folder, self._given)
        return self._setting

    def _sampler(self) -> _Sampler:
        if self._engine is None:
            setting = self._ready()
            path, what = model_at_hand(self.folder, setting.config.model.path, self._given)
            if not path:
                raise ConfigError(
                    "no model is at hand: the run has written none yet and its model.path is no folder here; start "
                    "with --model DIR"
                )
            self._engine = _Sampler.of(setting, self.folder, path, newest=what == "the newest checkpoint")
        found: _Sampler = self._engine
        return found

    def _stand(self, stored: StoredTree, node: str, turns: Sequence[str]) -> Standing:
        """The state after ``turns`` at ``node``, from memory or played again."""
        if len(turns) > _MAX_TURNS:
            raise DataError(f"expected at most {_MAX_TURNS} turns after a node, found {len(turns)}")
        known = self._standings.get(self._key(stored, node, turns))
        if known is not None:
            return known
        if turns:
            before = self._stand(stored, node, turns[:-1])
            step, ids = self._ready().turn(before, turns[-1])
            found = _after(before, step, ids)
        else:
            found = self._ready().replay(stored, _find(stored, node))
        self._keep(stored, node, tuple(turns), found)
        return found

    def _key(self, stored: StoredTree, node: str, turns: Sequence[str]) -> tuple[Any, ...]:
        return stored.step, stored.tree.prompt_uid, stored.tree.index, node, tuple(turns)

    def _keep(self, stored: StoredTree, node: str, turns: tuple[str, ...], standing: Standing) -> None:
        self._standings[self._key(stored, node, turns)] = standing
        while len(self._standings) > _KEPT_STATES:
            self._standings.popitem(last=False)


@dataclass(frozen=True)
class _Setting:
    """The run's environment and how its texts become tokens."""

    config: RunConfig
    core: TurnCore[Any]
    tasks: Sequence[Any]
    dialogue: Any
    tokenizer: Any

    @staticmethod
    def of(folder: RunFolder, given: Path | None) -> _Setting:
        from turntree.agents.dialogue import Dialogue
        from turntree.agents.models import load_tokenizer
        from turntree.trainers.compose import read_config
        from turntree.trainers.task import build_task

        config = read_config(folder.load_config())
        path, _ = model_at_hand(folder, config.model.path, given)
        tokenizer = load_tokenizer(path or config.model.path)
        task = build_task(config, tokenizer)
        dialogue = Dialogue(tokenizer, style=config.model.dialogue)  # type: ignore[arg-type]
        return _Setting(config, task.core, task.questions, dialogue, tokenizer)

    def replay(self, stored: StoredTree, node: Node) -> Standing:
        """Play the path to ``node`` again, with the random streams of the rollout."""
        tree, seed = stored.tree, self.config.seed
        if node.is_leaf:
            raise DataError(f"node {node_name(node.path)} ended its episode; fork at one before it")
        blocked = next((n for n in node.trajectory() if not n.branchable), None)
        if blocked is not None:
            raise DataError(
                f"node {node_name(blocked.path)} called a tool that changes the world outside the episode, so the "
                "path is not played again; fork at a node before it"
            )
        task = tree.task if tree.task is not None else self._task(tree.prompt_uid)
        state, text = self.core.initial(task, seed=derive_seed(seed, tree.prompt_uid, "env"))
        differs = None if text == tree.root.observation else "root"
        ids = list(tree.root.observation_ids)
        for turn in node.trajectory():
            if turn.depth == 1 or turn.ordinal > 0:  # where a trajectory began; later turns are always child 0
                state = self.core.reseed(state, derive_seed(seed, tree.prompt_uid, tree.index, turn.path, "env"))
            step = self._step(state, turn.text, _finish(turn))
            if step.done:
                raise DataError(
                    f"the environment made here ends the episode at node {node_name(turn.path)}, where the stored one "
                    "went on: corpus, limits or tools differ from those of the rollout"
                )
            if differs is None and step.observation != turn.observation:
                differs = node_name(turn.path)
            state = step.state
            ids += [*turn.turn_ids, *turn.observation_ids]
        return Standing(state, tuple(ids), differs=differs)

    def turn(self, standing: Standing, text: str) -> tuple[Step[Any], tuple[int, ...]]:
        """One more turn, cut at its stop string, and the tokens that it and its observation add to the context."""
        if standing.done:
            raise DataError("the episode has ended here; take turns back or fork at another node")
        match = find_stop(text, tuple(self.core.stop))
        text = text if match is None else text[: match[0]]
        step = self._step(standing.state, text, "stop")
        ids = self.dialogue.written_ids(text, tuple(self.core.stop))
        more = () if step.done else self.dialogue.observation_ids(step.observation, after=ids)
        return step, (*ids, *more)

    def _step(self, state: Any, text: str, finish: Finish) -> Step[Any]:
        outcome = self.core.act(state, text, finish=finish)
        if isinstance(outcome, Step):
            return outcome
        return self.core.resolve(state, outcome, self._results(outcome))

    def _results(self, pending: Pending[Any]) -> list[ToolResult]:
        tools = self.core.tools
        outside = [c.tool for c in pending.calls if c.tool in tools and tools[c.tool].effects == "external"]
        if outside:
            raise ToolError(f"{outside[0]} changes the world outside the episode; the studio does not call it")
        outcomes = execute(tools, pending.calls, retries=self.config.env.tool_retries)
        failure = next((o for o in outcomes if isinstance(o, ToolFailure)), None)
        if failure is not None:
            raise ToolError(f"the tool failed ({failure.kind}): {failure.message}")
        return [o for o in outcomes if isinstance(o, ToolResult)]

    def _task(self, uid: str) -> Any:
        """A task that is no question: its place in the environment's tasks is the end of the prompt's name."""
        row = uid.rpartition("/")[2]
        if not row.isdigit() or int(row) >= len(self.tasks):
            raise DataError(f"the store does not hold the task of prompt {uid!r}, and its name tells no place of one")
        return self.tasks[int(row)]


@dataclass(frozen=True)
class _Sampler:
    """A model that continues contexts."""

    engine: Any
    setting: _Setting
    source: str

    @staticmethod
    def of(setting: _Setting, folder: RunFolder, path: str, *, newest: bool) -> _Sampler:
        from turntree.agents.engines.hf import HFEngine
        from turntree.agents.models import load_model
        from turntree.trainers.checkpoint import latest_checkpoint, load_weights

        model, tokenizer = load_model(Path(path), dtype=setting.config.model.dtype)
        source = Path(path).name
        checkpoint = latest_checkpoint(folder.checkpoints) if newest else None
        if checkpoint is not None:
            load_weights(checkpoint, model)
            source = checkpoint.name
        return _Sampler(HFEngine(model, tokenizer), setting, source)

    def sample(self, ids: Sequence[int], *, seed: int, temperature: float) -> dict[str, Any]:
        from turntree.agents.engines.protocol import Prefix, Request, SamplingParams

        setting, sampling = self.setting, self.setting.config.sampling
        room = sampling.max_context_tokens - len(ids)
        if room < 1:
            raise DataError(f"the context is full: {len(ids)} of {sampling.max_context_tokens} tokens")
        stop = tuple(setting.core.stop)
        params = SamplingParams(min(sampling.max_turn_tokens, room), temperature, stop=stop)
        found = self.engine.generate([Request(Prefix(ids), params, seed)])[0]
        kept, turn = setting.dialogue.finish_turn(found, stop, max_tokens=params.max_tokens)

        def decode(some: Sequence[int]) -> str:
            text: str = setting.tokenizer.decode(list(some), skip_special_tokens=False)
            return text

        return {
            "text": turn.text,
            "finish": kept.finish_reason,
            "model": self.source,
            "ids": list(kept.ids),
            "pieces": [[count, text] for count, text in pieces(kept.ids, decode)],
            "columns": {"logprob": list(kept.logprobs), "entropy": list(kept.entropies), "value": [], "advantage": []},
        }


def _finish(node: Node) -> Finish:
    info = node.info
    return "length" if "cut_at_length" in (info.get("invalid_reason"), info.get("reason")) else "stop"


def _after(before: Standing, step: Step[Any], ids: tuple[int, ...]) -> Standing:
    return replace(before, state=step.state, ids=(*before.ids, *ids), done=step.done)


def _answer(step: Step[Any], text: str, differs: str | None) -> dict[str, Any]:
    info: dict[str, Any] = thaw(step.info)
    turn = read_turn(text, str(info.get("action", "")))
    return {
        "text": text,
        "kind": turn.kind,
        "argument": info["argument"] if isinstance(info.get("argument"), str) else turn.argument,
        "thought": turn.thought,
        "observation": step.observation,
        "reward": step.reward,
        "status": ("answered" if step.terminated else "truncated") if step.done else "open",
        "retrieved": info.get("retrieved") or [],
        "info": {k: v for k, v in info.items() if k not in ("retrieved", "argument", "action")},
        "differs": differs,
    }


def _find(stored: StoredTree, name: str) -> Node:
    for node in stored.tree.root.walk():
        if node_name(node.path) == name:
            return node
    raise DataError(f"the tree has no node {name!r}")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}
