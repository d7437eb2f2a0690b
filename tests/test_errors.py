"""Errors: each class survives pickling, and the catalogue in the docs lists each."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
from pathlib import Path

import pytest

import turntree.errors
from turntree.errors import RetrievalError, TurnTreeError

CLASSES = [
    found for _, found in inspect.getmembers(turntree.errors, inspect.isclass) if found.__module__ == "turntree.errors"
]
CATALOGUE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_travel_between_processes(kind: type[TurnTreeError]) -> None:
    again = pickle.loads(pickle.dumps(kind("expected a, found b; do c")))
    assert type(again) is kind
    assert str(again) == "expected a, found b; do c"


def test_classes_elsewhere_are_kinds_of_one_in_the_catalogue_and_travel_too() -> None:
    """A boundary may tell its own failures apart, below its class; no name stands for two classes."""
    root, names = CATALOGUE.parent.parent, [kind.__name__ for kind in CLASSES]
    rooms = [root / room for room in ("search_backend", "envs", "agents", "trainers")]
    defined = [
        (file, node.name, [ast.unparse(base) for base in node.bases])
        for room in rooms
        for file in room.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    own = [(file, name) for file, name, bases in defined if set(bases) & set(names)]
    assert own
    for file, name in own:
        assert name not in names, f"{file}: {name} is another class of turntree.errors"
        module = "turntree." + ".".join(file.relative_to(root).with_suffix("").parts)
        kind = getattr(importlib.import_module(module), name)
        assert issubclass(kind, RetrievalError), f"{file}: {name} belongs into turntree.errors and its catalogue"
        assert type(pickle.loads(pickle.dumps(kind("why")))) is kind


def test_every_class_is_public_and_in_the_catalogue() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert names == set(turntree.errors.__all__)
    rows = re.findall(r"^\| `(\w+)` \|", CATALOGUE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(names - {"TurnTreeError"})
