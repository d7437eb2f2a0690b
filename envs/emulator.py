"""What the state of an Atari emulator lacks: the action that sticky actions would repeat."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import gymnasium

__all__ = ["LastAction", "press_again", "with_last_action"]

Env: TypeAlias = gymnasium.Env[Any, Any]

_UNLIKELY = 1e-12


class LastAction(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Remembers the last action that reached the emulator, as a part of the wrappers' state."""

    last: Any = None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.last = action
        return self.env.step(action)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.last = None
        return self.env.reset(seed=seed, options=options)

    @property
    def spec(self) -> Any:  # type: ignore[override]  # as Gymnasium's own wrappers do
        """The environment's own: this wrapper is not visible from outside."""
        return self.env.spec


def with_last_action(env: Env) -> Env:
    """``env``, with a :class:`LastAction` next to the environment itself if that is an Atari emulator (``ale-py``)."""
    base: Any = env.unwrapped
    if not hasattr(getattr(base, "ale", None), "getFloat"):
        return env
    layer: Any = env
    outer = None
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, LastAction):
            return env
        outer, layer = layer, layer.env
    if outer is None:
        return LastAction(env)
    outer.env = LastAction(base)
    return env


def press_again(wrapper: Any) -> None:
    """Make the remembered action the one that the emulator repeats; its state must be restored afterwards.

    With sticky actions (``repeat_action_probability``, 0.25 by default) each frame repeats the frame's before instead
    of taking the new one. ``cloneState`` does not hold it, so it is pressed until it has been taken almost surely.
    """
    base: Any = wrapper.env
    chance = base.ale.getFloat("repeat_action_probability")
    if not 0.0 < chance < 1.0:
        return
    for _ in range(math.ceil(math.log(_UNLIKELY) / math.log(chance))):
        if wrapper.last is None:
            base.ale.act(base._action_set[0])
        else:
            base.step(wrapper.last)
