"""A database task: change the rows of a SQLite table as asked. A snapshot holds statements, never a database.

The state is the log of the statements that changed something. A connection in memory is made from a log by replaying
it, and kept for a while: going on from the newest state replays nothing, going on from an older one replays a few.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from turntree.envs import Action, ActionTags, AgentTask, History, Step, TurnEnv

CHANGES = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
# Nothing that differs between a first run and its replay: no clock, no random(), no changes().
FUNCTIONS = ("abs", "avg", "coalesce", "count", "length", "like", "lower", "max", "min", "round", "sum", "upper")
LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 10_000, sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 50}
TABLE = "CREATE TABLE staff (id INTEGER PRIMARY KEY, name TEXT NOT NULL, team TEXT, pay INTEGER CHECK (pay >= 0));"
Key = tuple[str, History[str]]
_kept: OrderedDict[Key, sqlite3.Connection] = OrderedDict()
_lock = threading.Lock()


def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Rows may be read and changed: no file, no pragma, no schema, no transaction, no other function."""
    allowed = action in (*CHANGES, sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    allowed = allowed or (action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def take(key: Key) -> sqlite3.Connection:
    """A connection in the state of ``key``, for the caller alone until :func:`keep`."""
    with _lock:
        found = _kept.pop(key, None)
    if found is None:
        found = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        found.executescript(f"PRAGMA max_page_count = 256; {key[0]}")
        for limit, value in LIMITS.items():
            found.setlimit(limit, value)
        found.set_authorizer(authorize)
        for statement in key[1]:
            found.execute(statement).fetchall()
    return found


def keep(key: Key, connection: sqlite3.Connection) -> None:
    with _lock:
        _kept[key] = connection
        while len(_kept) > 32:
            _kept.popitem(last=False)[1].close()


def run(key: Key, statement: str, *, shown: int = 10) -> tuple[Key, str]:
    """The state after one statement, and what it shows. A statement that fails changes nothing."""
    connection = take(key)
    before = connection.total_changes
    budget = iter(range(200))  # times 1000 steps of SQLite's machine: a bound that does not depend on the clock
    connection.set_progress_handler(lambda: next(budget, None) is None, 1000)
    try:
        cursor = connection.execute(statement)
        rows = [" | ".join(str(cell)[:40] for cell in row) for row in cursor.fetchmany(shown)]
        rest = sum(1 for _ in cursor)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        connection.close()  # it may have stopped half-way: the next one is made from the log
        return key, f"Error: {error}."
    connection.set_progress_handler(None, 0)
    changed = connection.total_changes - before
    after = (key[0], key[1].append(statement)) if changed else key
    keep(after, connection)
    return after, "\n".join(rows + [f"... {rest} more"] * bool(rest)) or f"{changed} rows changed."


@dataclass(frozen=True)
class Order:
    """What an episode is about: a database, what is to be done with it, and a statement that does it."""

    schema: str
    request: str
    gold: str


@dataclass(frozen=True)
class Desk:
    """The state."""

    order: Order
    log: History[str]


@dataclass(frozen=True)
class Database(AgentTask[Desk]):
    """Reward 1 if the table holds, when the agent is done, what the gold statement makes of it."""

    max_turns: int = 6
    metric = "success"
    grammar = ActionTags({"sql": "one SELECT, INSERT, UPDATE or DELETE", "done": "at the end"}, bare=("done",))
    examples = (
        *("<sql> SELECT * FROM staff </sql>", "<sql> DELETE FROM staff WHERE id = 2 </sql>", "<sql> nonsense </sql>"),
        *("<sql> UPDATE staff SET pay = pay + 1 WHERE id < 3 </sql>", "<done></done>"),
    )

    def initial_state(self, task: Order, rng: np.random.Generator) -> Desk:
        return Desk(task, History())

    def prompt(self, state: Desk) -> str:
        return f"The table staff has the columns id, name, team and pay. {state.order.request}"

    def transition(self, state: Desk, action: Action, rng: np.random.Generator) -> Step[Desk]:
        if action.kind == "done":
            return Step(state, "", reward=float(self.success(state)), terminated=True)
        (_, log), shown = run((state.order.schema, state.log), action.argument)
        return Step(replace(state, log=log), shown)

    def success(self, state: Desk) -> bool:
        gold, _ = run((state.order.schema, History()), state.order.gold)
        found, wanted = (run(key, "SELECT * FROM staff", shown=1000) for key in ((state.order.schema, state.log), gold))
        return found[1] == wanted[1]

    def solution(self, task: Order) -> list[str]:
        return [f"<sql> {task.gold} </sql>", "<done></done>"]


def draw(rng: np.random.Generator) -> Order:
    """A staff of eight and a change of one team."""
    names = rng.permutation(["Ada", "Bo", "Cem", "Dana", "Eli", "Fay", "Gus", "Hana", "Ida", "Jun"])[:8]
    teams = ["ops", "lab", "shop"]
    rows = [f"({i}, '{n}', '{teams[rng.integers(3)]}', {rng.integers(20, 60)})" for i, n in enumerate(names, 1)]
    team, other, pay = *rng.permutation(teams)[:2], int(rng.integers(1, 9))
    request, gold = [
        (f"Raise the pay of team {team} by {pay}.", f"UPDATE staff SET pay = pay + {pay} WHERE team = '{team}'"),
        (f"Move team {team} to team {other}.", f"UPDATE staff SET team = '{other}' WHERE team = '{team}'"),
        (f"Remove {names[0]} from the table.", f"DELETE FROM staff WHERE name = '{names[0]}'"),
    ][int(rng.integers(3))]
    return Order(f"{TABLE} INSERT INTO staff VALUES {', '.join(rows)};", request, gold)


def make(split: str = "train", size: int = 100, render_mode: str | None = None, **options: Any) -> TurnEnv[Desk]:
    """The environment; ``split`` (train, dev, test) draws other orders."""
    rng = np.random.default_rng([ord(letter) for letter in split])
    return TurnEnv(Database(**options), [draw(rng) for _ in range(size)], render_mode=render_mode)
