"""Many episodes in step, with one batch of tool calls for all of them.

``gymnasium.make_vec("turntree/SearchQA-v0", num_envs=8)`` makes one of these. Gymnasium's own vector environments run
turn environments too (``vectorization_mode="sync"`` or ``"async"``), with one search for every environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from turntree.envs.core import Finish, Pending, Step, ToolFailure, ToolResult
from turntree.envs.search_qa import SearchQAEnv
from turntree.envs.snapshot import Snapshot
from turntree.envs.tools import CallCounter, execute
from turntree.envs.turn_env import TurnEnv
from turntree.errors import ConfigError, ToolError

__all__ = ["TurnVectorEnv", "make_search_qa", "stack_infos", "vectorized"]

S = TypeVar("S")

_Texts = tuple[str, ...]
_Outcome = ToolResult | ToolFailure


class TurnVectorEnv(VectorEnv[_Texts, Sequence[str | None], NDArray[Any]], Generic[S]):
    """``num_envs`` episodes over the core and tasks of ``env``; observations and actions are tuples of texts.

    A step reads every turn, executes all tool calls in one batch (equal searches once), then finishes every turn.
    ``calls`` counts them. By default an episode that ended stays so until it is reset (``AutoresetMode.DISABLED``: what
    was reset by itself could not be branched from); the other modes of Gymnasium are ``autoreset_mode``.
    """

    def __init__(
        self, env: TurnEnv[S], num_envs: int = 1, *, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED
    ) -> None:
        if num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, found {num_envs}")
        self.num_envs = num_envs
        self.envs: list[TurnEnv[S]] = [env.sibling() for _ in range(num_envs)]
        self.calls = CallCounter()
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**env.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = env.render_mode
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        self.observation_space = batch_space(env.observation_space, num_envs)
        self.action_space = batch_space(env.action_space, num_envs)
        self._observations = [""] * num_envs
        self._terminations = np.zeros(num_envs, dtype=np.bool_)
        self._truncations = np.zeros(num_envs, dtype=np.bool_)
        self._tried: dict[int, tuple[Pending[S], list[_Outcome]]] = {}

    # -- Gymnasium -------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Texts, dict[str, Any]]:
        """Start episodes.

        ``seed``: one for each environment, or the first of consecutive ones. ``options``: those of ``TurnEnv.reset``,
        for all; or ``per_env``, a list with the options (or None) of each; ``reset_mask``, an array of bools, says
        which environments to reset (the others keep their episode). Raises ``ConfigError`` for anything else.
        """
        options = dict(options or {})
        mask = self._mask(options.pop("reset_mask", None))
        each = self._each(options)
        seeds = self._seeds(seed)
        infos = [self._reset(i, seeds[i], each[i]) if mask[i] else None for i in range(self.num_envs)]
        return tuple(self._observations), stack_infos(infos)

    def step(
        self, actions: Sequence[str | None], *, finish: Sequence[Finish] | None = None
    ) -> tuple[_Texts, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Play one turn of every environment; None instead of a text leaves an environment as it is (reward 0).

        ``finish`` as in ``TurnEnv.step``, one for each. Raises ``ResetNeeded`` for a turn of an episode that is over
        or was not reset, and ``ToolError``, which names the environments, when calls failed past their retries. All
        environments are then as before; when the same turns are sent again, only the calls that failed are made again.
        """
        turns = self._turns(actions, finish)
        steps = self._resolve({i: self._begin(i, text, how) for i, (text, how) in turns.items()})
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        infos: list[dict[str, Any] | None] = [None] * self.num_envs
        for i in range(self.num_envs):
            if i in steps:
                rewards[i], infos[i] = self._end(i, steps[i])
            elif actions[i] is not None:
                infos[i] = self._reset(i, None, None)
        flags = self._terminations.copy(), self._truncations.copy()
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            infos = [self._renew(i, info) if i in steps else info for i, info in enumerate(infos)]
        return tuple(self._observations), rewards, *flags, stack_infos(infos)

    def render(self) -> tuple[Any, ...]:
        """What each environment renders."""
        return tuple(env.render() for env in self.envs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The method or attribute ``name`` of each environment, as Gymnasium's own vector environments have it."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(value(*args, **kwargs) if callable(value) else value for value in found)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """The attribute ``name`` of each environment."""
        return self.call(name)

    # -- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self, index: int) -> Snapshot:
        """The state of one environment; see ``TurnEnv.snapshot``."""
        return self.envs[index].snapshot()

    def snapshots(self) -> tuple[Snapshot, ...]:
        """The states of all environments."""
        return tuple(env.snapshot() for env in self.envs)

    def restore(self, index: int, snapshot: Snapshot, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Continue one environment from a snapshot, whichever environment it was taken from.

        Several at once: ``reset(options={"per_env": [{"snapshot": s}, ...]})``.
        """
        info = self._reset(index, seed, {"snapshot": snapshot})
        return self._observations[index], info

    # -- inside ----------------------------------------------------------------------------------------------

    def _reset(self, i: int, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        self._observations[i], info = self.envs[i].reset(seed=seed, options=options)
        # Only a snapshot can bring an episode that is over; it does not say how it ended.
        self._terminations[i], self._truncations[i] = self.envs[i].done, False
        self._tried.pop(i, None)
        return info

    def _turns(self, actions: Sequence[str | None], finish: Sequence[Finish] | None) -> dict[int, tuple[str, Finish]]:
        """The turns to play, by environment."""
        stop: Finish = "stop"
        ends: list[Finish] = [stop] * self.num_envs if finish is None else list(finish)
        for name, values in (("actions", actions), ("finish", ends)):
            if isinstance(values, str) or len(values) != self.num_envs:
                raise ConfigError(
                    f"{name}: expected one for each of {self.num_envs} environments, found {values!r:.200}"
                )
        turns: dict[int, tuple[str, Finish]] = {
            i: (text, ends[i]) for i, text in enumerate(actions) if text is not None
        }
        over = [i for i in turns if self.envs[i].done]
        if over and self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise ResetNeeded(
                f"the episodes of environments {over} are over; reset them (options={{'reset_mask': ...}}), restore a "
                "snapshot, or give None as their action"
            )
        for i in over:
            del turns[i]
        return turns

    def _begin(self, i: int, text: str, finish: Finish) -> Step[S] | Pending[S]:
        return self.envs[i].begin(text, finish=finish)

    def _resolve(self, begun: Mapping[int, Step[S] | Pending[S]]) -> dict[int, Step[S]]:
        """The steps of all turns, after one batch of the calls of those that wait."""
        waiting = {i: turn for i, turn in begun.items() if isinstance(turn, Pending)}
        outcomes = self._execute(waiting)
        failed = {i: f for i in waiting for f in outcomes[i] if isinstance(f, ToolFailure)}
        if failed:
            index, last = next(iter(failed.items()))
            raise ToolError(
                f"tool calls of environments {sorted(failed)} failed past their retries; that of {index} with "
                f"{last.kind}: {last.message}. All environments are unchanged: repair the tool and send the same turns "
                "again; only what failed is called again"
            )
        steps = {i: turn for i, turn in begun.items() if isinstance(turn, Step)}
        steps |= {i: self.envs[i].resolve(turn, outcomes[i]) for i, turn in waiting.items()}
        self._tried.clear()
        return steps

    def _execute(self, waiting: Mapping[int, Pending[S]]) -> dict[int, list[_Outcome]]:
        """The outcomes of all calls; those that succeeded in a step that failed are not made again."""
        outcomes = {i: self._remembered(i, turn) for i, turn in waiting.items()}
        places = [(i, j) for i, row in outcomes.items() for j, o in enumerate(row) if isinstance(o, ToolFailure)]
        env = self.envs[0]
        answers = execute(
            env.core.tools,
            [waiting[i].calls[j] for i, j in places],
            retries=env.tool_retries,
            backoff_s=env.tool_backoff_s,
            counter=self.calls,
        )
        for (i, j), answer in zip(places, answers, strict=True):
            outcomes[i][j] = answer
        self._tried = {i: (waiting[i], row) for i, row in outcomes.items()}
        return outcomes

    def _remembered(self, i: int, turn: Pending[S]) -> list[_Outcome]:
        """What a step that failed left of the same turn's calls, else that none was made."""
        if i in self._tried and self._tried[i][0] == turn:
            return self._tried[i][1]
        return [ToolFailure("not_run", "the call was not executed")] * len(turn.calls)

    def _end(self, i: int, step: Step[S]) -> tuple[float, dict[str, Any]]:
        self._observations[i], reward, self._terminations[i], self._truncations[i], info = self.envs[i].end(step)
        return reward, info

    def _renew(self, i: int, info: dict[str, Any] | None) -> dict[str, Any] | None:
        """Start the next episode where one just ended; its last observation and info go into the new info."""
        if not self.envs[i].done:
            return info
        final = {"final_obs": self._observations[i], "final_info": info}
        return final | self._reset(i, None, None)

    # -- arguments of reset ----------------------------------------------------------------------------------

    def _mask(self, mask: Any) -> NDArray[np.bool_]:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        found = np.asarray(mask)
        if found.shape != (self.num_envs,) or found.dtype != np.bool_ or not found.any():
            raise ConfigError(f"reset_mask: expected {self.num_envs} bools, at least one of them True, found {mask!r}")
        return found

    def _each(self, options: dict[str, Any]) -> list[dict[str, Any] | None]:
        if "per_env" not in options:
            return [options] * self.num_envs
        each = options.pop("per_env")
        if options:
            raise ConfigError(f"expected per_env or options for all, found both; move {sorted(options)} into per_env")
        return _one_each(each, self.num_envs, what="per_env", kind=dict)

    def _seeds(self, seed: int | Sequence[int | None] | None) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if isinstance(seed, (int, np.integer)):
            return [int(seed) + i for i in range(self.num_envs)]
        return _one_each(seed, self.num_envs, what="seed", kind=(int, np.integer))


def _one_each(values: Any, n: int, *, what: str, kind: type | tuple[type, ...]) -> list[Any]:
    found = list(values) if isinstance(values, Iterable) else [values]
    if len(found) != n or not all(value is None or isinstance(value, kind) for value in found):
        raise ConfigError(f"{what}: expected one (or None) for each of {n} environments, found {values!r:.200}")
    return found


def stack_infos(infos: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Gymnasium's form of many infos: an array for each key, and beside it, under ``_key``, a mask of who has it.

    Arrays are numeric where every value is a number of one type, else of objects; dicts are stacked in the same way.
    """
    stacked: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info or ()):
        has = np.array([info is not None and key in info for info in infos], dtype=np.bool_)
        stacked[key] = _stack([info[key] if info is not None and key in info else None for info in infos], has)
        stacked[f"_{key}"] = has
    return stacked


def _stack(values: list[Any], has: NDArray[np.bool_]) -> Any:
    kinds = {type(value) for value, mine in zip(values, has, strict=True) if mine}
    if kinds == {dict}:
        return stack_infos(values)
    number = len(kinds) == 1 and issubclass(next(iter(kinds)), (bool, int, float, np.number))
    array: NDArray[Any] = np.zeros(len(values), dtype=kinds.pop()) if number else np.full(len(values), None, object)
    for i in np.flatnonzero(has):
        array[i] = values[i]
    return array


def vectorized(factory: Callable[..., TurnEnv[S]]) -> Callable[..., TurnVectorEnv[S]]:
    """A ``vector_entry_point`` for ``gymnasium.register``, from the class (or factory) that is the entry point."""

    def make(
        num_envs: int = 1, *, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED, **options: Any
    ) -> TurnVectorEnv[S]:
        return TurnVectorEnv(factory(**options), num_envs, autoreset_mode=autoreset_mode)

    return make


make_search_qa = vectorized(SearchQAEnv)
"""The ``vector_entry_point`` of ``turntree/SearchQA-v0``."""
