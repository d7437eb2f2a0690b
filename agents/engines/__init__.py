"""Generation engines behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turntree.agents.engines.protocol import (
    Engine,
    EntropyKind,
    FinishReason,
    Generation,
    Prefix,
    Request,
    SamplingParams,
)
from turntree.agents.engines.scripted import ScriptedEngine

if TYPE_CHECKING:
    from turntree.agents.engines.hf import HFEngine

__all__ = [
    "Engine",
    "EntropyKind",
    "FinishReason",
    "Generation",
    "HFEngine",
    "Prefix",
    "Request",
    "SamplingParams",
    "ScriptedEngine",
]


def __getattr__(name: str) -> Any:
    # HFEngine needs torch and transformers; scripted tests and the command line's help should not wait for them.
    if name == "HFEngine":
        from turntree.agents.engines.hf import HFEngine

        return HFEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
