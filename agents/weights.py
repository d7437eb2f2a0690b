"""Whose weights lie in a model folder, by content."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__all__ = ["weights_hash"]

_SAMPLED_ABOVE = 4 << 30
_CHUNK = 1 << 20


def weights_hash(folder: str | Path) -> str:
    """Hash of the weights in a Hugging Face folder; '' where there are none.

    All bytes up to 4 GiB; of larger ones sizes and 64 MiB spread evenly over each file, and ``sampled:`` says so.
    """
    files = sorted(p for p in Path(folder).glob("*.safetensors") if p.is_file()) if folder else []
    stamps = tuple((str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    return _hash_files(stamps) if files else ""


@functools.lru_cache(maxsize=8)
def _hash_files(files: tuple[tuple[str, int, int], ...]) -> str:
    sampled = sum(size for _, size, _ in files) > _SAMPLED_ABOVE
    digest = hashlib.sha256()
    for name, size, _ in files:
        digest.update(f"{Path(name).name}:{size}\n".encode())
        step = max(_CHUNK, size // 64) if sampled else _CHUNK
        with Path(name).open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(_CHUNK))
    return ("sampled:" if sampled else "") + digest.hexdigest()[:16]
