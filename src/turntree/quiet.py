"""Quiet loading: what libraries print beside the caller's own progress bars."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["quiet_progress"]


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of transformers inside: one small file needs none beside the caller's own."""
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        # Saving a model imports DeepSpeed where it is installed, which without a word warns that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    library: Any = logging
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()
