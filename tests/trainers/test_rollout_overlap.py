"""Growth that overlaps: equal trees whatever the threads do, bounds on what is in flight, retries that block nobody."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Generation, Request, SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.scorer import Failed, Finished
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.core import Tool, ToolCall, ToolFailure, ToolResult
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError, EngineError, ToolError
from turntree.search_backend import Passage
from turntree.trainers.expansion import Expansion, entropy, random_nodes
from turntree.trainers.inbox import Inbox
from turntree.trainers.rollout import Budget, GrowthPlan, Limits, Prompt, Rollout, grow
from turntree.trainers.tool_desk import Outcome, ToolDesk
from turntree.trainers.tree import Node, Tree

TOKENS = ByteTokenizer()
TREE_GRPO = GrowthPlan(trees=2, rounds=2, expansions=2, rule=random_nodes)
AT2PO = GrowthPlan(chains=3, rounds=2, expansions=2, rule=entropy)
LIMITS = Limits(max_turn_tokens=64, max_context_tokens=4000, tool_backoff_s=0.0, schedule="overlap")
PROMPTS = [Prompt(f"p{i}", Question(f"q{i}", "is it lit?", ("yes",))) for i in range(3)]
WAIT_S = 20.0


def speak(context: str, seed: int) -> str:
    words = ["<search>a</search>", f"<search>{seed % 7}</search>", "hm", "<answer>yes</answer>", "<answer>no</answer>"]
    return words[seed % len(words)]


class Search:
    """A backend that answers after a moment drawn from its own generator, and fails the first ``faults`` times."""

    fingerprint = "test"

    def __init__(self, *, in_flight: int = 0, seed: int = 0, pause_s: float = 0.002, faults: int = 0) -> None:
        self.in_flight = in_flight
        self.rng = np.random.default_rng(seed)
        self.pause_s = pause_s
        self.faults = faults
        self.lock = threading.Lock()
        self.running = self.most = self.queries = 0

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.queries += len(queries)
            pause, failing = float(self.rng.random()) * self.pause_s, self.faults > 0
            self.faults -= failing
        time.sleep(pause)
        with self.lock:
            self.running -= 1
        if failing:
            raise OSError("no light")
        return [[Passage(q, "title", f"text of {q}")] for q in queries]


class Joining(ScriptedEngine):
    """Takes single requests from several threads, each for a moment."""

    def __init__(self, in_flight: int, *, seed: int = 0, pause_s: float = 0.002, **options: Any) -> None:
        super().__init__(speak, TOKENS, **options)
        self.in_flight = in_flight
        self.rng = np.random.default_rng(seed)
        self.pause_s = pause_s
        self.lock = threading.Lock()
        self.running = self.most = self.tokens = 0

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        with self.lock:
            self.running += len(requests)
            self.most = max(self.most, self.running)
            pause = float(self.rng.random()) * self.pause_s
        time.sleep(pause)
        with self.lock:
            self.running -= len(requests)
            made = super().generate(requests)
            self.tokens += sum(len(g.ids) for g in made)
            return made


def run(
    plan: GrowthPlan = AT2PO,
    *,
    engine: ScriptedEngine | None = None,
    search: Any = None,
    limits: Limits = LIMITS,
    prompts: Sequence[Prompt] = PROMPTS,
    tools: dict[str, Tool] | None = None,
    **options: Any,
) -> Rollout:
    core = SearchQACore(search or Search())
    if tools is not None:
        core.tools = tools
    sampling = SamplingParams(max_tokens=1, stop=core.stop)
    chosen = engine or ScriptedEngine(speak, TOKENS)
    return grow(
        prompts,
        core=core,
        engine=chosen,
        dialogue=Dialogue(TOKENS),
        plan=plan,
        sampling=sampling,
        limits=limits,
        **options,
    )


def rows(rollout: Rollout) -> list[tuple[Any, ...]]:
    return [
        (g.uid, t.index, n.path, n.turn_ids, n.logprobs, n.observation_ids, n.status, n.reward, _place(n.picked))
        for g in rollout.groups
        for t in g.trees
        for n in t.root.walk()
    ]


def _place(node: Node | None) -> tuple[int, ...] | None:
    return None if node is None else node.path


# Law 8 ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    arrival=st.integers(0, 10**6),
    slots=st.integers(0, 5),
    searches=st.integers(0, 5),
    concurrent=st.none() | st.integers(1, 4),
    batch=st.none() | st.integers(1, 4),
    plan=st.sampled_from(
        [TREE_GRPO, AT2PO, replace(TREE_GRPO, kept_leaves=2), replace(AT2PO, budget=Budget(generated_tokens=300))]
    ),
    schedule=st.sampled_from(["overlap", "auto"]),
)
def test_trees_do_not_depend_on_threads(
    seed: int,
    arrival: int,
    slots: int,
    searches: int,
    concurrent: int | None,
    batch: int | None,
    plan: GrowthPlan,
    schedule: Any,
) -> None:
    plain = run(plan, limits=replace(LIMITS, schedule="fixed"), run_seed=seed)
    limits = replace(LIMITS, schedule=schedule, max_concurrent_trees=concurrent, max_batch_requests=batch)
    engine = Joining(slots, seed=arrival)
    overlapped = run(plan, engine=engine, search=Search(in_flight=searches, seed=arrival), limits=limits, run_seed=seed)
    assert rows(overlapped) == rows(plain)
    counted = {name: count for name, count in plain.stats.as_dict().items() if name != "tool_attempts"}
    assert {n: c for n, c in overlapped.stats.as_dict().items() if n != "tool_attempts"} == counted
    assert overlapped.stats.generated_tokens == engine.tokens


def test_an_adaptive_plan_deals_the_same_from_threads() -> None:
    plan = replace(TREE_GRPO, adaptive=0.7)
    plain = run(plan, limits=replace(LIMITS, schedule="fixed"), run_seed=3)
    assert rows(run(plan, engine=Joining(4), search=Search(in_flight=4), run_seed=3)) == rows(plain)


def test_rules_that_need_no_finished_round_grow_as_many_leaves() -> None:
    def eager(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        return random_nodes(tree, k, rng)

    eager.needs = "any"  # type: ignore[attr-defined]
    plan = GrowthPlan(chains=3, rounds=2, expansions=2, rule=eager)
    rollout = run(plan, engine=Joining(8), search=Search(in_flight=8))
    assert [len(g.trees[0].leaves()) for g in rollout.groups] == [7, 7, 7]


def test_rules_that_need_no_finished_round_keep_their_places_filled() -> None:
    """One first chain, then two trajectories at a time, although the rule is asked for one place at a time."""
    running: list[int] = []

    def eager(tree: Tree, k: int, rng: np.random.Generator) -> list[Expansion]:
        return random_nodes(tree, k, rng)

    eager.needs = "any"  # type: ignore[attr-defined]

    class Watching(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            running.append(len(requests))
            return super().generate(requests)

    always = Watching(lambda context, seed: "<answer>yes</answer>", TOKENS)
    plan = GrowthPlan(rounds=3, expansions=2, rule=eager)
    rollout = run(plan, engine=always, prompts=PROMPTS[:1], limits=replace(LIMITS, schedule="fixed"))
    assert len(rollout.groups[0].trees[0].leaves()) == 7
    assert running == [1, 2, 2, 2]


# Overlap and backpressure --------------------------------------------------------------------------------------


def test_the_engine_generates_while_a_search_is_running() -> None:
    """The search of one tree is answered only once the engine was asked for another turn meanwhile."""
    turned = threading.Event()

    class Waiting(Search):
        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            assert turned.wait(WAIT_S), "the engine waited for the search"
            return super().search(queries, k=k)

    class Watching(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            if any(len(r.key) > 3 for r in requests):
                turned.set()
            return super().generate(requests)

    texts: dict[tuple[Any, ...], str] = {("p0", 0, 0): "<search>a</search>", ("p0", 0, 0, 0): "<answer>yes</answer>"}
    texts |= {("p1", 0, 0): "hm", ("p1", 0, 0, 0): "<answer>no</answer>"}
    for slots in (0, 2):
        turned.clear()
        engine = Watching(texts, TOKENS)
        engine.in_flight = slots  # type: ignore[attr-defined]
        rollout = run(GrowthPlan(), engine=engine, search=Waiting(), prompts=PROMPTS[:2])
        assert [g.scored_leaves()[0].reward for g in rollout.groups] == [1.0, 0.0]


@pytest.mark.parametrize(("slots", "batch", "most"), [(3, None, 3), (6, 2, 2)])
def test_requests_in_flight_are_bounded(slots: int, batch: int | None, most: int) -> None:
    engine = Joining(slots, pause_s=0.01)
    run(GrowthPlan(trees=4), engine=engine, limits=replace(LIMITS, max_batch_requests=batch))
    assert engine.most == most


@pytest.mark.parametrize("searches", [0, 3])
def test_searches_in_flight_are_bounded(searches: int) -> None:
    search = Search(in_flight=searches, pause_s=0.01)
    run(GrowthPlan(trees=8), engine=Joining(16), search=search)
    assert search.most == max(1, searches)


def test_auto_overlaps_for_engines_that_take_single_requests() -> None:
    threads: set[str] = set()

    class Watching(Search):
        def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
            threads.add(threading.current_thread().name)
            return super().search(queries, k=k)

    auto = replace(LIMITS, schedule="auto")
    run(search=Watching(in_flight=4), limits=auto)
    assert threads == {threading.current_thread().name}
    threads.clear()
    run(search=Watching(in_flight=4), engine=Joining(2), limits=auto)
    assert threads
    assert all(name.startswith("turntree-tool-search") for name in threads)
    with pytest.raises(ConfigError, match="schedule='later'"):
        replace(LIMITS, schedule="later")  # type: ignore[arg-type]


# Judges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [True, False])
def test_judges_that_say_so_are_asked_from_another_thread(apart: bool) -> None:
    asked: list[str] = []

    def judge(finished: Sequence[Finished]) -> list[float | Failed]:
        asked.append(threading.current_thread().name)
        return [0.5 if f.answer == "yes" else Failed("judge_down") for f in finished]

    judge.overlaps = apart  # type: ignore[attr-defined]
    rollout = run(TREE_GRPO, engine=Joining(4), search=Search(in_flight=4), scorer=judge)
    plain = run(TREE_GRPO, limits=replace(LIMITS, schedule="fixed"), scorer=judge)
    assert rows(rollout) == rows(plain)
    assert any(name.startswith("turntree-judge") for name in asked) == apart


# Retries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["fixed", "overlap"])
def test_a_back_off_keeps_nobody_waiting(schedule: Any) -> None:
    """One tree's search fails and backs off for long; the other trees end meanwhile."""
    texts: dict[tuple[Any, ...], str] = {(f"p{i}", 0, 0): "<answer>no</answer>" for i in (1, 2)}
    texts |= {("p0", 0, 0): "<search>a</search>", ("p0", 0, 0, 0): "<answer>yes</answer>"}
    ended: list[tuple[str, float]] = []
    limits = replace(LIMITS, schedule=schedule, tool_backoff_s=0.3)
    start = time.monotonic()
    rollout = run(
        GrowthPlan(),
        engine=ScriptedEngine(texts, TOKENS),
        search=Search(faults=1),
        limits=limits,
        on_tree=lambda tree: ended.append((tree.prompt_uid, time.monotonic() - start)),
    )
    assert [uid for uid, _ in ended][-1] == "p0"
    assert ended[-1][1] >= 0.3 > ended[0][1]
    assert rollout.stats.failed == 0
    assert (rollout.stats.tool_calls, rollout.stats.tool_attempts) == (1, 2)


