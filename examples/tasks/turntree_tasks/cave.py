"""A task without tools: find the lamp in a cave, then the way out. A bat carries you off at times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turntree.envs import Action, ActionTags, AgentTask, FrozenDict, Step, TurnEnv

MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
Cell = tuple[int, int]


@dataclass(frozen=True)
class Map:
    """What an episode is about. ``floor``: the cells that can be walked; the way in is also the way out."""

    floor: frozenset[Cell]
    entrance: Cell
    lamp: Cell


@dataclass(frozen=True)
class Explorer:
    """The state."""

    cave: Map
    place: Cell
    has_lamp: bool = False
    out: bool = False


@dataclass(frozen=True)
class Cave(AgentTask[Explorer]):
    """Reward 0.5 for the lamp, 0.5 for leaving with it. ``bats``: probability that a step ends elsewhere."""

    max_turns: int = 24
    bats: float = 0.0
    metric = "success"
    grammar = ActionTags(
        {"go": "north, south, west or east", "take": "picks the lamp up", "leave": "at the entrance"},
        bare=("take", "leave"),
    )
    examples = (*(f"<go> {way} </go>" for way in MOVES), "<go> up </go>", "<take></take>", "<leave></leave>")

    def initial_state(self, task: Map, rng: np.random.Generator) -> Explorer:
        return Explorer(task, task.entrance)

    def prompt(self, state: Explorer) -> str:
        return f"Somewhere in this cave lies a lamp. Bring it out. {self._look(state)}"

    def transition(self, state: Explorer, action: Action, rng: np.random.Generator) -> Step[Explorer]:
        if action.kind == "go":
            return self._go(state, action.argument, rng)
        if action.kind == "take" and state.place == state.cave.lamp and not state.has_lamp:
            return Step(replace(state, has_lamp=True), "You have the lamp.", reward=0.5)
        if action.kind == "leave" and state.place == state.cave.entrance and state.has_lamp:
            return Step(replace(state, out=True), "Daylight!", reward=0.5, terminated=True)
        return Step(state, f"You cannot do that here. {self._look(state)}")

    def success(self, state: Explorer) -> bool:
        return state.out

    def solution(self, task: Map) -> list[str]:
        there = [f"<go> {way} </go>" for way in path(task.floor, task.entrance, task.lamp)]
        back = [f"<go> {way} </go>" for way in path(task.floor, task.lamp, task.entrance)]
        return [*there, "<take></take>", *back, "<leave></leave>"]

    def _go(self, state: Explorer, way: str, rng: np.random.Generator) -> Step[Explorer]:
        place = step(state.place, way) if way in MOVES else None
        if place not in state.cave.floor:
            return Step(state, f"There is no way {way}. {self._look(state)}", info=FrozenDict({"bumped": True}))
        if rng.random() < self.bats:
            cells = sorted(state.cave.floor)
            place = cells[int(rng.integers(len(cells)))]
        moved = replace(state, place=place)
        return Step(moved, self._look(moved))

    def _look(self, state: Explorer) -> str:
        ways = [way for way in MOVES if step(state.place, way) in state.cave.floor]
        lamp = " The lamp is here." if state.place == state.cave.lamp and not state.has_lamp else ""
        door = " This is the entrance." if state.place == state.cave.entrance else ""
        return f"You can go {' or '.join(ways)}.{lamp}{door}"


def step(place: Cell, way: str) -> Cell:
    return place[0] + MOVES[way][0], place[1] + MOVES[way][1]


def path(floor: frozenset[Cell], start: Cell, goal: Cell) -> list[str]:
    """The ways of a shortest walk."""
    found: dict[Cell, list[str]] = {start: []}
    queue = deque([start])
    while goal not in found:
        place = queue.popleft()
        for way in MOVES:
            there = step(place, way)
            if there in floor and there not in found:
                found[there] = [*found[place], way]
                queue.append(there)
    return found[goal]


def draw(rng: np.random.Generator, cells: int) -> Map:
    """A cave that grew cell by cell; the lamp lies in the last one."""
    floor = [(0, 0)]
    while len(floor) < cells:
        place = step(floor[int(rng.integers(len(floor)))], list(MOVES)[int(rng.integers(4))])
        floor += [place] if place not in floor else []
    return Map(frozenset(floor), floor[0], floor[-1])


def make(
    split: str = "train", size: int = 100, cells: int = 6, render_mode: str | None = None, **options: Any
) -> TurnEnv[Explorer]:
    """The environment; ``split`` (train, dev, test) draws other caves."""
    rng = np.random.default_rng([ord(letter) for letter in split])
    return TurnEnv(Cave(**options), [draw(rng, cells) for _ in range(size)], render_mode=render_mode)
