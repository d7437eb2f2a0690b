"""Who holds weights, gradients and moments, and steps: the seam between the update loop and its means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from turntree.trainers.distributed.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from turntree.trainers.forward import PackedOutput
    from turntree.trainers.packing import Pack

__all__ = ["Gathered", "Single", "Strategy"]


@runtime_checkable
class Strategy(Protocol):
    """Takes gradients and steps. One mini-batch is: ``begin``, ``forward``, ``backward`` for each slot, then ``step``.

    ``state_dict`` is that of a plain ``torch.optim.AdamW`` over the trained parameters, whatever the strategy and the
    number of ranks, so that a checkpoint of any of them can be resumed with any other.
    """

    @property
    def ranks(self) -> Ranks:
        """The processes that train together."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups; their ``lr`` may be set before a step."""
        ...

    def begin(self, *, pieces: int, last: bool) -> None:
        """Announce the next pack: parts of its vocabulary projection, and whether the step follows it."""
        ...

    def forward(
        self, pack: Pack, *, temperature: float = 1.0, entropy: bool = False, value_head: nn.Module | None = None
    ) -> PackedOutput:
        """The packed forward pass with the weights that are trained; with values where there is a value head."""
        ...

    def backward(self, loss: Tensor | None) -> None:
        """Add the gradient of the last forward pass; None adds nothing and still takes part."""
        ...

    def step(self) -> float:
        """Clip, step, drop the gradients; the norm before clipping, not finite where nothing was stepped."""
        ...

    def sync(self) -> None:
        """Bring the weights that the rest of the program sees up to date; collective."""
        ...

    def adopt(self) -> None:
        """Train on from the weights that the rest of the program sees, and from moments just loaded; collective."""
        ...

    def train(self, mode: bool) -> None:
        """Training mode of the network, or evaluation mode."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Moments of all parameters, on the main rank; collective."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of :meth:`state_dict`, on every rank; :meth:`adopt` completes it."""
        ...


@dataclass(frozen=True, slots=True)
class Gathered:
    """A state that was gathered before, for a checkpoint that one rank writes."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise TypeError("a gathered state is written only; load into the strategy")


class Single:
    """One process with a torch optimiser: the network that everything sees is the one that is trained."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, *, parameters: Iterable[nn.Parameter], clip: float
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.parameters = list(parameters)
        self.clip = clip

    @property
    def ranks(self) -> Ranks:
        return ALONE

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def begin(self, *, pieces: int, last: bool) -> None:
        del pieces, last

    def forward(
        self, pack: Pack, *, temperature: float = 1.0, entropy: bool = False, value_head: nn.Module | None = None
    ) -> PackedOutput:
        from turntree.trainers.forward import packed_logprobs

        return packed_logprobs(self.network, pack, temperature=temperature, entropy=entropy, value_head=value_head)

    def backward(self, loss: Tensor | None) -> None:
        if loss is not None:
            loss.backward()

    def step(self) -> float:
        from turntree.trainers.updates import guarded_step

        return guarded_step(self.optimizer, self.parameters, max_grad_norm=self.clip)

    def sync(self) -> None:
        """Nothing to do."""

    def adopt(self) -> None:
        """Nothing to do."""

    def train(self, mode: bool) -> None:
        self.network.train(mode)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
