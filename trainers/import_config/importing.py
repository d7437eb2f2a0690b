"""From a file to a command: reading, recognising whose it is, translating, checking the result."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turntree.errors import ConfigError, DataError
from turntree.trainers.compose import compose, config_groups
from turntree.trainers.import_config.known import DEFAULTS, Flavour
from turntree.trainers.import_config.rules import ACTOR, ROLLOUT, RULES
from turntree.trainers.import_config.settings import Launch, Note, Setting
from turntree.trainers.import_config.shell import read_script
from turntree.trainers.import_config.surroundings import SURROUNDINGS
from turntree.trainers.import_config.translation import Entry, Translation, hidden
from turntree.trainers.import_config.yaml_file import read_yaml

__all__ = ["Imported", "import_config", "translate"]

_WORDS = {
    "same": "translated",
    "differs": "translated, but the meaning differs",
    "default": "not in the file: set by the other project's own defaults",
    "unresolved": "value not found out: set it by hand",
    "unknown": "not known to this translation: look it up",
    "none": "no counterpart",
    "handled": "needs nothing here",
    "replaced": "replaced by a later line",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """A translation. ``overrides`` are this project's options in Hydra's grammar, groups first; ``entries`` say what
    became of every setting, ``notes`` what else stood in the file; ``problem`` is why the options do not go together,
    '' where they do."""

    source: str
    program: str
    flavour: Flavour
    overrides: tuple[str, ...]
    entries: tuple[Entry, ...]
    notes: tuple[Note, ...]
    problem: str = ""

    def command(self) -> str:
        """The command line, a break after each option."""
        return " \\\n  ".join(("turntree train", *map(shlex.quote, self.overrides)))

    def yaml(self) -> str:
        """The overrides as nested YAML, with the command above."""
        from omegaconf import OmegaConf

        node = OmegaConf.from_dotlist([o for o in self.overrides if o.partition("=")[0] not in config_groups()])
        groups = "".join(f"# group {o}\n" for o in self.overrides if o.partition("=")[0] in config_groups())
        return f"# from {self.source}\n{groups}{OmegaConf.to_yaml(node)}"

    def lines(self) -> list[str]:
        """The report for people, by what has to be looked at."""
        out = [f"{self.source}: settings of {self.flavour}" + (f", started by {self.program}" if self.program else "")]
        for status, heading in _WORDS.items():
            found = [entry for entry in self.entries if entry.status == status]
            if found:
                out += ["", f"{heading} ({len(found)})"]
                out += [f"  {_place(entry.line)}{_entry(entry)}" for entry in found]
        if self.notes:
            out += ["", f"not settings ({len(self.notes)})"]
            out += [f"  {_place(note.line)}{note.text}: {note.why}" for note in self.notes]
        if self.problem:
            out += ["", f"these options do not go together: {self.problem}"]
        return out


def _place(line: int) -> str:
    return f"line {line}: " if line else ""


def _entry(entry: Entry) -> str:
    becomes = f" -> {' '.join(entry.becomes)}" if entry.becomes else ""
    return f"{entry.key}={entry.value}{becomes}" + (f"  ({entry.note})" if entry.note else "")


def import_config(path: str | Path, *, base: Sequence[str | Path] = ()) -> Imported:
    """Translate a bash launch script or a YAML configuration. ``base``: YAML files with the defaults that it goes by.

    Every setting is accounted for in the entries; nothing is run, and no variable of this machine is read.

    Raises:
        DataError: the file holds no settings of these projects.
        MissingExtraError: the extra ``scripts`` is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"expected a launch script or a YAML file at {file}, found none; check the path")
    launch = read_yaml(file) if file.suffix in (".yaml", ".yml") else read_script(file)
    known = {s.key: s for extra in base for s in read_yaml(Path(extra)).settings}
    if not any(s.key.startswith(("actor_rollout_ref.", "algorithm.", "data.")) for s in launch.settings):
        raise DataError(
            f"{file}: expected settings such as actor_rollout_ref.model.path, found "
            f"{sorted({s.key for s in launch.settings})[:8]}; only verl and what was made from it are known"
        )
    flavour, overrides, entries = translate(launch, known)
    return Imported(launch.name, launch.program, flavour, overrides, entries, launch.notes, _problem(overrides))


def translate(
    launch: Launch, known: Mapping[str, Setting] | None = None
) -> tuple[Flavour, tuple[str, ...], tuple[Entry, ...]]:
    """Whose settings these are, the overrides, groups first, and an entry for each setting, in the file's order.

    ``known``: settings that the file goes by, below its own ones.
    """
    settings, replaced = _last(launch)
    base = dict(known or {})
    flavour = _flavour({**base, **settings}, launch.program)
    defaults = {**DEFAULTS[flavour], **{k: s.value for k, s in base.items() if not s.unresolved}}
    t = Translation(flavour, settings, defaults, launch.program)
    for rule in (*RULES, *SURROUNDINGS):
        rule(t)
    t.rest()
    entries = sorted((*t.entries, *replaced), key=lambda entry: (entry.line, entry.key))
    return flavour, _ordered(t.overrides), tuple(entries)


def _last(launch: Launch) -> tuple[dict[str, Setting], list[Entry]]:
    """Settings by key, the last one of each counting, and entries for the others."""
    settings: dict[str, Setting] = {}
    replaced: list[Entry] = []
    for setting in launch.settings:
        earlier = settings.get(setting.key)
        if earlier is not None:
            note = f"line {setting.line} sets it to {hidden(setting.key, setting.value)}"
            replaced.append(Entry("replaced", earlier.key, hidden(earlier.key, earlier.value), earlier.line, (), note))
        settings[setting.key] = setting
    return settings, replaced


def _flavour(settings: Mapping[str, Setting], program: str) -> Flavour:
    keys = set(settings)
    if (
        any(key.startswith(ROLLOUT + "ts_") for key in keys)
        or ROLLOUT + "tree_search" in keys
        or program.endswith("_ts")
    ):
        return "tree_grpo"
    if ROLLOUT + "initial_rollouts" in keys:
        tree = {ROLLOUT + "expansion_iterations", ROLLOUT + "samples_per_tree", ROLLOUT + "node_adv_mode"}
        return "atpo" if keys & tree else "aepo"
    if keys & {"retriever.url", "retriever.topk", "max_turns", "data.max_obs_length", ROLLOUT + "n_agent"}:
        # Tree-GRPO's scripts of its baselines set what Search-R1 does not know.
        baselines = {ACTOR + "policy_loss", "algorithm.use_kl_in_reward", ACTOR + "ppo_mini_batch_size_fixed"}
        return "tree_grpo" if keys & baselines else "search_r1"
    return "verl"


def _ordered(overrides: Mapping[str, str]) -> tuple[str, ...]:
    """Groups before the options that go on top of them."""
    groups = config_groups()
    first = [f"{key}={value}" for key, value in overrides.items() if key in groups]
    return (*first, *(f"{key}={value}" for key, value in overrides.items() if key not in groups))


def _problem(overrides: Sequence[str]) -> str:
    try:
        compose(overrides)
    except ConfigError as error:
        return str(error)
    return ""
