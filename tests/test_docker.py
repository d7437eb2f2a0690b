"""The container file against the repository: what it copies and installs is there, and it runs as nobody special."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of every line, continued ones joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    return [(word, rest.strip()) for line in lines if line for word, _, rest in [line.partition(" ")]]


def test_it_copies_what_is_there_and_all_rooms() -> None:
    copied = [part for word, rest in instructions() if word == "COPY" for part in rest.split()[1:-1]]
    assert all((ROOT / part).exists() for part in copied), copied
    links = {link.name for link in (ROOT / "src" / "turntree").iterdir() if link.is_symlink()}
    assert links <= set(copied)
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src"} <= set(copied)


def test_it_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"/opt/turntree\[([a-z0-9,-]+)\]", TEXT)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (vllm,) = project["optional-dependencies"]["vllm"]
    assert f"pip install '{vllm}" in TEXT
    assert dict(instructions())["ENTRYPOINT"] == '["turntree"]'
    assert "turntree" in project["scripts"]


def test_it_is_not_root_and_opens_no_port() -> None:
    words = [word for word, _ in instructions()]
    assert "EXPOSE" not in words
    user = words.index("USER")
    assert all(word != "USER" for word in words[user + 1 :])
    assert "pip install" not in " ".join(rest for _, rest in instructions()[:user])
    assert dict(instructions())["USER"] == "${UID}"
