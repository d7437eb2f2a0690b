"""A turn environment as a TorchRL environment whose state travels in the tensordict.

TorchRL's ``GymWrapper`` takes any turn environment too, for linear rollouts: it has no state to branch from. This is
the only module of ``turntree.envs`` that imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase

from turntree.envs.snapshot import Snapshot
from turntree.envs.turn_env import TurnEnv
from turntree.envs.vector import TurnVectorEnv
from turntree.errors import SnapshotError

__all__ = ["SnapshotEnv"]

S = TypeVar("S")


class SnapshotEnv(EnvBase, Generic[S]):  # type: ignore[misc]  # torchrl has no type information
    """A stateless environment: a step reads ``snapshot`` and ``action`` from the tensordict it is given.

    Keys: ``action`` and ``observation`` (texts), ``snapshot`` (a :class:`Snapshot`, with the turn's info in it), reward
    and done flags of shape ``(*batch_size, 1)``. With ``num_envs`` the batch size is ``(num_envs,)`` and the tool calls
    of a step are one batch; without, it is ``()``.

    To branch, keep any tensordict and step, or ``rollout(..., tensordict=kept, auto_reset=False)``, from it as often as
    you like; the kept one does not change. ``reset`` starts new episodes, whatever snapshot it is given, and takes
    ``options`` as ``TurnVectorEnv.reset`` does. Raises what the environment raises: ``ToolError`` for tools that fail,
    ``ResetNeeded`` for a step after the end.
    """

    def __init__(self, env: TurnEnv[S], num_envs: int | None = None) -> None:
        super().__init__(batch_size=torch.Size([] if num_envs is None else [num_envs]))
        # Two, so that new episodes are drawn from one stream, whatever snapshots were stepped from in between.
        self._starting, self._playing = (TurnVectorEnv(env, num_envs or 1) for _ in range(2))
        self._next_seed: int | None = None
        shape, flag = self.batch_size, torch.Size([*self.batch_size, 1])
        snapshot = NonTensor(shape=shape, example_data=None)
        self.observation_spec = Composite(
            observation=NonTensor(shape=shape, example_data=""), snapshot=snapshot, shape=shape
        )
        # With the snapshot in the state alone, a rollout would read the first one at every step.
        self.state_spec = Composite(snapshot=snapshot.clone(), shape=shape)
        self.action_spec = Composite(action=NonTensor(shape=shape, example_data=""), shape=shape)
        self.reward_spec = Composite(reward=Unbounded(shape=flag, dtype=torch.float32), shape=shape)
        flags = {name: Binary(n=1, shape=flag, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
        self.done_spec = Composite(flags, shape=shape)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Write random turns of the action space into ``tensordict``."""
        found = tensordict if tensordict is not None else TensorDict(batch_size=self.batch_size)
        found["action"] = self._data([self._playing.single_action_space.sample() for _ in self._playing.envs])
        return found

    def _reset(
        self, tensordict: TensorDictBase | None, *, options: dict[str, Any] | None = None, **_: Any
    ) -> TensorDictBase:
        """New episodes where the tensordict's ``_reset`` says so, everywhere without it."""
        mask = self._mask(tensordict, "_reset")
        started, _ = self._starting.reset(seed=self._next_seed, options={**(options or {}), "reset_mask": mask})
        self._next_seed = None
        # TorchRL itself puts what the others had in place of theirs.
        rows = [(started[i], self._starting.snapshot(i)) if new else ("", None) for i, new in enumerate(mask)]
        return self._tensordict([text for text, _ in rows], [snapshot for _, snapshot in rows])

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """One turn of each, except where the tensordict's ``_step`` says no: there the state stays as it is."""
        snapshots = self._list(tensordict, "snapshot")
        if not all(isinstance(snapshot, Snapshot) for snapshot in snapshots):
            raise SnapshotError(f"expected a Snapshot under 'snapshot', found {snapshots!r:.200}; start with reset()")
        self._playing.reset(options={"per_env": [{"snapshot": snapshot} for snapshot in snapshots]})
        turns = zip(self._list(tensordict, "action"), self._mask(tensordict, "_step"), strict=True)
        observations, rewards, *flags, _ = self._playing.step([text if played else None for text, played in turns])
        found = self._tensordict(observations, self._playing.snapshots())
        found["reward"] = self._column(rewards, torch.float32)
        found["terminated"], found["truncated"] = (self._column(flag, torch.bool) for flag in flags)
        found["done"] = found["terminated"] | found["truncated"]
        return found

    def _set_seed(self, seed: int | None) -> None:
        """The next reset uses ``seed`` (the following ones for further environments of the batch)."""
        self._next_seed = seed
        self._playing.single_action_space.seed(seed)

    # -- to and from tensordicts -----------------------------------------------------------------------------

    def _tensordict(self, observations: Sequence[str], snapshots: Sequence[Any]) -> TensorDictBase:
        data = {"observation": self._data(observations), "snapshot": self._data(snapshots)}
        return TensorDict(data, batch_size=self.batch_size)

    def _data(self, values: Sequence[Any]) -> NonTensorData | NonTensorStack:
        if not self.batch_size:
            return NonTensorData(values[0])
        return NonTensorStack(*map(NonTensorData, values))  # pyright: ignore[reportAbstractUsage]

    def _list(self, tensordict: TensorDictBase, key: str) -> list[Any]:
        value = tensordict[key]
        return list(value) if self.batch_size else [value]

    def _mask(self, tensordict: TensorDictBase | None, key: str) -> NDArray[np.bool_]:
        mask = None if tensordict is None else tensordict.get(key, None)
        return np.ones(self._playing.num_envs, dtype=np.bool_) if mask is None else mask.reshape(-1).cpu().numpy()

    def _column(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).reshape(*self.batch_size, 1)