class Tried:
    """A tool that fails each argument a number of times."""

    effects: Any = "in_state"

    def __init__(self, faults: int) -> None:
        self.left: dict[str, int] = {}
        self.faults = faults
        self.times: list[float] = []

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
        return [self._one(call.argument) for call in calls]

    def _one(self, argument: str) -> ToolResult | ToolFailure:
        left = self.left.setdefault(argument, self.faults)
        self.left[argument] -= 1
        return ToolFailure("timeout", "slow") if left > 0 else ToolResult(argument)


def test_retries_come_after_waits_that_double_and_end_at_the_limit() -> None:
    now = 0.0
    tried = Tried(faults=9)
    desk = ToolDesk({"look": tried}, retries=2, backoff_s=1.0, clock=lambda: now)
    found: list[Sequence[Outcome]] = []
    desk.put((ToolCall("look", "a"), ToolCall("look", "b")), found.append)
    desk.start()
    assert (desk.wait_s(), found) == (1.0, [])
    now = 0.5
    desk.start()
    assert desk.wait_s() == 0.5
    now = 1.0
    desk.start()
    assert (desk.wait_s(), desk.attempts) == (2.0, 4)
    now = 3.0
    desk.start()
    assert desk.wait_s() is None
    assert desk.attempts == 6
    assert [[type(o) for o in outcomes] for outcomes in found] == [[ToolFailure, ToolFailure]]


