"""Any episode is a value: it restores, survives JSON and pickle, and what is damaged is refused and never half read."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gymnasium.error import ResetNeeded

from tests.fuzz.material import INJECTED, PIECES, Tape, fuzz, json_like, text_of
from turntree.envs.actions import ActionTags
from turntree.envs.agent_task import AgentTask
from turntree.envs.core import Action, Step
from turntree.envs.grammar import AtpoGrammar, HermesGrammar, PlannerGrammar, TagGrammar
from turntree.envs.search_qa import SearchQAEnv
from turntree.envs.task import FrozenDict, Question
from turntree.envs.turn_env import TurnEnv
from turntree.errors import DataError, SnapshotError, TurnTreeError
from turntree.search_backend.passage import Passage
from turntree.trainers.store import StoredTree, TreeStore, decode_line, encode_line
from turntree.trainers.tree import Group, Node, Tree


class Echo:
    """Finds passages that say what was asked, and what nobody should believe."""

    fingerprint = "echo"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[Passage(str(i), q, INJECTED[(len(q) + i) % len(INJECTED)] + q) for i in range(k)] for q in queries]


@dataclass(frozen=True)
class Dice:
    """The state of a game: what fell, and which of two boxes it lies in."""

    fell: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()
    last: str | None = None
    notes: FrozenDict = field(default_factory=FrozenDict)


class DiceTask(AgentTask[Dice]):
    """Throws dice until three are equal."""

    grammar = ActionTags({"throw": "a name", "stop": "nothing"}, bare=("stop",))

    def initial_state(self, task: Any, rng: Any) -> Dice:
        return Dice((int(rng.integers(6)),))

    def prompt(self, state: Dice) -> str:
        return f"{state.fell} fell."

    def transition(self, state: Dice, action: Action, rng: Any) -> Step[Dice]:
        after = replace(
            state,
            fell=(*state.fell, int(rng.integers(6))),
            names=state.names | {action.argument},
            last=action.argument,
            notes=FrozenDict({**state.notes, action.argument: len(state.fell)}),
        )
        return Step(after, str(after.fell), reward=0.5, terminated=action.kind == "stop")


@functools.cache
def environments() -> tuple[TurnEnv[Any], ...]:
    questions = [Question("1", "who?", ("x",)), Question("2", "《谁》\ud800", ("巴黎", "a"), FrozenDict({"hops": 2}))]
    made: list[TurnEnv[Any]] = [
        SearchQAEnv(questions, search=Echo(), grammar=grammar, max_turns=4, reward="tree_grpo")
        for grammar in (TagGrammar(), AtpoGrammar(), HermesGrammar(), PlannerGrammar(TagGrammar()))
    ]
    return (*made, SearchQAEnv(questions, search=Echo(), on_length="correct"), TurnEnv(DiceTask(), ["a", "b"]))


TURNS = (*PIECES, "<search>who</search>", "<throw>a</throw>", "<stop></stop>", "<think>t</think><search>q</search>")


def begin(tape: Tape) -> TurnEnv[Any]:
    env = tape.pick(environments())
    env.reset(seed=tape.byte())
    return env


def play(env: TurnEnv[Any], tape: Tape, turns: int) -> list[Any]:
    """Arbitrary turns, until the episode is over; what came back."""
    seen: list[Any] = []
    for _ in range(turns):
        if env.done:
            break
        finish: Any = "length" if tape.byte() % 16 == 15 else "stop"
        seen.append(env.step(text_of(tape.some(1 + tape.byte() % 10), TURNS), finish=finish))
    return seen


@fuzz("snapshots", size=96, share=10)
def test_any_episode_restores_and_goes_on_as_it_did(tape: Tape) -> None:
    env = begin(tape)
    play(env, tape, tape.byte() % 3)
    snapshot = env.snapshot()
    rest = tape.some(64)
    first = play(env, Tape(rest.data), 3)
    text = json.dumps(env.encode_snapshot(snapshot), ensure_ascii=bool(tape.byte() % 2))
    decoded = env.decode_snapshot(json.loads(text))
    assert decoded == snapshot == pickle.loads(pickle.dumps(snapshot))
    assert env.encode_snapshot(decoded) == json.loads(text)
    for value in (snapshot, decoded):
        again = env.sibling()
        again.restore(value)
        assert play(again, Tape(rest.data), 3) == first
        assert again.encode_snapshot(again.snapshot()) == env.encode_snapshot(env.snapshot())


@fuzz("snapshots", size=96, share=6)
def test_forks_of_any_episode_do_not_touch_each_other(tape: Tape) -> None:
    env = begin(tape)
    play(env, tape, tape.byte() % 3)
    before = env.encode_snapshot(env.snapshot())
    twins = [env.fork(), env.fork()]
    for twin in twins:
        play(twin, tape, 2)
    assert env.encode_snapshot(env.snapshot()) == before
    assert not env.done or all(twin.done for twin in twins)


@fuzz("snapshots", size=96, share=10)
def test_an_answer_is_read_from_the_models_own_turns_only(tape: Tape) -> None:
    """Whatever passages say: an episode ends by a turn that answers, or at a limit."""
    env = begin(tape)
    for _ in range(4):
        if env.done:
            break
        said = text_of(tape.some(1 + tape.byte() % 10), TURNS)
        parsed = getattr(env.core, "grammar", DiceTask.grammar).parse(said)
        *_, terminated, truncated, info = env.step(said)
        if terminated:
            assert parsed.action.kind in ("answer", "finish", "stop")
            assert info.get("answer") in (None, parsed.action.argument)
        assert not (terminated and truncated)
        assert isinstance(env, SearchQAEnv) or parsed.action.kind in ("throw", "stop", "invalid")


def damaged(value: Any, tape: Tape) -> Any:
    """The value with one part of it replaced, removed, doubled or retyped."""
    root = copy.deepcopy(value)
    holder, key = {"": root}, ""
    node: Any = holder
    while isinstance(node[key], (dict, list)) and node[key] and tape.byte() % 8:
        node = node[key]
        places = list(node) if isinstance(node, dict) else range(len(node))
        key = tape.pick(tuple(places)) if len(places) <= 256 else 0  # type: ignore[assignment]
    op = tape.byte() % 4
    if op == 0 and node is not holder:
        del node[key]
    elif op == 1:
        node[key] = [node[key]]
    elif op == 2 and isinstance(node[key], (str, int, float, bool)):
        node[key] = tape.pick((str(node[key]), f"{node[key]} ", [str(node[key])], None, -1, 1.5, math.inf, 10**30))
    else:
        node[key] = json_like(tape, keys=("a", "task", "history"))
    return holder[""]


@fuzz("snapshots", size=96, share=12)
def test_damaged_snapshots_are_refused_or_whole(tape: Tape) -> None:
    env = begin(tape)
    play(env, tape, tape.byte() % 3)
    good = json.loads(json.dumps(env.encode_snapshot(env.snapshot())))
    bad = damaged(good, tape)
    try:
        found = env.decode_snapshot(bad)
    except SnapshotError:
        return
    assert env.encode_snapshot(found) == bad  # nothing was bent into shape
    twin = env.sibling()
    try:
        twin.restore(found)
        play(twin, tape, 2)
    except (TurnTreeError, ResetNeeded):
        return


# The rollout store ----------------------------------------------------------------------------------------------------


def tree_of(tape: Tape) -> Tree:
    root = Node(observation_ids=(1, 2), observation=text_of(tape.some(6)))
    parent = root
    for _ in range(1 + tape.byte() % 3):
        count = tape.byte() % 4
        child = Node(
            ordinal=len(parent.children),
            turn_ids=tuple(range(count)),
            logprobs=tuple(tape.pick((-0.5, 0.0, -1e300, math.nan, -math.inf)) for _ in range(count)),
            text=text_of(tape.some(8), TURNS),
            observation=text_of(tape.some(8), TURNS),
            action=tape.pick(("search", "answer", "invalid")),
            info=FrozenDict({text_of(tape.some(3)): text_of(tape.some(3)), "f": tape.pick((0.5, math.nan, 1, None))}),
        )
        parent.add_child(child)
        parent = child if tape.byte() % 2 else root
    leaf = parent if parent is not root else root.children[-1]
    leaf.status, leaf.reward = "answered", 1.0
    task = Question("q", text_of(tape.some(6)) + "?", (text_of(tape.some(4)),))
    return Tree(root, prompt_uid=text_of(tape.some(4)), index=0, task=task)


FOLDER = tempfile.TemporaryDirectory(prefix="turntree-fuzz-")


@fuzz("snapshots", size=120, share=6)
def test_any_tree_comes_back_from_its_line(tape: Tape) -> None:
    line = encode_line(StoredTree(1, tree_of(tape), {}))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    found = decode_line(line, Path("here"), number=1)
    assert encode_line(found) == line


@fuzz("snapshots", size=120, share=0.3)
def test_any_tree_comes_back_from_the_store(tape: Tape) -> None:
    trees = [tree_of(tape) for _ in range(2)]
    store = TreeStore(FOLDER.name)
    store.write(1, [Group(tree.prompt_uid, [tree]) for tree in trees])
    found = [stored.tree for stored in store.read(1)]
    assert [encode_line(StoredTree(1, t, {})) for t in found] == [encode_line(StoredTree(1, t, {})) for t in trees]
    data = store.file(1).read_bytes()
    store.file(1).write_bytes(data[: tape.number() % len(data)])
    try:
        list(store.read(1))
    except DataError:
        return
    raise AssertionError("a store file that was cut off was read")


@fuzz("snapshots", size=120, share=6)
def test_damaged_lines_of_the_store_are_refused_or_trees(tape: Tape) -> None:
    row = json.loads(encode_line(StoredTree(1, tree_of(Tape(tape.some(40).data)), {})))
    bad = json.dumps(damaged(row, tape)).encode()
    for line in (bad, bad[: tape.number() % (len(bad) + 1)], b"[" * 5000):
        try:
            found = decode_line(line, Path("here"), number=1)
        except DataError:
            continue
        assert isinstance(found.tree, Tree)
