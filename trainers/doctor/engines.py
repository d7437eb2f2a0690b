"""Which engine ``engine=auto`` is here, and what answers at ``engine.base_url``."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from turntree.agents.engines.choose import ServerKind, choose, inspect_machine
from turntree.trainers.config import RunConfig

__all__ = ["model_gb", "resolve_engine", "server_kind"]


def model_gb(path: str) -> float | None:
    """Size of the weights in a model folder, in GB; None where there are none."""
    folder = Path(path)
    try:
        if not path or not folder.is_dir():
            return None
        sizes = [f.stat().st_size for kind in ("*.safetensors", "*.bin") for f in folder.glob(kind)]
    except OSError:  # a link to nowhere, a name that is too long
        return None
    return sum(sizes) / 1e9 if sizes else None


def server_kind(config: RunConfig, *, timeout_s: float = 1.5) -> ServerKind:
    """What answers ``GET engine.base_url/models``; '' without an address. Nothing else is contacted."""
    import httpx2

    if not config.engine.base_url:
        return ""
    key = os.environ.get(config.openai.api_key_env, "").strip() if config.openai.api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key.isascii() and key.isprintable() and key else {}
    try:
        with httpx2.Client(timeout=timeout_s, trust_env=False, headers=headers) as client:
            answer = client.get(f"{config.engine.base_url.rstrip('/')}/models")
        rows = answer.json().get("data", []) if answer.status_code == 200 else []
        return "vllm" if any(row.get("owned_by") == "vllm" for row in rows) else "other"
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return "unreachable"
    except (ValueError, AttributeError, TypeError):
        return "other"


def resolve_engine(config: RunConfig, *, trains: bool) -> tuple[RunConfig, str]:
    """The configuration with ``engine=auto`` replaced by the engine of this machine, and why ('' without auto)."""
    if config.engine.name != "auto":
        return config, ""
    machine = inspect_machine(server=server_kind(config))
    choice = choose(machine, model_gb=model_gb(config.model.path), trains=trains)
    return replace(config, engine=replace(config.engine, name=choice.engine)), choice.reason
