"""A conformance suite for environments with snapshots, in the manner of Gymnasium's ``check_env``."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import gymnasium

from turntree.errors import TurnTreeError

__all__ = ["ForkLawError", "check_fork"]

Env: TypeAlias = gymnasium.Env[Any, Any]

_COST_LENGTHS = (1, 10, 100)
_MIN_COST_LENGTH = 10
_BYTES_PER_TURN = 2.0
_OTHER_TURN = "<answer>something else</answer>"
_REQUIRED = ("snapshot", "restore", "fork", "encode_snapshot", "decode_snapshot")


class ForkLawError(TurnTreeError):
    """A law of snapshots does not hold; the message starts with the law's name."""


@dataclass(frozen=True)
class _Frame:
    """What can be seen of an environment after a reset or a step."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Any
    random_state: Any
    snapshot: Any


def check_fork(
    env: Env,
    *,
    actions: Sequence[Any] | None = None,
    seed: int = 123,
    turns: int = 6,
    process: bool = True,
    timeout_s: float = 60.0,
) -> tuple[str, ...]:
    """Check that ``env`` keeps the laws of snapshots and forks; returns the names of the laws that were checked.

    ``env`` may be wrapped; underneath it needs ``snapshot``, ``restore``, ``fork``, ``encode_snapshot`` and
    ``decode_snapshot`` (see :class:`turntree.envs.turn_env.TurnEnv`). ``actions``: the episode to play (default: up to
    ``turns`` draws of the action space, preferring those that do not end the episode). ``process=False`` leaves out the
    law that needs a second process, which rebuilds ``env`` from its spec or by pickling.

    Laws: ``determinism`` (same seed, same episode), ``value`` (taking a snapshot changes nothing, and nothing changes a
    snapshot), ``restore`` (continuing equals the original: observations, rewards, flags, info, random state; through
    ``reset(options={"snapshot": ...})`` too), ``isolation`` (forks, their parent and siblings never influence each
    other), ``info`` (what a caller does to a returned info changes nothing), ``reseed`` (``restore(s, seed)`` is
    deterministic), ``reset`` (a reset after a restore is a fresh one), ``pickle``, ``json``, ``process``, and ``cost``
    (allocation and calls of snapshot and restore do not grow with the episode; skipped for environments that end
    within 10 turns).

    Raises :class:`ForkLawError`.
    """
    missing = [name for name in _REQUIRED if not callable(getattr(env.unwrapped, name, None))]
    if missing:
        raise ForkLawError(
            f"interface: {type(env.unwrapped).__name__} has no {', '.join(missing)}; derive from TurnEnv"
        )
    plan = list(actions) if actions is not None else _find_actions(env, seed=seed, turns=turns)
    case = _Case(env, seed, plan, _start(env, seed))
    laws: dict[str, Callable[[_Case], bool]] = {
        "determinism": _determinism,
        "value": _value,
        "restore": _restore,
        "isolation": _isolation,
        "info": _info,
        "reseed": _reseed,
        "reset": _reset,
        "pickle": _pickle,
        "json": _json,
        "cost": _cost,
    }
    if process:
        laws["process"] = lambda case: _process(case, timeout_s)
    return tuple(name for name, law in laws.items() if law(case))


# -- playing -------------------------------------------------------------------------------------------------


class _Case:
    """One environment, one episode and the frames that it gave the first time."""

    def __init__(self, env: Env, seed: int, actions: Sequence[Any], first: _Frame) -> None:
        self.env = env
        self.inner: Any = env.unwrapped
        self.seed = seed
        self.frames = [first, *_play(env, actions)]
        self.actions = list(actions)[: len(self.frames) - 1]

    def stops(self) -> Iterator[int]:
        """Turn counts at which to take snapshots: every one of a short episode, the ends of a long one."""
        last = len(self.actions)
        yield from range(last + 1) if last <= 8 else (0, 1, 2, last // 2, last - 1, last)

    def go_to(self, turn: int) -> None:
        """Replay the first ``turn`` actions from a reset."""
        self.env.reset(seed=self.seed)
        for action in self.actions[:turn]:
            self.env.step(action)

    def expect(self, law: str, what: str, env: Env, turn: int) -> None:
        """Playing on from ``turn`` must give the frames of the first time."""
        _same(law, what, self.frames[turn + 1 :], _play(env, self.actions[turn:]), turn + 1)


def _start(env: Env, seed: int) -> _Frame:
    observation, info = env.reset(seed=seed)
    return _frame(env, observation, 0.0, False, False, info)


def _play(env: Env, actions: Sequence[Any]) -> list[_Frame]:
    frames = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        frames.append(_frame(env, observation, float(reward), terminated, truncated, info))
        if terminated or truncated:
            break
    return frames


def _frame(env: Env, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> _Frame:
    inner: Any = env.unwrapped
    return _Frame(
        observation=copy.deepcopy(observation),
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        info=copy.deepcopy(info),
        random_state=copy.deepcopy(inner.np_random.bit_generator.state),
        snapshot=_encoded(inner),
    )


def _encoded(inner: Any) -> Any:
    """The environment's state as JSON-able data, detached from every live object."""
    return copy.deepcopy(inner.encode_snapshot(inner.snapshot()))


