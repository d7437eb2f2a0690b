"""Errors: each class survives pickling, and the catalogue in the docs lists each."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

import turntree.errors
from turntree.errors import TurnTreeError

CLASSES = [
    found for _, found in inspect.getmembers(turntree.errors, inspect.isclass) if found.__module__ == "turntree.errors"
]
CATALOGUE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_errors_travel_between_processes(kind: type[TurnTreeError]) -> None:
    again = pickle.loads(pickle.dumps(kind("expected a, found b; do c")))
    assert type(again) is kind
    assert str(again) == "expected a, found b; do c"


def test_every_class_is_public_and_in_the_catalogue() -> None:
    names = {kind.__name__ for kind in CLASSES}
    assert names == set(turntree.errors.__all__)
    rows = re.findall(r"^\| `(\w+)` \|", CATALOGUE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(names - {"TurnTreeError"})
