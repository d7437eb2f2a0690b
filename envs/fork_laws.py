"""The laws of snapshots and forks, one function each: it returns, raises, or says why the law does not apply."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium.wrappers import RecordEpisodeStatistics

from turntree.envs.values import difference
from turntree.errors import ForkLawError, SnapshotError

__all__ = ["Case", "ForkLawError", "Law", "find_actions", "forker", "play", "play_frames", "same_frames"]

Env: TypeAlias = gymnasium.Env[Any, Any]

REQUIRED = ("snapshot", "restore", "fork", "encode_snapshot", "decode_snapshot")
_OTHER_TURN = "<answer>something else</answer>"
_THREADS = 4
_ACROSS_EPISODES = frozenset({
    "episode_count", "episode_start_time", "time_queue", "return_queue", "length_queue",  # RecordEpisodeStatistics
    "checked_reset", "checked_step", "checked_data_reuse", "_previous_data",  # PassiveEnvChecker
})  # fmt: skip


@dataclass(frozen=True)
class Frame:
    """What can be seen of an environment after a reset or a step."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Any
    random_state: Any
    snapshot: Any


class Case:
    """One environment, one episode and the frames that it gave the first time.

    ``inner`` is the layer of ``env`` that takes snapshots; ``frames`` were seen from outside, ``inner_frames`` from
    there, where forks begin.
    """

    def __init__(self, env: Env, *, seed: int, actions: Sequence[Any]) -> None:
        self.env = env
        self.inner: Any = forker(env)
        self.seed = seed
        self.frames = [_start(env, seed), *play_frames(env, actions)]
        self.actions = list(actions)[: len(self.frames) - 1]
        same = self.inner is env
        self.inner_frames = self.frames if same else [_start(self.inner, seed), *play_frames(self.inner, self.actions)]

    def stops(self) -> Iterator[int]:
        """Turn counts at which to take snapshots: every one of a short episode, the ends of a long one."""
        last = len(self.actions)
        yield from range(last + 1) if last <= 8 else (0, 1, 2, last // 2, last - 1, last)

    def middle(self) -> int:
        """A turn count before the end, as far from both ends as possible."""
        return len(self.actions) // 2

    def go_to(self, turn: int) -> None:
        """Replay the first ``turn`` actions from a reset."""
        self.env.reset(seed=self.seed)
        play(self.env, self.actions[:turn])

    def expect(self, law: str, what: str, turn: int) -> None:
        """Playing on from ``turn`` must give the frames of the first time."""
        found = play_frames(self.env, self.actions[turn:])
        same_frames(law, what, self.frames[turn + 1 :], found, turn + 1)

    def expect_fork(self, law: str, what: str, fork: Env, turn: int) -> None:
        """The same of a fork."""
        found = play_frames(fork, self.actions[turn:])
        same_frames(law, what, self.inner_frames[turn + 1 :], found, turn + 1)


Law: TypeAlias = Callable[[Case], str | None]
"""A law tried on one case: None where it holds, else what broke it."""


# -- playing -------------------------------------------------------------------------------------------------


def forker(env: Env) -> Any:
    """The outermost layer of ``env`` with all methods of snapshots, or None."""
    layer: Any = env
    while not all(callable(getattr(layer, name, None)) for name in REQUIRED):
        if not isinstance(layer, gymnasium.Wrapper):
            return None
        layer = layer.env
    return layer


def play(env: Env, actions: Sequence[Any]) -> None:
    """Play actions without looking."""
    for action in actions:
        env.step(action)


def play_frames(env: Env, actions: Sequence[Any]) -> list[Frame]:
    """Play until the actions or the episode end."""
    frames = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        frames.append(_frame(env, observation, float(reward), bool(terminated), bool(truncated), info))
        if terminated or truncated:
            break
    return frames


def _start(env: Env, seed: int) -> Frame:
    observation, info = env.reset(seed=seed)
    return _frame(env, observation, 0.0, False, False, info)


def _frame(env: Env, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> Frame:
    generator = getattr(env.unwrapped, "_np_random", None)
    return Frame(
        observation=copy.deepcopy(observation),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        info=_without_clock(env, copy.deepcopy(info)),
        random_state=None if generator is None else copy.deepcopy(generator.bit_generator.state),
        snapshot=_state(forker(env)),
    )


def _without_clock(env: Env, info: Any) -> Any:
    """An info without the seconds that RecordEpisodeStatistics puts there."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, RecordEpisodeStatistics):
            info.get(layer._stats_key, {}).pop("t", None)
        layer = layer.env
    return info


def _state(inner: Any) -> Any:
    """The environment's state as JSON-able data, detached from every live object."""
    return _described(inner, inner.snapshot())


def _described(inner: Any, snapshot: Any) -> Any:
    describe = getattr(inner, "describe_snapshot", inner.encode_snapshot)
    return _of_episode(copy.deepcopy(describe(snapshot)))


def _of_episode(state: Any) -> Any:
    """The same without what Gymnasium's wrappers rightly keep from one episode to the next."""
    if isinstance(state, list):
        if len(state) == 2 and isinstance(state[0], str) and state[0] in _ACROSS_EPISODES:
            return [state[0], None]
        return [_of_episode(item) for item in state]
    return {key: _of_episode(item) for key, item in state.items()} if isinstance(state, dict) else state


def find_actions(env: Env, *, seed: int, turns: int, tries: int = 20) -> list[Any]:
    """Draws of the action space that keep the episode going where one of ``tries`` draws does."""
    env.action_space.seed(seed)
    env.reset(seed=seed)
    found: list[Any] = []
    while len(found) < turns:
        action, goes_on = _draw(env, found, seed=seed, tries=tries)
        found.append(action)
        if not goes_on:
            break
    return found


def _draw(env: Env, found: Sequence[Any], *, seed: int, tries: int) -> tuple[Any, bool]:
    """One action after ``found``, and whether the episode goes on after it. ``env`` stands after ``found``."""
    action = None
    for _ in range(tries):
        action = env.action_space.sample()
        _, _, terminated, truncated, _ = env.step(action)
        if not (terminated or truncated):
            return action, True
        env.reset(seed=seed)
        play(env, found)
    return action, False


# -- comparing -----------------------------------------------------------------------------------------------


def same_frames(law: str, what: str, expected: Sequence[Frame], found: Sequence[Frame], first_turn: int) -> None:
    """Raise with the first difference of two runs of frames."""
    for turn, (left, right) in enumerate(zip(expected, found), start=first_turn):
        for name in Frame.__dataclass_fields__:
            _equal(law, f"{what}: {name} of turn {turn}", getattr(left, name), getattr(right, name))
    _equal(law, f"{what}: number of turns", len(expected), len(found))


def _equal(law: str, what: str, expected: Any, found: Any) -> None:
    at = difference(expected, found)
    if at is not None:
        path, left, right = at
        where = f" at {path}" if path else ""
        raise ForkLawError(f"{law}: {what}{where}: expected {_brief(left)}, found {_brief(right)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


# -- laws ----------------------------------------------------------------------------------------------------


def determinism(case: Case) -> None:
    again = [_start(case.env, case.seed), *play_frames(case.env, case.actions)]
    same_frames("determinism", f"a second episode with seed {case.seed}", case.frames, again, 0)


def value(case: Case) -> None:
    for turn in case.stops():
        case.go_to(turn)
        snapshot = case.inner.snapshot()
        before = _described(case.inner, snapshot)
        _equal("value", f"taking a snapshot after turn {turn} changed the state", before, _state(case.inner))
        case.expect("value", f"the episode after a snapshot of turn {turn}", turn)
        case.env.reset(seed=case.seed + 1)
        after = _described(case.inner, snapshot)
        _equal("value", f"the snapshot of turn {turn} changed while the environment went on", before, after)


def restore(case: Case) -> None:
    for turn in case.stops():
        case.go_to(turn)
        snapshot = case.inner.snapshot()
        play_frames(case.env, case.actions[turn:])
        case.inner.restore(snapshot)
        case.expect("restore", f"rewound to turn {turn}", turn)
        after = _next_reset(case.env)
        _continue(case, "restore", "after restore()", snapshot, turn, case.inner.restore)
        _equal("restore", f"the reset after an episode restored at turn {turn}", after, _next_reset(case.env))
        _continue(case, "restore", "after reset(options)", snapshot, turn, lambda s: _reset_to(case.env, s))


def _continue(case: Case, law: str, what: str, snapshot: Any, turn: int, put: Callable[[Any], tuple[Any, Any]]) -> None:
    """Restore, compare the observation, info and state with those of the first time, and play to the end."""
    observation, info = put(snapshot)
    expected = case.inner_frames[turn]
    _equal(law, f"{what}: last observation of turn {turn}", expected.observation, observation)
    found = _without_clock(case.inner, copy.deepcopy(info))
    _equal(law, f"{what}: last info of turn {turn}", expected.info, found)
    _equal(law, f"{what}: state of turn {turn}", expected.snapshot, _state(case.inner))
    case.expect(law, f"{what} at turn {turn}", turn)


def _reset_to(env: Env, snapshot: Any) -> tuple[Any, Any]:
    return env.reset(options={"snapshot": snapshot})


def _next_reset(env: Env) -> Any:
    """What a reset without a seed gives: it depends on the random state only."""
    observation, info = env.reset()
    return copy.deepcopy(observation), copy.deepcopy(info)


def isolation(case: Case) -> None:
    for turn in range(len(case.actions)):
        if turn not in case.stops():
            continue
        case.go_to(turn)
        before = _state(case.inner)
        wild, late = case.inner.fork(), case.inner.fork()
        play_frames(wild, [*reversed(case.actions), _other(case)])
        wild.reset(seed=case.seed + 2)
        _equal("isolation", f"stepping a fork of turn {turn} changed its parent", before, _state(case.inner))
        _equal("isolation", f"stepping a fork of turn {turn} changed its sibling", before, _state(late))
        case.expect("isolation", f"the parent of a fork of turn {turn}", turn)
        case.expect_fork("isolation", f"a fork of turn {turn} whose parent went on", late, turn)


def _other(case: Case) -> Any:
    """An action that is not of the episode, if there may be one."""
    space = case.env.action_space
    return _OTHER_TURN if space.contains(_OTHER_TURN) else space.sample()


def threads(case: Case) -> None:
    turn = case.middle()
    case.go_to(turn)
    forks = [case.inner.fork() for _ in range(_THREADS)]
    plans = [case.actions[turn:] if i % 2 == 0 else [*reversed(case.actions)] for i in range(_THREADS)]
    with ThreadPoolExecutor(_THREADS) as pool:
        runs = list(pool.map(play_frames, forks, plans))
    for frames in runs[::2]:
        same_frames("threads", "a fork stepped beside others", case.inner_frames[turn + 1 :], frames, turn + 1)
    case.expect("threads", "the parent of forks stepped in threads", turn)


def info(case: Case) -> None:
    observation, found = case.env.reset(seed=case.seed)
    for turn, action in enumerate(case.actions):
        _scribble(found)
        _scribble(observation)
        what = f"writing into the info and observation of turn {turn}"
        _equal("info", what, case.frames[turn].snapshot, _state(case.inner))
        observation, reward, terminated, truncated, found = case.env.step(action)
        frame = _frame(case.env, observation, float(reward), bool(terminated), bool(truncated), found)
        same_frames("info", f"the turn after {what}", case.frames[turn + 1 : turn + 2], [frame], turn + 1)


def _scribble(found: Any) -> None:
    """Change every dict, list and array of a returned value."""
    if isinstance(found, np.ndarray):
        if found.flags.writeable and found.dtype.kind in "biuf":
            found[...] = found.dtype.type(1)
        return
    if not isinstance(found, (dict, list)):
        return
    for inner in list(found.values()) if isinstance(found, dict) else found:
        _scribble(inner)
    if isinstance(found, dict):
        found["scribbled by check_fork"] = True
    else:
        found.append("scribbled by check_fork")


def reseed(case: Case) -> None:
    for turn in (0, case.middle()):
        case.go_to(turn)
        snapshot = case.inner.snapshot()
        runs = []
        for _ in range(2):
            case.inner.restore(snapshot, seed=case.seed + 3)
            runs.append(play_frames(case.env, case.actions[turn:]))
        same_frames("reseed", f"restore(snapshot, seed={case.seed + 3}) twice", runs[0], runs[1], turn + 1)


def reset(case: Case) -> None:
    for turn in case.stops():
        case.go_to(turn)
        case.inner.restore(case.inner.snapshot())
        again = [_start(case.env, case.seed), *play_frames(case.env, case.actions)]
        same_frames("reset", f"a new episode after a restore at turn {turn}", case.frames, again, 0)


# -- forms ---------------------------------------------------------------------------------------------------


def pickled(case: Case) -> None:
    for turn in case.stops():
        case.go_to(turn)
        copied = pickle.loads(_pickle(case.inner.snapshot(), turn))  # noqa: S301  # pickled one call ago
        _continue(case, "pickle", "from a pickled snapshot", copied, turn, case.inner.restore)


def _pickle(snapshot: Any, turn: int) -> bytes:
    try:
        return pickle.dumps(snapshot)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise ForkLawError(f"pickle: the snapshot of turn {turn} cannot be pickled: {error}") from error


def as_json(case: Case) -> str | None:
    for turn in case.stops():
        case.go_to(turn)
        try:
            data = case.inner.encode_snapshot(case.inner.snapshot())
        except SnapshotError as error:
            return str(error)  # said with its type, as the contract asks; a snapshot need not have a JSON form
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ForkLawError(f"json: the snapshot of turn {turn} is not JSON-able: {error}") from error
        decoded = case.inner.decode_snapshot(json.loads(text))
        _continue(case, "json", "from a snapshot read back from JSON", decoded, turn, case.inner.restore)
    return None


def version(case: Case) -> None:
    """A snapshot of another format or another environment is refused, also as JSON."""
    case.go_to(case.middle())
    snapshot = case.inner.snapshot()
    for name, wrong in (("version", -1), ("fingerprint", "another environment")):
        if not dataclasses.is_dataclass(snapshot) or not hasattr(snapshot, name):
            raise ForkLawError(f"version: the snapshot, a {type(snapshot).__name__}, has no field {name!r}")
        forged = dataclasses.replace(snapshot, **{name: wrong})  # type: ignore[type-var]
        _refused(f"restore() of a snapshot with {name}={wrong!r}", functools.partial(case.inner.restore, forged))
        try:
            data = case.inner.encode_snapshot(snapshot)
        except SnapshotError:
            continue
        forged_data = {**data, name: wrong}
        _refused(f"JSON with {name}={wrong!r}", functools.partial(case.inner.decode_snapshot, forged_data))


def _refused(what: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except SnapshotError:
        return
    raise ForkLawError(f"version: {what} was accepted; it must raise SnapshotError")
