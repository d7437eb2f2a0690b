"""Sizes and kinds of worlds, and the named ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from turntree.envs.worlds.forms import Kind
from turntree.envs.worlds.languages import style_of
from turntree.envs.worlds.speech import Language
from turntree.envs.worlds.styles import STYLES, Style, StyleName
from turntree.errors import ConfigError

__all__ = ["PROFILES", "WorldConfig"]

_FEWEST_ENTITIES = 60


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """Size and kind of a world.

    ``mix`` rows are (kind, hops, weight): ``hops`` counts gold steps, weights are relative. ``lectures`` is the
    percentage of entities that get one more passage, which names them in its title but states none of their relations.
    ``language``: in which names, passages and questions are written, ``en`` or ``zh``. Further percentages:
    ``inverse`` of the facts are told in passages about their object; of ``withheld`` entities one relation is not told
    (``unanswerable`` questions ask for these); of ``stale`` entities one relation has an outdated value too.
    ``asides`` of the facts have a subject that passages about the object name without the relation.
    """

    profile: str
    style: StyleName
    entities: int
    questions: int
    mix: tuple[tuple[Kind, int, int], ...]
    lectures: int = 0
    language: Language = "en"
    inverse: int = 0
    withheld: int = 0
    stale: int = 0
    asides: int = 0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ConfigError(f"expected a style of {sorted(STYLES)}, found {self.style!r}")
        if self.language not in get_args(Language):
            raise ConfigError(f"expected a language of {get_args(Language)}, found {self.language!r}")
        if unknown := {kind for kind, *_ in self.mix} - set(get_args(Kind)):
            raise ConfigError(f"expected question kinds of {get_args(Kind)}, found {sorted(unknown)}")
        if self.entities < _FEWEST_ENTITIES:
            raise ConfigError(f"expected at least {_FEWEST_ENTITIES} entities, found {self.entities}")
        if self.questions < 0 or not self.mix or any(w < 0 for *_, w in self.mix) or not any(w for *_, w in self.mix):
            raise ConfigError(f"expected questions >= 0 and positive weights, found {self.questions} and {self.mix}")
        if any(hops < 1 for _, hops, _ in self.mix):
            raise ConfigError(f"expected at least one hop, found {self.mix}")
        if not all(
            0 <= percent <= 100 for percent in (self.lectures, self.inverse, self.withheld, self.stale, self.asides)
        ):
            raise ConfigError(f"expected percentages of 0 to 100, found {self}")
        self._check_kinds(style_of(self.style, self.language))

    def _check_kinds(self, style: Style) -> None:
        """Each kind of question needs templates, and some need facts of a kind."""
        frames, kinds = style.frames["train"], {kind for kind, *_ in self.mix}
        if not frames.comparison and "comparison" in kinds:
            raise ConfigError(
                f"the {self.style} style tells no dates to compare; use style 'prose' for comparison questions"
            )
        if not frames.code and "code" in kinds:
            raise ConfigError(
                f"the {self.style} style tells no numbers; use style 'dated' or 'prose' for code questions"
            )
        if style.vague and kinds != {"chain"}:
            raise ConfigError(f"the {self.style} style has chain questions only, found {sorted(kinds)}")
        told = {"intersection": frames.both, "count": frames.count, "stale": style.as_of}
        for kind in (kind for kind, templates in told.items() if not templates and kind in kinds):
            raise ConfigError(f"the {self.style} style has no {kind} questions; use style 'prose' or 'articles'")
        if (self.stale and not style.as_of) or (self.inverse and not style.inverse):
            raise ConfigError(
                f"the {self.style} style tells no outdated values and no inverse facts; use style 'prose' or 'articles'"
            )
        if self.asides and not style.aside:
            raise ConfigError(f"the {self.style} style has no asides; use style 'articles'")
        for kind, percent in (("unanswerable", self.withheld), ("stale", self.stale)):
            if kind in kinds and not percent:
                name = "withheld" if kind == "unanswerable" else "stale"
                raise ConfigError(f"{kind} questions need entities to ask about: set {name} to 10, say (percent)")


PROFILES = {
    "quickstart": WorldConfig(
        profile="quickstart",
        style="short",
        entities=180,
        questions=2000,
        mix=(("chain", 1, 15), ("chain", 2, 50), ("chain", 3, 20), ("yes_no", 2, 15)),
    ),
    "standard": WorldConfig(
        profile="standard",
        style="prose",
        entities=3000,
        questions=1000,
        mix=(
            ("chain", 1, 10),
            ("chain", 2, 30),
            ("chain", 3, 20),
            ("chain", 4, 10),
            ("comparison", 2, 10),
            ("comparison", 4, 5),
            ("yes_no", 2, 10),
            ("yes_no", 4, 5),
        ),
        lectures=10,
    ),
    "code": WorldConfig(
        profile="code",
        style="dated",
        entities=180,
        questions=2000,
        mix=(("chain", 1, 10), ("chain", 2, 25), ("yes_no", 2, 5), ("code", 2, 60)),
    ),
    "code_prose": WorldConfig(
        profile="code_prose",
        style="prose",
        entities=3000,
        questions=1000,
        mix=(("chain", 1, 10), ("chain", 2, 25), ("comparison", 2, 10), ("code", 2, 35), ("code", 4, 20)),
        lectures=10,
    ),
    "varied": WorldConfig(
        profile="varied",
        style="prose",
        entities=3000,
        questions=1000,
        mix=(
            ("chain", 2, 15),
            ("chain", 3, 10),
            ("comparison", 2, 10),
            ("yes_no", 2, 5),
            ("intersection", 2, 10),
            ("intersection", 3, 5),
            ("count", 1, 10),
            ("count", 2, 5),
            ("unanswerable", 1, 10),
            ("unanswerable", 2, 5),
            ("stale", 1, 10),
            ("stale", 2, 5),
        ),
        lectures=10,
        inverse=15,
        withheld=15,
        stale=15,
    ),
    "musique": WorldConfig(
        profile="musique",
        style="articles",
        entities=1500,
        questions=1000,
        mix=(
            ("chain", 2, 44),
            ("chain", 3, 14),
            ("chain", 4, 4),
            ("intersection", 2, 16),
            ("intersection", 3, 6),
            ("intersection", 4, 2),
            ("unanswerable", 2, 5),
            ("count", 2, 4),
            ("stale", 2, 5),
        ),
        lectures=25,
        inverse=25,
        withheld=10,
        stale=10,
        asides=80,
    ),
    "uncertain": WorldConfig(
        profile="uncertain",
        style="vague",
        entities=180,
        questions=2000,
        mix=(("chain", 3, 70), ("chain", 4, 30)),
    ),
}
"""The named profiles of ``turntree world``."""
