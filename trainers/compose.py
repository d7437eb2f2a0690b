"""From YAML files and overrides to a checked :class:`RunConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.errors import ConfigError
from turntree.trainers.config import RunConfig, documented_options
from turntree.trainers.options import did_you_mean

__all__ = ["compose", "config_groups", "import_object", "read_config"]

# What env=... means an environment by its id with, and not a choice of the config group.
_ENV_ID = re.compile(r"^env=(?=.*(?:[/:]|-v\d+$))")
# All that Hydra reads in a text without quotes.
_GRAMMAR = re.compile(r"[^A-Za-z0-9_/\-+.$%*@?|: ]")
_LITERAL = re.compile(r"(?i:true|false)|[-+.]?\d[\w.+-]*")


def config_dir() -> Path:
    """The folder of the packaged YAML files."""
    import turntree.configs

    return Path(turntree.configs.__file__).parent


def config_groups() -> dict[str, list[str]]:
    """Config groups and their choices: ``{"algorithm": ["at2po", "grpo", ...], ...}``."""
    return {
        folder.name: sorted(p.stem for p in folder.glob("*.yaml"))
        for folder in sorted(config_dir().iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """Compose ``configs/config.yaml`` with Hydra overrides (``algorithm=at2po trainer.steps=20``).

    Raises:
        ConfigError: an unknown key (with a did-you-mean), a wrong type, a value out of range.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    ConfigStore.instance().store(name="schema", node=_schema())
    checked = [_checked(_ENV_ID.sub("env.id=", override, count=1)) for override in overrides]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir().resolve()), version_base="1.3"):
            node = hydra_compose("config", overrides=checked)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).split("Config search path")[0].strip()
        cause = f" ({str(error.__cause__).splitlines()[0]})" if error.__cause__ and str(error.__cause__) else ""
        raise ConfigError(f"cannot compose the configuration from {list(overrides)}: {reason}{cause}") from None
    return _to_config(node)


def read_config(saved: Mapping[str, Any]) -> RunConfig:
    """The configuration of a run as it was saved, whose texts are what they are: ``${oc.env:NAME}`` is not looked up.

    Raises ``ConfigError`` where it does not fit this version.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        node = OmegaConf.create(_literal(dict(saved)))
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"the configuration cannot be read: {str(error) or type(error).__name__}") from None
    return _to_config(node)


def _literal(value: Any) -> Any:
    """Data without interpolations: ``${`` in texts is escaped."""
    if isinstance(value, Mapping):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _schema() -> Any:
    """The schema as a typed node that can still be written to (frozen dataclasses give read-only nodes)."""
    from omegaconf import OmegaConf

    node = OmegaConf.structured(RunConfig)
    for section in (node, *(node[key] for key in node if OmegaConf.is_config(node[key]))):
        OmegaConf.set_readonly(section, False)
    return node


def _to_config(node: Any) -> RunConfig:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(_schema(), node)
        config = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"the configuration does not fit its schema: {reason}") from None
    if not isinstance(config, RunConfig):
        raise ConfigError(f"expected a run configuration, found {type(config).__name__}")
    return config


def _checked(override: str) -> str:
    """The override in Hydra's grammar, after its key was found among the documented options.

    Keys inside free-form options (``algorithm.credit_args.estimator=intra``) need Hydra's ``++``; users need not know.
    ``~algorithm.credit_args.kappa`` takes back what a recipe gave.
    """
    options = {key: default for key, default, _ in documented_options()}
    groups = config_groups()
    key, eq, _ = override.partition("=")
    bare = key.lstrip("+~")
    free = any(f"{bare}.".startswith(f"{k}.") for k, default in options.items() if isinstance(default, dict))
    if not eq and not (free and key.startswith("~")):
        raise ConfigError(f"override {override!r} is not of the form key=value (such as trainer.steps=20)")
    if free:
        return override if key != bare else f"++{key}={_free(override[len(key) + 1 :])}"
    if bare not in groups and bare not in options:
        raise ConfigError(
            f"unknown option {bare!r}.{did_you_mean(bare, [*options, *groups])} "
            "`turntree train --help` lists every option."
        )
    value = override[len(key) + 1 :]
    if value.startswith("~/"):  # shells expand ~ at the start of a word only
        value = str(Path(value).expanduser())
    if isinstance(options.get(bare), list):
        return f"{key}={_list(value)}"
    return f"{key}={_quoted(value)}" if isinstance(options.get(bare), str) else override


def _list(value: str) -> str:
    """A list whose texts hold ``=`` (``[nq=my/file.jsonl]``) as Hydra reads it; others as they are."""
    inner = value.strip()[1:-1]
    if not (value.strip()[:1] == "[" and value.strip()[-1:] == "]" and "=" in inner) or set(inner) & set("[]{}()'\"\\"):
        return value
    return "[" + ",".join(_quoted(item.strip()) if "=" in item else item for item in inner.split(",")) + "]"


def _free(value: str) -> str:
    """A value of a free-form option: numbers, lists and mappings stay what they are, texts may be in any script."""
    return value if value.isascii() or value[:1] in ("[", "{") else _quoted(value)


def _quoted(text: str) -> str:
    """A text as Hydra reads it back: without quotes, brackets, commas and the like in paths would be its grammar, and
    ``true`` or ``1e3`` no text."""
    if text[:1] in ("'", '"') or not (_GRAMMAR.search(text) or _LITERAL.fullmatch(text)):
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"


def import_object(path: str, *, option: str) -> Any:
    """The object that ``package.module:name`` names.

    Raises:
        ConfigError: naming the option, with what was found in the module.
    """
    from turntree.envs import loading  # only now: composing a configuration needs no environment

    return loading.import_object(path, what=option)