def test_external_calls_are_not_made_again() -> None:
    tried = Tried(faults=1)
    tried.effects = "external"
    desk = ToolDesk({"look": tried}, retries=2, backoff_s=0.0)
    found: list[Sequence[Outcome]] = []
    desk.put((ToolCall("look", "a"),), found.append)
    desk.start()
    assert desk.attempts == 1
    assert isinstance(found[0][0], ToolFailure)


# Faults --------------------------------------------------------------------------------------------------------


def test_a_dead_engine_ends_the_rollout_and_its_threads(earlier: set[threading.Thread]) -> None:
    class Dead(Joining):
        abandoned = False

        def generate(self, requests: Sequence[Request]) -> list[Generation]:
            raise RuntimeError("out of memory")

        def abandon(self) -> None:
            self.abandoned = True

    engine = Dead(4)
    with pytest.raises(EngineError, match="out of memory"):
        run(GrowthPlan(trees=20), engine=engine, search=Search(in_flight=4))
    assert engine.abandoned
    assert _threads(earlier) == []


def test_a_bug_in_a_tool_comes_out_of_its_thread(earlier: set[threading.Thread]) -> None:
    class Broken:
        effects: Any = "none"

        def run(self, calls: Sequence[ToolCall]) -> list[ToolResult | ToolFailure]:
            return []

    with pytest.raises(ToolError, match="one for each call"):
        run(engine=Joining(4), tools={"search": Broken()})
    assert _threads(earlier) == []


