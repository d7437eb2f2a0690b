"""What a trained value head says of finished trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from turntree.errors import ConfigError
from turntree.trainers.tree import Node

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["load_valuer"]


def load_valuer(model: PreTrainedModel, checkpoint: str | Path) -> Callable[[Sequence[Node]], list[float]]:
    """A function from leaves to values, of the head in ``checkpoint`` on the weights of ``model``.

    The value is that of the state in which the last token was sampled: heads are trained on states before tokens, never
    on the one after the last. Raises ``ConfigError`` for a checkpoint without a value head, or of another size.
    """
    import torch

    from turntree.trainers.checkpoint import load_state
    from turntree.trainers.value_head import ValueHead

    state = load_state(checkpoint)
    if "value_head" not in state:
        raise ConfigError(
            f"eval.value_head={checkpoint}: expected the checkpoint of a run with a value head (algorithm=ppo), found "
            f"only {sorted(state)}"
        )
    head = ValueHead.of(model)
    try:
        head.load_state_dict(state["value_head"])
    except RuntimeError as error:
        raise ConfigError(f"eval.value_head={checkpoint} does not fit model.path: {error}") from None

    def values(leaves: Sequence[Node]) -> list[float]:
        device = next(model.parameters()).device
        with torch.no_grad():
            return [float(head(_last_state(model, _before_last(leaf), device))) for leaf in leaves]

    return values


def _last_state(model: PreTrainedModel, ids: Sequence[int], device: Any) -> Any:
    import torch

    output = cast("Any", model).get_decoder()(input_ids=torch.tensor([ids], device=device), use_cache=False)
    return output.last_hidden_state[0, -1]


def _before_last(leaf: Node) -> list[int]:
    """All tokens up to the one before the trajectory's last sampled token."""
    path = leaf.trajectory()
    root = path[0].parent if path else leaf
    ids = list(root.observation_ids) if root is not None else []
    end = len(ids)
    for node in path:
        ids += node.turn_ids
        end = len(ids) if node.turn_ids else end
        ids += node.observation_ids
    return ids[: max(1, end - 1)]
