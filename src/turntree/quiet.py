"""Quiet loading: what libraries print beside the caller's own progress bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["quiet_progress"]


@contextmanager
def quiet_progress() -> Iterator[None]:
    """No progress bars of transformers inside: one small file needs none beside the caller's own."""
    from transformers.utils import logging

    library: Any = logging
    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()
