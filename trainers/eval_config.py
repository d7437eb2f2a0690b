"""Options of ``turntree evaluate``: which sets, which ways of playing them, what stands beside the score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turntree.errors import ConfigError
from turntree.trainers.options import at_least, did_you_mean, finite, one_of, opt

__all__ = ["PAPER_SETS", "SELECTORS", "SET_OPTIONS", "EvalConfig"]

PAPER_SETS = (
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "chinese_simpleqa",
)
"""What ``eval.sets=[all]`` stands for, in the order of the papers' tables."""

SELECTORS = ("logprob", "majority", "value", "scorer")
"""Ways to choose one trajectory of several without looking at the gold answers."""

SET_OPTIONS = (
    "source", "split", "revision", "unanswerable", "limit", "corpus", "index", "search", "env", "prompt", "language",
    "normalizer", "scorers",
)  # fmt: skip
"""Keys of one set in ``eval.set_options``."""


@dataclass(frozen=True)
class EvalConfig:
    """One command for all sets; without ``sets`` the questions are those of ``env``."""

    sets: list[str] = opt([], "published sets by name, all (the eight of the papers), files, or NAME=FILE.")
    set_options: dict[str, Any] = opt(
        {},
        "by set: source, split, revision, unanswerable, limit, corpus, index, search, env, prompt, language, "
        "normalizer, scorers.",
    )
    data: str = opt("", "folder in which the sets are looked for, or hub ('' : $TURNTREE_DATA, then the hub).")
    limit: int | None = opt(None, "questions of each set (null: all).")
    subset: str = opt("first", "which ones with limit: first (in file order) or random (by seed, in file order).")
    scorers: list[str] = opt(
        ["unicode"], "further scorers beside: hotpotqa, squad, search_r1, cover, unicode, zh, cmrc, or import paths."
    )
    samples: int = opt(0, "sampled trajectories of a question, for avg@k, pass@k and maj@k (0: none).")
    temperature: float = opt(1.0, "temperature of samples and trees.")
    top_p: float = opt(1.0, "nucleus of samples and trees.")
    tree: bool = opt(False, "search a tree for each question and choose a leaf, beside the best of as many samples.")
    tree_leaves: int = opt(8, "leaves of a tree, and samples that it is compared with.")
    tree_tokens: int | None = opt(None, "generated tokens of a question's tree (null: leaves decide).")
    tree_chains: int = opt(2, "trajectories from the root that a tree starts with.")
    tree_expansions: int = opt(2, "places grown in each round.")
    tree_rule: str = opt("turntree.trainers.expansion:entropy", "import path of the expansion rule.")
    tree_rule_args: dict[str, Any] = opt({}, "its arguments.")
    choose: list[str] = opt(["logprob", "majority"], "how a leaf is chosen: logprob, majority, value, scorer.")
    value_head: str = opt("", "checkpoint folder whose value head chooses (choose=[value]).")
    closed_book: bool = opt(False, "the same model without tools, beside the score.")
    closed_book_prompt: str = opt("", "text file with {question} for it ('' : the grammar's own instructions).")
    baselines: bool = opt(True, "the score of one constant answer to all questions, beside the score.")
    constants: list[str] = opt([], "answers that are scored as constants besides the set's most frequent one.")
    batch: int = opt(64, "questions that are played together; results are written down after each batch.")

    def __post_init__(self) -> None:
        finite("eval", self)
        one_of("eval.subset", self.subset, ("first", "random"))
        for name in ("limit", "tree_tokens", "tree_chains", "tree_expansions", "batch", "tree_leaves"):
            at_least(f"eval.{name}", getattr(self, name), 1)
        at_least("eval.samples", self.samples, 0)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"eval.top_p={self.top_p}: expected 0 < top_p <= 1")
        if (self.samples or self.tree) and not self.temperature > 0:
            raise ConfigError(f"eval.temperature={self.temperature}: samples of one question would be equal; use > 0")
        self._check_sets()
        self._check_tree()

    def _check_sets(self) -> None:
        labels = [entry.partition("=")[0] for entry in self.sets]
        repeated = sorted({label for label in labels if labels.count(label) > 1})
        if repeated:
            raise ConfigError(f"eval.sets names {repeated} twice; give another name as NAME=FILE")
        for name, options in self.set_options.items():
            if not isinstance(options, dict):
                raise ConfigError(
                    f"eval.set_options.{name}: expected options such as {{corpus: FILE}}, found {options!r}"
                )
            unknown = next((key for key in options if key not in SET_OPTIONS), None)
            if unknown is not None:
                hint = did_you_mean(unknown, SET_OPTIONS)
                raise ConfigError(f"eval.set_options.{name}.{unknown}: expected one of {list(SET_OPTIONS)}.{hint}")
            for key, value in options.items():
                expected, fits = _kind(key, value)
                if not fits:
                    raise ConfigError(f"eval.set_options.{name}.{key}: expected {expected}, found {value!r}")

    def _check_tree(self) -> None:
        unknown = next((how for how in self.choose if how not in SELECTORS), None)
        if unknown is not None or not self.choose:
            hint = did_you_mean(unknown or "", SELECTORS)
            raise ConfigError(f"eval.choose={self.choose}: expected some of {list(SELECTORS)}.{hint}")
        if self.tree and self.tree_leaves <= self.tree_chains:
            raise ConfigError(
                f"eval.tree_leaves={self.tree_leaves} with eval.tree_chains={self.tree_chains} leaves nothing to grow; "
                "raise tree_leaves or lower tree_chains"
            )
        if self.tree and "value" in self.choose and not self.value_head:
            raise ConfigError("eval.choose names value, but eval.value_head is empty: name a checkpoint folder")

    @property
    def drawn(self) -> int:
        """Samples of a question: those asked for, and at least as many as a tree has leaves."""
        return max(self.samples, self.tree_leaves if self.tree else 0)


def _kind(key: str, value: Any) -> tuple[str, bool]:
    """What an option of a set has to be, and whether it is."""
    if key == "limit":
        return "null or a whole number from 1", value is None or (type(value) is int and value >= 1)
    if key in ("env", "search"):
        return f"options of {key} such as {{OPTION: VALUE}}", isinstance(value, dict)
    if key == "scorers":
        return "a list of names", isinstance(value, list) and all(isinstance(name, str) for name in value)
    return "a text", value is None or isinstance(value, (str, int, float))
