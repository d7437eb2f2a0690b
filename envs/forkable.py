"""Snapshots, restore and forks for any Gymnasium environment, its wrappers included."""

from __future__ import annotations

import copy
import hashlib
import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs

from turntree.envs import values
from turntree.envs.capture import Capture, capture, duplicate
from turntree.envs.emulator import LastAction, press_again, with_last_action
from turntree.envs.replay import Played, Record, Reseeded, decode_record, encode_record, probe, replay, reseed
from turntree.envs.snapshot import FORMAT_VERSION, RandomStream, Snapshot
from turntree.errors import ConfigError, SnapshotError

__all__ = ["ForkSnapshot", "Forkable", "Method"]

Method: TypeAlias = Literal["state", "replay", "deepcopy"]
"""How a foreign environment's state is kept: by its own methods, by playing its actions again, or by copying it."""
Env: TypeAlias = gymnasium.Env[Any, Any]

PAIRS = (
    ("snapshot", "restore"),
    ("clone_full_state", "restore_full_state"),
    ("clone_state", "restore_state"),
    ("get_state", "set_state"),
    ("save_state", "load_state"),
)
"""Names under which environments offer their own state, the first found is used."""


@dataclass(frozen=True, slots=True)
class ForkSnapshot:
    """The state of a :class:`Forkable`: an immutable, picklable value without live handles.

    ``state``: what the environment's own method gave, when that is an immutable value (:class:`Snapshot`); else None.
    ``captured``: the fields of the wrappers, and of the environment where it has no state methods. ``record``: the
    episode, where it is replayed. ``observation``, ``info``, ``done``: where the episode stood.
    """

    fingerprint: str
    captured: Capture
    observation: Any
    info: Any
    done: bool
    seeds: RandomStream
    state: Any = None
    record: Record | None = None
    version: int = FORMAT_VERSION


