"""Refuses test runs in which a room was imported under its bare folder name (two copies of every class)."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile("turntree", deadline=None)
if settings.get_current_profile_name() == "default":
    settings.load_profile("turntree")

# Tests never reach a model hub, whatever the machine's settings are.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts a job in the background lets it ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

BARE = ("envs", "agents", "trainers", "search_backend", "configs")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    bare = [name for name in BARE if name in sys.modules]
    if bare:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nBare modules were imported: {bare}. Import turntree.<room> instead.")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of golden JSON files: ``$TURNTREE_FIXTURES``, else ``tests/golden``."""
    return Path(os.environ.get("TURNTREE_FIXTURES") or Path(__file__).parent / "tests" / "golden")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real questions and corpora: ``$TURNTREE_SHARED``/data, else ``../shared/data``; skips where absent."""
    base = Path(os.environ.get("TURNTREE_SHARED") or Path(__file__).parent.parent / "shared")
    if not (base / "data").is_dir():
        pytest.skip(f"real data sets not found at {base / 'data'} (set TURNTREE_SHARED)")
    return base / "data"