def _find_actions(env: Env, *, seed: int, turns: int, tries: int = 20) -> list[Any]:
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
        _steps(env, found)
    return action, False


def _same(law: str, what: str, expected: Sequence[_Frame], found: Sequence[_Frame], first_turn: int) -> None:
    """Raise with the first difference of two runs of frames."""
    for turn, (left, right) in enumerate(zip(expected, found), start=first_turn):
        for name in _Frame.__dataclass_fields__:
            _equal(law, f"{what}: {name} of turn {turn}", getattr(left, name), getattr(right, name))
    _equal(law, f"{what}: number of turns", len(expected), len(found))


def _equal(law: str, what: str, expected: Any, found: Any) -> None:
    if expected != found:
        raise ForkLawError(f"{law}: {what}: expected {_brief(expected)}, found {_brief(found)}")


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


# -- laws ----------------------------------------------------------------------------------------------------


def _determinism(case: _Case) -> bool:
    again = [_start(case.env, case.seed), *_play(case.env, case.actions)]
    _same("determinism", f"a second episode with seed {case.seed}", case.frames, again, 0)
    return True


def _value(case: _Case) -> bool:
    for turn in case.stops():
        case.go_to(turn)
        snapshot = case.inner.snapshot()
        before = copy.deepcopy(case.inner.encode_snapshot(snapshot))
        _equal("value", f"taking a snapshot after turn {turn} changed the state", before, _encoded(case.inner))
        case.expect("value", f"the episode after a snapshot of turn {turn}", case.env, turn)
        case.env.reset(seed=case.seed + 1)
        after = case.inner.encode_snapshot(snapshot)
        _equal("value", f"the snapshot of turn {turn} changed while the environment went on", before, after)
    return True


def _restore(case: _Case) -> bool:
    for turn in case.stops():
        case.go_to(turn)
        snapshot = case.inner.snapshot()
        _play(case.env, case.actions[turn:])
        after = _next_reset(case.env)
        _continue(case, "restore", "after restore()", snapshot, turn, case.inner.restore)
        _equal("restore", f"the reset after an episode restored at turn {turn}", after, _next_reset(case.env))
        _continue(case, "restore", "after reset(options)", snapshot, turn, lambda s: _reset_to(case.env, s))
    return True


def _continue(
    case: _Case, law: str, what: str, snapshot: Any, turn: int, restore: Callable[[Any], tuple[Any, Any]]
) -> None:
    """Restore, compare the observation, info and state with those of the first time, and play to the end."""
    observation, info = restore(snapshot)
    expected = case.frames[turn]
    _equal(law, f"{what}: last observation of turn {turn}", expected.observation, observation)
    _equal(law, f"{what}: last info of turn {turn}", expected.info, info)
    _equal(law, f"{what}: state of turn {turn}", expected.snapshot, _encoded(case.inner))
    case.expect(law, f"{what} at turn {turn}", case.env, turn)


