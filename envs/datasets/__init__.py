"""Question files in every layout that people publish them in, and the published sets by name."""

from __future__ import annotations

from turntree.envs.datasets.contexts import Context
from turntree.envs.datasets.corpus import ContextCorpus, corpus_from_contexts
from turntree.envs.datasets.gold import gold_steps
from turntree.envs.datasets.reading import (
    QuestionFile,
    Unanswerable,
    join_questions,
    load_questions,
    read_questions,
    save_questions,
)
from turntree.envs.datasets.registry import DATASETS, DatasetSpec, LoadedSet, dataset_spec, load_dataset_questions

__all__ = [
    "DATASETS",
    "Context",
    "ContextCorpus",
    "DatasetSpec",
    "LoadedSet",
    "QuestionFile",
    "Unanswerable",
    "corpus_from_contexts",
    "dataset_spec",
    "gold_steps",
    "join_questions",
    "load_dataset_questions",
    "load_questions",
    "read_questions",
    "save_questions",
]
