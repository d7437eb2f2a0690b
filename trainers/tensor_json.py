"""Python values as JSON, with their tensors and arrays aside: nothing is pickled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from turntree.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["decode", "encode"]

# What JSON lacks is written as an object with one of these keys. A dict that is not plain (other keys than strings,
# or one of these) is written as its list of pairs.

_TAGS = frozenset({"$tensor", "$array", "$tuple", "$dict", "$float"})


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` as JSON data; its tensors and arrays are added to ``tensors``, each under a key of its own.

    ``where``: the path of ``value``, for keys and errors. Raises :class:`CheckpointError` for anything that is not JSON
    data, a tuple, a tensor or a numeric array.
    """
    import torch

    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _add(value, where, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _add(torch.from_numpy(np.array(value)), where, tensors)}
    if isinstance(value, np.generic):
        return encode(value.item(), where, tensors)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{where}/{i}", tensors) for i, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(
        f"checkpoint state at {where or '/'} is a {type(value).__name__}; expected JSON data, tuples, tensors or "
        "numeric arrays. Convert it before saving: nothing is pickled"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    pairs = [(key, encode(item, f"{where}/{key}", tensors)) for key, item in value.items()]
    if all(isinstance(key, str) for key in value) and _TAGS.isdisjoint(value):
        return dict(pairs)
    return {"$dict": [[encode(key, where, tensors), item] for key, item in pairs]}


def _add(tensor: torch.Tensor, where: str, tensors: dict[str, torch.Tensor]) -> str:
    key = f"{len(tensors):06d}{where}"
    # Always a copy: two entries may share memory, which safetensors refuses.
    tensors[key] = tensor.detach().cpu().clone().contiguous()
    return key


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The inverse of :func:`encode`."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (tag := next(iter(value))) in _TAGS:
        return _decode_tagged(tag, value[tag], tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_tagged(tag: str, body: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match tag:
        case "$tensor":
            return tensors[body]
        case "$array":
            return tensors[body].numpy()
        case "$tuple":
            return tuple(decode(item, tensors) for item in body)
        case "$float":
            return float(body)
        case _:
            return {decode(key, tensors): decode(item, tensors) for key, item in body}