class Forkable(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Gives any Gymnasium environment ``snapshot()``, ``restore(snapshot, seed=None)`` and ``fork()``.

    ``how``: ``"state"`` uses the environment's own methods (``snapshot``/``restore``, ALE's ``clone_state``/
    ``restore_state`` with the emulator's random state, ``get_state``/``set_state``, ...); ``"replay"`` plays the
    actions again from the seed and compares rewards, flags and observations with the record, which costs one step a
    turn; ``"deepcopy"`` captures every attribute, which costs as much as the environment is large. ``"auto"`` takes
    the first that works: replay is tried with ``probe_steps`` random actions on a second environment.

    ``method`` and ``why`` say what was chosen. The wrappers between this one and the environment are part of the
    state: all of their attributes except the wrapped environment, spaces, spec and constructor arguments. Wrappers
    outside of this one are not: put it outermost, ``Forkable(TimeLimit(env, 100))``. An episode that is started
    without a seed is given one when it is to be replayed. What live handles do is in :mod:`turntree.envs.capture`.

    Raises ``ConfigError`` for a ``how`` that the environment does not allow.
    """

    def __init__(self, env: Env, how: Literal["auto", "state", "replay", "deepcopy"] = "auto", *, probe_steps: int = 8):
        env = with_last_action(env)
        gymnasium.Wrapper.__init__(self, env)
        layers = _layers(env)
        if any(isinstance(layer, Forkable) for layer in layers):
            raise ConfigError("the environment is already Forkable; use its snapshot() and restore()")
        self.method, self.why = _choose(env, how, probe_steps)
        RecordConstructorArgs.__init__(self, how=self.method)
        self.fingerprint = _fingerprint(layers, self.method)
        self._pair = _own_pair(env.unwrapped)
        self._seeds = RandomStream(int(np.random.SeedSequence().generate_state(1, np.uint64)[0]))
        self._record: Record | None = None
        self._last: tuple[Any, Any, bool] | None = None

    def __str__(self) -> str:
        return f"<Forkable[{self.method}]{self.env}>"

    def __repr__(self) -> str:
        return f"<Forkable[{self.method}: {self.why}]{self.env!r}>"

    # -- Gymnasium -------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode, or with ``options={"snapshot": s}`` continue from a snapshot or its JSON form."""
        if options and "snapshot" in options:
            if len(options) > 1:
                raise ConfigError(f"expected reset option 'snapshot' alone, found {sorted(options)}")
            given = options["snapshot"]
            return self.restore(self.decode_snapshot(given) if isinstance(given, Mapping) else given, seed=seed)
        if seed is not None:
            self._seeds = RandomStream(int(seed))
        if self.method != "replay":
            return self._remember(*self.env.reset(seed=seed, options=options), done=False)
        return self._start_record(seed, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step of the environment, recorded."""
        kept = copy.deepcopy(action) if self._record is not None else None
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self._record is not None:
            played = Played(kept, float(reward), bool(terminated), bool(truncated), values.digest(observation))
            self._record = self._record.append(played)
        self._remember(observation, info, done=bool(terminated or truncated))
        return observation, reward, terminated, truncated, info

    # -- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self) -> ForkSnapshot:
        """The state as a value. Raises ``SnapshotError`` before the first reset, or naming what cannot be captured."""
        if self._last is None:
            raise SnapshotError("there is no episode to take a snapshot of; call reset() first")
        observation, info, done = self._last
        state, captured = self._take()
        return ForkSnapshot(
            fingerprint=self.fingerprint,
            captured=captured,
            observation=copy.deepcopy(observation),
            info=copy.deepcopy(info),
            done=done,
            seeds=self._seeds,
            state=state,
            record=self._record,
        )

    def restore(self, snapshot: ForkSnapshot, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Continue from ``snapshot``: exactly (``seed=None``), or with random streams re-derived from ``seed``.

        Returns the observation and info that the episode stood at. Raises ``SnapshotError`` when the snapshot belongs
        to another environment, and :class:`turntree.errors.EpisodeReplayError` when a replay gives something else than
        the record; then ``reset`` or another ``restore`` must follow.
        """
        if not isinstance(snapshot, ForkSnapshot):
            raise SnapshotError(f"expected a ForkSnapshot, found {type(snapshot).__name__}; use env.snapshot()")
        self._check(snapshot)
        self._last = None
        self._put(snapshot, seed)
        self._seeds = snapshot.seeds if seed is None else RandomStream(int(seed))
        self._record = snapshot.record
        if seed is not None and self._record is not None:
            self._record = self._record.append(Reseeded(int(seed)))
        return self._remember(copy.deepcopy(snapshot.observation), copy.deepcopy(snapshot.info), done=snapshot.done)

    def fork(self) -> Forkable:
        """An independent environment in the same state.

        It is a copy of the objects; where one of them cannot be copied, the environment is made anew from its spec and
        then restored. Raises ``SnapshotError`` when neither is possible.
        """
        snapshot = self.snapshot()
        twin = copy.copy(self)
        twin.env = self._second()
        twin.restore(snapshot)
        return twin

    def clone_state(self) -> ForkSnapshot:
        """ALE's name for :meth:`snapshot`."""
        return self.snapshot()

    def restore_state(self, state: ForkSnapshot) -> None:
        """ALE's name for :meth:`restore`."""
        self.restore(state)

    def encode_snapshot(self, snapshot: ForkSnapshot) -> dict[str, Any]:
        """The snapshot as JSON-able data; raises ``SnapshotError`` naming what has no JSON form."""
        inner: Any = self.unwrapped
        depth = len(_layers(self.env))
        return {
            "version": snapshot.version,
            "fingerprint": snapshot.fingerprint,
            "captured": snapshot.captured.to_json(depth),
            "state": None if snapshot.state is None else inner.encode_snapshot(snapshot.state),
            "record": None if snapshot.record is None else encode_record(snapshot.record, depth),
            "seeds": snapshot.seeds.to_json(),
            "done": snapshot.done,
            "last": values.encode((snapshot.observation, snapshot.info), where="the last observation and info"),
        }

    def decode_snapshot(self, data: Mapping[str, Any]) -> ForkSnapshot:
        """The inverse of :meth:`encode_snapshot`; raises ``SnapshotError`` on anything else."""
        inner: Any = self.unwrapped
        if not isinstance(data, Mapping) or not {"version", "fingerprint", "captured", "last"} <= data.keys():
            raise SnapshotError(f"expected a snapshot as a JSON object, found {type(data).__name__}")
        self._check_origin(data["version"], data["fingerprint"])
        try:
            observation, info = values.decode(data["last"])
            return ForkSnapshot(
                fingerprint=data["fingerprint"],
                captured=Capture.from_json(data["captured"]),
                observation=observation,
                info=info,
                done=bool(data["done"]),
                seeds=RandomStream.from_json(data["seeds"]),
                state=None if data["state"] is None else inner.decode_snapshot(data["state"]),
                record=None if data["record"] is None else decode_record(data["record"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SnapshotError(f"the snapshot cannot be read ({type(error).__name__}: {error})") from error

    def describe_snapshot(self, snapshot: ForkSnapshot) -> Any:
        """JSON-able data that is equal for equal states; unlike :meth:`encode_snapshot` it always exists."""
        inner: Any = self.unwrapped
        return {
            "captured": snapshot.captured.describe(),
            "state": None if snapshot.state is None else inner.encode_snapshot(snapshot.state),
            "record": None if snapshot.record is None else values.describe(list(snapshot.record.steps)),
            "done": snapshot.done,
        }

    # -- inside ----------------------------------------------------------------------------------------------

    def _remember(self, observation: Any, info: dict[str, Any], *, done: bool) -> tuple[Any, dict[str, Any]]:
        self._last = copy.deepcopy(observation), copy.deepcopy(info), done
        return observation, info

    def _start_record(self, seed: int | None, options: Any) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            generator, self._seeds = self._seeds.draw()
            seed = int(generator.integers(2**31))
        layers = _layers(self.env)
        wrappers = capture(layers, range(len(layers) - 1))
        kept = copy.deepcopy(options)
        self._record, self._last = None, None
        observation, info = self.env.reset(seed=seed, options=options)
        self._record = Record(seed, kept, wrappers, values.digest(observation))
        return self._remember(observation, info, done=False)

    def _take(self) -> tuple[Any, Capture]:
        """The environment's own immutable state or None, and the capture of everything else."""
        layers = _layers(self.env)
        base = len(layers) - 1
        if self.method == "deepcopy":
            return None, capture(layers, range(base + 1))
        if self.method == "replay" or self._pair is None:
            return None, capture(layers, range(base))
        state = _own_state(layers[base], self._pair)
        if isinstance(state, Snapshot):
            return state, capture(layers, range(base))
        return None, capture(layers, range(base), extra=(state, layers[base]._np_random))

    def _put(self, snapshot: ForkSnapshot, seed: int | None) -> None:
        layers = _layers(self.env)
        if snapshot.record is not None:
            replay(self.env, layers, snapshot.record)
            snapshot.captured.restore(layers)
        elif snapshot.state is not None:
            snapshot.captured.restore(layers)
            layers[-1].restore(snapshot.state, seed=seed)
        else:
            extra = snapshot.captured.restore(layers)
            if extra is not None and self._pair is not None:
                _put_own_state(layers, self._pair, extra, seed)
        if seed is not None:
            reseed(layers if snapshot.state is None else layers[:-1], seed)

    def _second(self) -> Env:
        """Another environment like this one's, in any state."""
        layers = _layers(self.env)
        try:
            return _copied(layers, own=self._pair == PAIRS[0] and self.method == "state")
        except SnapshotError as error:
            twin = _made_again(self.env)
            if twin is None:
                raise SnapshotError(
                    f"fork: {error}. The environment has no spec that it could be made from again: register it and "
                    "use gymnasium.make"
                ) from error
            return twin

    def _check(self, snapshot: ForkSnapshot) -> None:
        self._check_origin(snapshot.version, snapshot.fingerprint)

    def _check_origin(self, version: object, fingerprint: object) -> None:
        if version != FORMAT_VERSION:
            raise SnapshotError(
                f"expected snapshot format version {FORMAT_VERSION}, found {version!r}; take the snapshot again with "
                "this version of turntree, or restore it with the version that wrote it"
            )
        if fingerprint != self.fingerprint:
            raise SnapshotError(
                f"the snapshot belongs to an environment with fingerprint {fingerprint!r}, this one has "
                f"{self.fingerprint!r}: environment, arguments, spaces, wrappers or method differ. Restore it into one "
                "that was built in the same way"
            )


# -- layers --------------------------------------------------------------------------------------------------


def _layers(env: Env) -> list[Any]:
    """The wrappers from the outermost in, and the environment itself."""
    layers: list[Any] = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _made_again(env: Env) -> Env | None:
    """A new environment of the same wrappers, from the spec; None when that is not possible."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = env.spec
        if spec is None:
            return None
        try:
            twin = with_last_action(gymnasium.make(spec))
        except (gymnasium.error.Error, ValueError, TypeError):
            return None
    same = [type(layer) for layer in _layers(env)] == [type(layer) for layer in _layers(twin)]
    return twin if same else None


def _copied(layers: Sequence[Any], *, own: bool) -> Env:
    """Copies of the layers; the environment itself by its own ``fork`` if ``own``."""
    if not own or not callable(getattr(layers[-1], "fork", None)):
        twin: Env = duplicate(layers)[0]
        return twin
    base: Env = layers[-1].fork()
    outer = [copy.copy(layer) for layer in layers[:-1]]
    for index, layer in enumerate(outer):
        for name in ("_action_space", "_observation_space"):
            setattr(layer, name, copy.deepcopy(getattr(layer, name)))
        layer.env = outer[index + 1] if index + 1 < len(outer) else base
    return outer[0] if outer else base


def _fingerprint(layers: Sequence[Any], method: str) -> str:
    """A short hash of what must be the same for a snapshot to have a meaning."""
    base = layers[-1]
    spec = base.spec
    parts: list[Any] = [method, repr(layers[0].observation_space), repr(layers[0].action_space)]
    parts.append([f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers])
    parts.append([_sketch(getattr(layer, "_saved_kwargs", None)) for layer in layers[:-1]])
    parts.append([spec.id, _sketch(spec.kwargs)] if spec is not None else None)
    return "fork-" + hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _sketch(value: Any) -> Any:
    """Plain values as they are, anything else by its type: the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return sorted((str(key), _sketch(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return [_sketch(item) for item in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


# -- choosing ------------------------------------------------------------------------------------------------


def _choose(env: Env, how: str, probe_steps: int) -> tuple[Method, str]:
    base = env.unwrapped
    name, pair = type(base).__name__, _own_pair(base)
    if how == "state":
        if pair is None:
            names = ", ".join("/".join(names) for names in PAIRS)
            raise ConfigError(f"how='state': {name} has none of the method pairs {names}; use how='auto'")
        return "state", f"asked for; {name} has {pair[0]}() and {pair[1]}()"
    if how in ("replay", "deepcopy"):
        return ("replay" if how == "replay" else "deepcopy"), "asked for"
    if how != "auto":
        raise ConfigError(f"expected how='auto', 'state', 'replay' or 'deepcopy', found {how!r}")
    if pair is not None:
        return "state", f"{name} has {pair[0]}() and {pair[1]}()"
    problem, probed = _replay_problem(env, probe_steps)
    if problem is None:
        return "replay", f"{name} has no state methods, and {probed}"
    return "deepcopy", f"{name} has no state methods, and a replay is not exact: {problem}"


def _own_pair(base: Any) -> tuple[str, str] | None:
    """The environment's own getter and setter: a getter without, a setter with one required argument."""
    for names in PAIRS:
        getter, setter = (getattr(base, name, None) for name in names)
        if callable(getter) and callable(setter) and _required(getter) == 0 and _required(setter) == 1:
            return names
    return None


def _required(function: Any) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = (p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return sum(p.default is p.empty for p in named)


def _replay_problem(env: Env, steps: int) -> tuple[str | None, str]:
    """Why the environment cannot be replayed, or None; and what was tried."""
    base = env.unwrapped
    if base.spec is not None and base.spec.nondeterministic:
        return "its spec says nondeterministic=True", ""
    if steps < 1:
        return None, "replay was not tried (probe_steps=0)"
    twin = _made_again(env)
    if twin is None:
        try:
            twin = _copied(_layers(env), own=False)
        except SnapshotError:
            return None, "replay could not be tried beforehand, since the environment cannot be made twice"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return probe(twin, steps), f"two episodes of {steps} equal actions were equal"
        except Exception as error:  # environments of other people may fail in any way, a copy of one all the more
            return None, f"replay could not be tried beforehand ({type(error).__name__}: {error})"


# -- the environment's own state -----------------------------------------------------------------------------


def _own_state(base: Any, pair: tuple[str, str], *, include_rng: bool = True) -> Any:
    getter = getattr(base, pair[0])
    if "include_rng" in inspect.signature(getter).parameters:
        return getter(include_rng=include_rng)
    return getter()


def _put_own_state(layers: Sequence[Any], pair: tuple[str, str], extra: tuple[Any, Any], seed: int | None) -> None:
    state, np_random = extra
    base = layers[-1]
    setter = getattr(base, pair[1])
    emulator = layers[-2] if len(layers) > 1 and isinstance(layers[-2], LastAction) else None
    if emulator is not None:
        press_again(emulator)
    setter(state)
    if base._np_random is None or np_random is None:
        base._np_random = np_random
    else:  # in place: the environment may hold it under another name too
        base._np_random.bit_generator.state = np_random.bit_generator.state
    if seed is not None and "include_rng" in inspect.signature(getattr(base, pair[0])).parameters:
        # An emulator's random state comes with a seeded reset only; the state without it goes on top.
        bare = _own_state(base, pair, include_rng=False)
        base.reset(seed=seed)
        if emulator is not None:
            press_again(emulator)
        setter(bare)
