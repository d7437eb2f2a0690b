"""The law that another process continues a snapshot in the same way."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from typing import Any, TypeAlias

import cloudpickle  # type: ignore[import-untyped]
import gymnasium

from turntree.envs.fork_laws import Case, ForkLawError, play_frames, same_frames
from turntree.envs.values import difference

__all__ = ["process"]

Env: TypeAlias = gymnasium.Env[Any, Any]


def process(case: Case, timeout_s: float) -> None:
    """A new interpreter builds the environment, restores the snapshot and plays on."""
    turn = case.middle()
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
    if difference(case.frames[turn].observation, observation) is not None:
        raise ForkLawError(
            f"process: last observation of turn {turn}: expected {case.frames[turn].observation!r:.300}, found "
            f"{observation!r:.300}"
        )
    same_frames("process", f"in another process from turn {turn}", case.frames[turn + 1 :], frames, turn + 1)


def _builder(env: Env) -> Any:
    """The environment's spec where it has one, so that the other process builds its own handles; else itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spec = env.spec
    if spec is not None and all(wrapper.kwargs is not None for wrapper in spec.additional_wrappers):
        return spec
    return env


def _ask(payload: bytes, timeout_s: float) -> tuple[Any, list[Any]]:
    """Run :func:`_serve` in a new interpreter with this one's import path."""
    command = [sys.executable, "-P", "-c", "from turntree.envs.fork_process import _serve; _serve()"]
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
    answer: tuple[Any, list[Any]] = pickle.loads(done.stdout)  # noqa: S301  # of the child started above
    return answer


def _serve() -> None:
    """Read a request from stdin, continue its snapshot, and write the frames to stdout."""
    output, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
    os.dup2(2, 1)  # what compiled libraries print must not end up in the answer
    builder, snapshot, actions = pickle.loads(sys.stdin.buffer.read())  # noqa: S301  # of the parent
    env = builder if isinstance(builder, gymnasium.Env) else gymnasium.make(builder)
    observation, _ = env.reset(options={"snapshot": snapshot})
    with output:
        output.write(pickle.dumps((observation, play_frames(env, actions))))
