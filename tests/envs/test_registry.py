"""Environments are found by id, those of installed packages too, and what is wrong with one is said."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest

from turntree.envs import SearchQAEnv
from turntree.envs.registry import find_spec, load_plugins, open_env, turn_env
from turntree.errors import ConfigError

PACKAGE = """
import gymnasium
from turntree.envs import SearchQAEnv

def register():
    gymnasium.register(id="Plain-v0", entry_point="registry_plugin:SearchQAEnv")
    gymnasium.register(id="Limited-v0", entry_point="registry_plugin:SearchQAEnv", max_episode_steps=3)

def broken():
    raise RuntimeError("no display")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package on the path with two entry points, one of which fails."""
    (tmp_path / "registry_plugin.py").write_text(PACKAGE)
    info = tmp_path / "registry_plugin-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: registry-plugin\nVersion: 1\n")
    entries = "[gymnasium.envs]\nregistry_plugin = registry_plugin:register\nregistry_broken = registry_plugin:broken\n"
    (info / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins.cache_clear()
    yield
    load_plugins.cache_clear()
    sys.modules.pop("registry_plugin", None)
    for name in [name for name in gymnasium.registry if name.startswith("registry_")]:
        del gymnasium.registry[name]


def test_ids_of_installed_packages_are_found(plugin: None) -> None:
    assert "registry_plugin/Plain-v0" not in gymnasium.registry
    env = turn_env("registry_plugin/Plain-v0", {"max_turns": 2})
    assert isinstance(env, SearchQAEnv)
    assert env.core.limits.max_turns == 2


def test_a_package_that_fails_is_named_and_stops_nothing(plugin: None) -> None:
    with pytest.raises(ConfigError, match=r"registry_broken/X-v0: no environment.*RuntimeError: no display"):
        find_spec("registry_broken/X-v0")
    assert "registry_plugin/Plain-v0" in gymnasium.registry


def test_what_is_registered_after_a_package_that_failed_keeps_its_own_name(plugin: None) -> None:
    load_plugins()
    gymnasium.register("registry_later/Own-v0", entry_point=SearchQAEnv)
    assert "registry_later/Own-v0" in gymnasium.registry
    gymnasium.register("RegistryBare-v0", entry_point=SearchQAEnv)
    assert "RegistryBare-v0" in gymnasium.registry
    del gymnasium.registry["RegistryBare-v0"]


def test_a_limit_of_a_wrapper_is_refused(plugin: None) -> None:
    with pytest.raises(ConfigError, match="max_episode_steps=3"):
        turn_env("registry_plugin/Limited-v0", {})


def test_unknown_ids_get_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'turntree/SearchQA-v0'"):
        find_spec("turntree/SearchQ-v0")
    with pytest.raises(ConfigError, match="cannot import 'no_such_module'"):
        find_spec("no_such_module:X-v0")
    assert find_spec("turntree.envs:turntree/SearchQA-v0").id == "turntree/SearchQA-v0"


def test_wrong_arguments_name_the_environment_and_the_argument() -> None:
    with pytest.raises(ConfigError, match=r"env\.id=turntree/SearchQA-v0.*'max_turn'.*did you mean 'max_turns'"):
        open_env("turntree/SearchQA-v0", {"max_turn": 3})


def test_environments_without_a_core_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a turntree\.envs\.TurnEnv, found CartPoleEnv"):
        turn_env("CartPole-v1", {})
