"""What a configuration names by import path: found, given its arguments, and tried before anything is sampled."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from turntree.envs.core import TextTool
from turntree.envs.grammar import Grammar, reading_tools, speaking
from turntree.envs.loading import check_arguments, construct
from turntree.envs.prompt import PromptTemplate
from turntree.envs.rewards import Reward
from turntree.envs.rewards import load_reward as find_reward
from turntree.envs.tools import load_tools, tool_spec
from turntree.errors import ConfigError
from turntree.search_backend import SearchBackend
from turntree.trainers.compose import import_object
from turntree.trainers.config import EnvConfig, RewardConfig
from turntree.trainers.probe import probe_backend, probe_grammar, probe_reward, require_function, require_rule

__all__ = [
    "load_backend",
    "load_batched",
    "load_env",
    "load_reward",
    "load_rule",
    "spelled",
]

_SECRET = re.compile(r"authoriz|cookie|secret|passw|token|(^|[-_])(auth|apikey|key)$", re.IGNORECASE)


def spelled(option: str, path: str, arguments: Mapping[str, Any], *, args: str = "") -> str:
    """The option as messages name it, with the arguments that may be at fault. ``args``: theirs, if not option_args."""
    given = " ".join(f"{args or f'{option}_args'}.{name}={value}" for name, value in arguments.items())
    return f"{option}={path} {given}".rstrip()


def load_rule(path: str, arguments: Mapping[str, Any], *, option: str) -> Any:
    """A function with its arguments bound."""
    rule = require_rule(import_object(path, option=option), option=f"{option}={path}")
    try:
        return _bound(rule, arguments, what=f"{option}_args")
    except ConfigError as error:
        raise ConfigError(f"{error}; ~{option}_args.NAME takes back what a recipe gave") from error


def load_batched(path: str, arguments: Mapping[str, Any], *, option: str) -> Any:
    """A scorer or finisher; None without a path. A class or factory is called with the arguments."""
    if not path:
        if arguments:
            raise ConfigError(f"{option}_args={dict(arguments)} is given but {option} is empty; name what takes them")
        return None
    found = require_rule(import_object(path, option=option), option=f"{option}={path}")
    made = _applied(found, arguments, what=f"{option}={path}", args=f"{option}_args")
    return require_function(made, option=f"{option}={path}")


def load_reward(config: RewardConfig) -> Reward:
    """The reward function with ``reward.args``, after it judged a few outcomes."""
    option = f"reward.name={config.name}"
    try:
        found = require_rule(find_reward(config.name, what="reward.name"), option=option)
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(option) else f"{option}: {message}") from None
    reward: Reward = _applied(found, config.args, what=option, args="reward.args")
    probe_reward(reward, option=spelled("reward.name", config.name, config.args, args="reward.args"))
    return reward


def load_backend(path: str, arguments: Mapping[str, Any]) -> SearchBackend:
    """What a factory of search backends makes of the corpus and ``search.args``."""
    option = f"search.backend={path}"
    return probe_backend(_made(path, arguments, option="search.backend", args="search.args"), option=option)


def load_env(config: EnvConfig) -> tuple[Grammar, PromptTemplate | None, dict[str, TextTool]]:
    """The grammar, the prompt that replaces its instructions, and the tools, which the grammar was tried with."""
    option = f"env.grammar={config.grammar}"
    grammar = probe_grammar(
        _made(config.grammar, config.grammar_args, option="env.grammar", args="env.grammar_args"), option=option
    )
    with _naming(f"env.language={config.language} with {option}"):
        grammar = speaking(grammar, cast("Any", config.language))
    _refuse_secrets(config.tools)
    tools = load_tools(config.tools, what="env.tools")
    with _naming(f"{option} with env.tools"):
        reading_tools(grammar, [tool_spec(name, tool) for name, tool in tools.items()])
    with _naming("env.prompt"):
        prompt = PromptTemplate.read(config.prompt) if config.prompt else None
    return grammar, prompt, tools


def _refuse_secrets(tools: Mapping[str, Any]) -> None:
    """A key among the headers of an MCP server would be stored with the run, and in every result."""
    for name, tool in tools.items():
        server = tool.get("mcp") if isinstance(tool, Mapping) else None
        headers = server.get("headers") if isinstance(server, Mapping) else None
        for header in headers if isinstance(headers, Mapping) else ():
            if _SECRET.search(str(header)):
                raise ConfigError(
                    f"env.tools.{name}.mcp.headers.{header} holds a key, which would be stored with the run; name the "
                    f"environment variable that holds the header's value: env.tools.{name}.mcp.header_env.{header}=NAME"
                )


@contextmanager
def _naming(option: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _made(path: str, arguments: Mapping[str, Any], *, option: str, args: str) -> Any:
    factory = import_object(path, option=option)
    check_arguments(factory, arguments, what=args if callable(factory) else f"{option}={path}")
    return construct(factory, arguments, what=f"{option}={path}")


def _bound(function: Callable[..., Any], arguments: Mapping[str, Any], *, what: str) -> Any:
    """``functools.partial`` that keeps the attributes of a rule (``needs``)."""
    if not arguments:
        return function
    check_arguments(function, arguments, what=what)
    bound: Any = functools.update_wrapper(functools.partial(function, **arguments), function)
    del bound.__wrapped__  # the signature is that of what is left, not of the whole function
    return bound


def _applied(found: Any, arguments: Mapping[str, Any], *, what: str, args: str) -> Any:
    """A function with its arguments bound, or what a class or factory makes of them."""
    if not _is_factory(found, arguments):
        return _bound(found, arguments, what=args)
    check_arguments(found, arguments, what=args)
    return construct(found, arguments, what=what)


def _is_factory(found: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments are all that it waits for: a function that still lacks one is given it with each call."""
    if inspect.isclass(found):
        return True
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:  # compiled functions may have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return not any(
        p.kind is p.VAR_POSITIONAL or (p.kind in positional and p.default is p.empty and p.name not in arguments)
        for p in parameters
    )