def test_an_interrupt_leaves_no_thread_behind(earlier: set[threading.Thread]) -> None:
    def stop(tree: Tree) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(engine=Joining(4), search=Search(in_flight=4), on_tree=stop)
    assert _threads(earlier) == []


@pytest.fixture
def earlier() -> set[threading.Thread]:
    """Threads that other tests of this process keep."""
    return set(threading.enumerate())


def _threads(earlier: set[threading.Thread]) -> list[str]:
    return [t.name for t in set(threading.enumerate()) - earlier if t.name.startswith("turntree-")]


def test_an_inbox_hands_results_out_in_its_owners_thread() -> None:
    seen: list[tuple[int, str]] = []
    here = threading.current_thread().name

    def work(i: int) -> Callable[[], int]:
        return functools.partial(int, i)

    with Inbox() as inbox:
        assert inbox.take() == 0
        for i in range(5):
            inbox.submit("p", 2, work(i), lambda value: seen.append((value, threading.current_thread().name)))
        taken = 0
        while inbox.pending:
            taken += inbox.take(WAIT_S)
        assert taken == 5
    assert sorted(seen) == [(i, here) for i in range(5)]


def test_an_inbox_waits_no_longer_than_it_is_told() -> None:
    go = threading.Event()
    with Inbox() as inbox:
        inbox.submit("p", 1, functools.partial(go.wait, WAIT_S), lambda value: None)
        assert inbox.take(0.01) == 0
        assert inbox.pending == 1
        go.set()
        assert inbox.take(WAIT_S) == 1


def test_engines_that_answer_as_completed_are_asked_one_by_one() -> None:
    class Streaming(Joining):
        sizes: list[int]

        def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation]]:
            self.sizes.append(len(requests))
            return iter(list(enumerate(self.generate(requests))))

    engine = Streaming(4)
    engine.sizes = []
    assert rows(run(engine=engine)) == rows(run())
    assert set(engine.sizes) == {1}


# Garbage collection --------------------------------------------------------------------------------------------


def test_what_existed_before_is_spared_by_the_collector_only_while_trees_grow() -> None:
    counts: list[int] = []
    run(GrowthPlan(), on_tree=lambda tree: counts.append(gc.get_freeze_count()))
    assert min(counts) > 0
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        run(GrowthPlan())
        assert gc.get_freeze_count() > 0, "somebody else's frozen objects stay frozen"
    finally:
        gc.unfreeze()
