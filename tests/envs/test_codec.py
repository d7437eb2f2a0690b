"""States of tasks are stored by their type hints: read back equal, and refused where they could be changed in place."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import FrozenDict, History, RandomStream
from turntree.envs.codec import check_value, decode, encode
from turntree.errors import SnapshotError


class Way(enum.Enum):
    NORTH = 1
    SOUTH = 2


@dataclass(frozen=True)
class Item:
    name: str
    weight: float = 0.0


@dataclass(frozen=True)
class Bag:
    items: tuple[Item, ...] = ()
    place: tuple[int, str] = (0, "")
    seen: frozenset[tuple[int, int]] = frozenset()
    way: Way | None = None
    mode: Literal["day", "night"] = "day"
    either: int | Item | None = None
    notes: FrozenDict = field(default_factory=FrozenDict)
    log: History[str] = field(default_factory=lambda: History[str]())
    stream: RandomStream = field(default_factory=lambda: RandomStream(0))
    done: bool = False
    more: Any = None


items = st.builds(Item, st.text(), st.floats(allow_nan=False, allow_infinity=False))
bags = st.builds(
    Bag,
    items=st.lists(items, max_size=3).map(tuple),
    place=st.tuples(st.integers(), st.text()),
    seen=st.frozensets(st.tuples(st.integers(), st.integers()), max_size=3),
    way=st.sampled_from([None, *Way]),
    mode=st.sampled_from(["day", "night"]),
    either=st.one_of(st.none(), st.integers(), items),
    notes=st.dictionaries(st.text(), st.one_of(st.none(), st.text(), st.lists(st.integers()))).map(FrozenDict),
    log=st.lists(st.text(), max_size=3).map(History),
    stream=st.builds(RandomStream, st.integers(0, 2**63), st.integers(0, 9)),
    done=st.booleans(),
    more=st.one_of(st.none(), st.text(), st.lists(st.integers()).map(tuple)),
)


@given(bags)
def test_a_value_survives_json(bag: Bag) -> None:
    check_value(bag, where="bag")
    text = json.dumps(encode(bag), allow_nan=False)
    again = decode(Bag, json.loads(text))
    assert again == bag
    assert json.dumps(encode(again), allow_nan=False) == text


@pytest.mark.parametrize(
    ("part", "where", "cure"),
    [
        ({"items": [Item("a")]}, r"bag\.items", "use a tuple"),
        ({"notes": {"a": 1}}, r"bag\.notes", "FrozenDict"),
        ({"seen": {(1, 2)}}, r"bag\.seen", "frozenset"),
        ({"items": (Item("a", float("nan")),)}, r"bag\.items\[0\]\.weight", "finite"),
        ({"more": (1, (2, object()))}, r"bag\.more\[1\]\[1\]", "no live objects"),
        ({"more": open}, r"bag\.more", "no live objects"),
    ],
)
def test_what_could_be_changed_in_place_is_named(part: dict[str, Any], where: str, cure: str) -> None:
    with pytest.raises(SnapshotError, match=rf"{where}: .*{cure}"):
        check_value(Bag(**part), where="bag")


def test_a_dataclass_must_be_frozen() -> None:
    @dataclass
    class Loose:
        x: int = 0

    with pytest.raises(SnapshotError, match="frozen=True"):
        check_value(Loose(), where="state")


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (["done"], 1, "done: expected bool"),
        (["place"], [1], r"place: expected 2 items"),
        (["place", 0], True, r"place\[0\]: expected int"),
        (["mode"], "dusk", "mode: expected one of"),
        (["way"], "UP", "way: expected one of"),
        (["items"], [{"name": "a"}], r"items\[0\]: expected an object"),
        (["either"], [], "either: expected one of"),
        (["log"], "abc", "log: expected a list"),
    ],
)
def test_other_data_is_refused_by_place(path: list[Any], value: Any, where: str) -> None:
    data = encode(Bag())
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(SnapshotError, match=rf"state\.{where}"):
        decode(Bag, data)
