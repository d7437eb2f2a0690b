"""``turntree view``: a server, a file or a list."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.trainers.studio.stored import write_run
from turntree.cli import cli
from turntree.errors import ConfigError
from turntree.trainers.studio.serving import StudioSettings, bind

WITHOUT_FASTAPI = "import sys; sys.modules['fastapi'] = None; from turntree.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("view") / "run", steps=2, trees=2, leaves=4)


def call(*words: object) -> Any:
    return CliRunner().invoke(cli, ["view", *map(str, words)])


def python(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_serves_until_it_is_stopped(run: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "turntree.cli",
        "view",
        str(run),
        "--port",
        "0",
        "--step",
        "1",
        "--token-env",
        "VIEW_KEY",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "VIEW_KEY": "abcd1234"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?key=abcd1234#/\?step=1 ", line)
        assert found, line
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"{found[1]}/?key=abcd1234", timeout=30) as answer:
            assert b"turntree studio" in answer.read()
            assert answer.url == f"{found[1]}/"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) in (0, 130)
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()


def test_one_tree_as_a_file_needs_no_extra(run: Path, tmp_path: Path) -> None:
    for option in ("--html", "--out"):
        target = tmp_path / f"{option[2:]}.html"
        done = python(WITHOUT_FASTAPI, "view", run, "--step", "1", "--prompt", "1", option, target)
        assert done.returncode == 0, done.stderr
        assert "<html" in target.read_text(encoding="utf-8")
    assert python(WITHOUT_FASTAPI, "view", run, "--list").stdout.count("--prompt") == 4


def test_a_missing_extra_is_named(run: Path) -> None:
    done = python(WITHOUT_FASTAPI, "view", run)
    assert done.returncode == 1
    assert "turntree[studio]" in done.stderr
    assert "--html" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"), [(["--prompt", "9"], "--prompt 9"), (["--step", "8"], "no trees of step 8")]
)
def test_places_that_are_not_there_are_refused_before_anything_is_served(
    run: Path, words: list[str], message: str
) -> None:
    assert message in str(call(run, *words).exception)


def test_addresses_that_cannot_be_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = bind(StudioSettings(port=0))
    taken.listen()
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port}"):
        bind(StudioSettings(port=port))
    # The usual port gives way to a free one, unless it was asked for.
    monkeypatch.setattr("turntree.trainers.studio.serving.DEFAULT_PORT", port)
    other = bind(StudioSettings())
    assert other.getsockname()[1] not in (0, port)
    other.close()
    taken.close()
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(StudioSettings(host="no-such-host.invalid", port=0))


@pytest.mark.parametrize("value", ["", "short", "with space 123", "semi;colon99", "ünïcödé123"])
def test_weak_keys_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUDIO_KEY", value)
    with pytest.raises(ConfigError, match="at least 8"):
        StudioSettings(token_env="STUDIO_KEY").key()
    assert StudioSettings().key() != StudioSettings().key()
    assert len(StudioSettings().key()) >= 32


def test_help_loads_no_server_and_no_torch() -> None:
    code = "import sys, turntree.cli; print([m for m in ('fastapi', 'uvicorn', 'torch', 'numpy') if m in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_showing_trees_needs_no_torch(run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from turntree.trainers.studio.app import Studio, create_app; "
        "from turntree.trainers.studio.data import Library; create_app(Studio(Library(Path(sys.argv[1]))), key='k'); "
        "print('torch' in sys.modules)"
    )
    assert python(code, run).stdout.strip() == "False"
