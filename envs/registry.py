"""Environments by their Gymnasium id, those of installed packages included.

Gymnasium (1.4) knows the entry-point group ``gymnasium.envs`` but does not load it; :func:`load_plugins` does.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import namespace

from turntree.envs.turn_env import TurnEnv
from turntree.errors import ConfigError, TurnTreeError

__all__ = ["find_spec", "load_plugins", "open_env", "turn_env"]

_log = logging.getLogger(__name__)

GROUP = "gymnasium.envs"


@functools.cache
def load_plugins() -> dict[str, str]:
    """Call the entry points of the group ``gymnasium.envs`` once; why those that failed did, by name.

    The entry point's name is the namespace of the ids that its function registers without one, as Gymnasium had it;
    ``__root__`` and ``__internal__`` mean none.
    """
    failed: dict[str, str] = {}
    for plugin in entry_points(group=GROUP):
        try:
            _load(plugin)
        except Exception as error:  # other people's packages may fail in any way
            failed[plugin.name] = f"{type(error).__name__}: {error}"
            _log.warning("the environments of %s (%s) could not be registered: %s", plugin.name, plugin.value, error)
    return failed


def _load(plugin: EntryPoint) -> None:
    register = plugin.load()
    inside = contextlib.nullcontext() if plugin.name in ("__root__", "__internal__") else namespace(plugin.name)
    failure: Exception | None = None
    with inside:
        # Gymnasium's namespace does not end by an exception: every later registration would fall into it.
        try:
            if callable(register):
                register()
        except Exception as error:
            failure = error
    if failure is not None:
        raise failure


def find_spec(name: str, *, what: str = "env.id") -> Any:
    """The registered spec of ``name``, which may have the form ``module:id``; plug-ins are loaded if it needs them.

    Raises ``ConfigError`` for a name that is not registered, with the nearest one.
    """
    module, _, bare = name.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # a module of the user's may fail in any way
            raise ConfigError(f"{what}={name}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    if bare not in gymnasium.registry:
        failed = load_plugins()
        if bare not in gymnasium.registry:
            raise ConfigError(f"{what}={name}: no environment of this id is registered{_hint(bare, failed)}")
    return gymnasium.registry[bare]


def _hint(name: str, failed: Mapping[str, str]) -> str:
    close = difflib.get_close_matches(name, list(gymnasium.registry), n=1)
    why = failed.get(name.partition("/")[0])
    said = f" (did you mean {close[0]!r}?)" if close else ""
    said += f"; its package failed to register: {why}" if why else ""
    return f"{said}; install its package (entry-point group {GROUP}), or write module:id to import one first"


def open_env(name: str, arguments: Mapping[str, Any], *, what: str = "env.id") -> gymnasium.Env[Any, Any]:
    """Make the environment with ``arguments``. Whatever it cannot do with them is a ``ConfigError`` that names it."""
    spec = find_spec(name, what=what)
    try:
        made: gymnasium.Env[Any, Any] = gymnasium.make(spec, disable_env_checker=True, **arguments)
    except Exception as error:  # environments of other people may fail in any way
        if isinstance(error, TurnTreeError) and not isinstance(error, ConfigError):
            raise
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}={name}: {kind}{error}") from error
    return made


def turn_env(name: str, arguments: Mapping[str, Any], *, what: str = "env.id") -> TurnEnv[Any]:
    """The :class:`TurnEnv` of an id: its core, tasks and limits are what a rollout plays.

    Raises ``ConfigError`` for any other environment, and for one with a wrapper's time limit, which a core cannot see.
    """
    env = open_env(name, arguments, what=what)
    inner = env.unwrapped
    if not isinstance(inner, TurnEnv):
        raise ConfigError(
            f"{what}={name}: expected a turntree.envs.TurnEnv, found {type(inner).__name__}; a rollout plays pure "
            "cores: write the rules as an AgentTask (docs/new-environment.md)"
        )
    limit = getattr(env.spec, "max_episode_steps", None)
    if limit is not None:
        raise ConfigError(
            f"{what}={name} is registered with max_episode_steps={limit}, a wrapper's counter that does not survive a "
            "restore; register it without, and set the task's own max_turns"
        )
    return inner