def _reset_to(env: Env, snapshot: Any) -> tuple[Any, Any]:
    return env.reset(options={"snapshot": snapshot})


def _next_reset(env: Env) -> Any:
    """What a reset without a seed gives: it depends on the random state only."""
    observation, info = env.reset()
    return observation, copy.deepcopy(info)


def _isolation(case: _Case) -> bool:
    for turn in case.stops():
        if turn == len(case.actions):
            continue
        case.go_to(turn)
        before = _encoded(case.inner)
        wild, late = case.inner.fork(), case.inner.fork()
        _play(wild, [*reversed(case.actions), _OTHER_TURN])
        wild.reset(seed=case.seed + 2)
        _equal("isolation", f"stepping a fork of turn {turn} changed its parent", before, _encoded(case.inner))
        _equal("isolation", f"stepping a fork of turn {turn} changed its sibling", before, _encoded(late))
        case.expect("isolation", f"the parent of a fork of turn {turn}", case.env, turn)
        case.expect("isolation", f"a fork of turn {turn} whose parent went on", late, turn)
    return True


def _info(case: _Case) -> bool:
    _, info = case.env.reset(seed=case.seed)
    for turn, action in enumerate(case.actions):
        _scribble(info)
        _equal("info", f"writing into the info of turn {turn}", case.frames[turn].snapshot, _encoded(case.inner))
        observation, reward, terminated, truncated, info = case.env.step(action)
        frame = _frame(case.env, observation, float(reward), terminated, truncated, info)
        expected = case.frames[turn + 1 : turn + 2]
        _same("info", f"the turn after writing into the info of turn {turn}", expected, [frame], turn + 1)
    return True


def _scribble(value: Any) -> None:
    """Change every dict and list of an info."""
    for inner in list(value.values()) if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            _scribble(inner)
    if isinstance(value, dict):
        value["scribbled by check_fork"] = True
    else:
        value.append("scribbled by check_fork")


def _reseed(case: _Case) -> bool:
    case.go_to(0)
    snapshot = case.inner.snapshot()
    runs = []
    for _ in range(2):
        case.inner.restore(snapshot, seed=case.seed + 3)
        runs.append(_play(case.env, case.actions))
    _same("reseed", f"restore(snapshot, seed={case.seed + 3}) twice", runs[0], runs[1], 1)
    return True


def _reset(case: _Case) -> bool:
    for turn in case.stops():
        case.go_to(turn)
        case.inner.restore(case.inner.snapshot())
        again = [_start(case.env, case.seed), *_play(case.env, case.actions)]
        _same("reset", f"a new episode after a restore at turn {turn}", case.frames, again, 0)
    return True


def _pickle(case: _Case) -> bool:
    for turn in case.stops():
        case.go_to(turn)
        copied = pickle.loads(_pickled(case.inner.snapshot(), turn))
        _continue(case, "pickle", "from a pickled snapshot", copied, turn, case.inner.restore)
    return True


def _pickled(snapshot: Any, turn: int) -> bytes:
    try:
        return pickle.dumps(snapshot)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise ForkLawError(f"pickle: the snapshot of turn {turn} cannot be pickled: {error}") from error


def _json(case: _Case) -> bool:
    for turn in case.stops():
        case.go_to(turn)
        data = case.inner.encode_snapshot(case.inner.snapshot())
        try:
            text = json.dumps(data, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ForkLawError(f"json: the snapshot of turn {turn} is not JSON-able: {error}") from error
        decoded = case.inner.decode_snapshot(json.loads(text))
        _continue(case, "json", "from a snapshot read back from JSON", decoded, turn, case.inner.restore)
    return True


# -- cost ----------------------------------------------------------------------------------------------------


def _cost(case: _Case) -> bool:
    """Bytes and calls, not seconds: they are the same on a busy machine."""
    plan = _find_actions(case.env, seed=case.seed, turns=max(_COST_LENGTHS))
    lengths = sorted({min(length, len(plan) - 1) for length in _COST_LENGTHS})
    if lengths[-1] < _MIN_COST_LENGTH:
        return False
    used: dict[str, list[tuple[int, int]]] = {"snapshot": [], "restore": []}
    for length in lengths:
        case.env.reset(seed=case.seed)
        _steps(case.env, plan[:length])
        snapshot = case.inner.snapshot()
        used["snapshot"].append(_measure(case.inner.snapshot))
        used["restore"].append(_measure(functools.partial(case.inner.restore, snapshot)))
    for name, figures in used.items():
        _flat(name, lengths, figures)
    return True


def _steps(env: Env, actions: Sequence[Any]) -> None:
    for action in actions:
        env.step(action)


def _flat(name: str, lengths: Sequence[int], figures: Sequence[tuple[int, int]]) -> None:
    """Growth between the second-longest and the longest episode must be (nearly) nothing."""
    growth = lengths[-1] - lengths[-2]
    (bytes_before, calls_before), (bytes_after, calls_after) = figures[-2:]
    if (bytes_after - bytes_before) / growth > _BYTES_PER_TURN or (calls_after - calls_before) / growth > 0.25:
        raise ForkLawError(
            f"cost: {name}() grows with the episode: expected the same at {lengths[-2]} and {lengths[-1]} turns, found "
            f"{bytes_before} and {bytes_after} bytes allocated, {calls_before} and {calls_after} calls; share the "
            "history instead of copying it"
        )


def _measure(function: Callable[[], Any]) -> tuple[int, int]:
    """Peak bytes allocated and calls made by ``function``, the least of three runs each."""
    return min(_allocated(function) for _ in range(3)), min(_calls(function) for _ in range(3))


def _allocated(function: Callable[[], Any]) -> int:
    tracing, collecting = tracemalloc.is_tracing(), gc.isenabled()
    gc.disable()
    if not tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        result = function()
        peak = tracemalloc.get_traced_memory()[1]
        del result
        return peak - before
    finally:
        if not tracing:
            tracemalloc.stop()
        if collecting:
            gc.enable()


def _calls(function: Callable[[], Any]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(previous)
    return count


# -- another process -----------------------------------------------------------------------------------------


def _process(case: _Case, timeout_s: float) -> bool:
    turn = len(case.actions) // 2
    case.go_to(turn)
    request = (_builder(case.env), case.inner.snapshot(), case.actions[turn:])
    try:
        payload = cloudpickle.dumps(request)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ForkLawError(
            f"process: the environment cannot be sent to another process ({error}); make it with gymnasium.make and "
            "picklable arguments, or call check_fork(process=False)"
        ) from error
    observation, frames = _ask(payload, timeout_s)
    _equal("process", f"last observation of turn {turn}", case.frames[turn].observation, observation)
    _same("process", f"in another process from turn {turn}", case.frames[turn + 1 :], frames, turn + 1)
    return True


def _builder(env: Env) -> Any:
    """The environment's spec where it has one, so that the other process builds its own handles; else itself."""
    return env.unwrapped.spec or env


def _ask(payload: bytes, timeout_s: float) -> tuple[Any, list[_Frame]]:
    """Run :func:`_serve` in a new interpreter with this one's import path."""
    command = [sys.executable, "-P", "-c", "from turntree.envs.check import _serve; _serve()"]
    paths = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            command, input=payload, capture_output=True, timeout=timeout_s, env=os.environ | {"PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired as error:
        raise ForkLawError(f"process: the other process gave no answer within {timeout_s} s") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ForkLawError(f"process: the snapshot could not be continued in another process: {last}")
    answer: tuple[Any, list[_Frame]] = pickle.loads(done.stdout)
    return answer


def _serve() -> None:
    """Read a request from stdin, continue its snapshot, and write the frames to stdout."""
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    builder, snapshot, actions = pickle.loads(sys.stdin.buffer.read())
    env = builder if isinstance(builder, gymnasium.Env) else gymnasium.make(builder)
    observation, _ = env.reset(options={"snapshot": snapshot})
    output.write(pickle.dumps((observation, _play(env, actions))))
