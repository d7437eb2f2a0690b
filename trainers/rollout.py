"""Growing trees: many episodes of many trees at once, with one engine and one batch of tools.

Rounds are a logical clock of each tree: there is no barrier between trees. Whatever turns are ready, of any tree, form
the engine's next batch. What a tree becomes does not depend on the schedule: a child's ordinal, and with it every seed,
is fixed when the child is scheduled. Only an adaptive plan makes trees wait, outside the bound on trees in flight: for
the first chains of their prompt, then for the deal.

There are two schedules. In the ``fixed`` one engine batches and batches of tool calls take turns in one thread, so the
same run makes the same batches. In the ``overlap`` one tool calls run in threads while the engine generates for other
rows, and so do requests to an engine that takes them one by one. Trees change in this thread only, in both.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Engine, Generation, Prefix, Request, SamplingParams
from turntree.agents.scorer import Answers, Failed, Finisher, Scored, Scorer
from turntree.envs.core import TurnCore
from turntree.envs.task import FrozenDict, Question
from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.adaptive import allowances, is_certain, left_over, rewards_differ
from turntree.trainers.credit import drop_small_groups
from turntree.trainers.desk import EngineDesk, JudgeDesk, Judging
from turntree.trainers.episode import Ask, Episode, Setting, as_failure, failed_leaf
from turntree.trainers.expansion import ask_rule, needs_of
from turntree.trainers.growth import Growth, Job, as_finished, reward, total
from turntree.trainers.inbox import Inbox
from turntree.trainers.plan import Allowance, Budget, GrowthPlan, Limits, Prompt
from turntree.trainers.seeds import derive_rng, derive_seed
from turntree.trainers.tally import RolloutStats, Tally
from turntree.trainers.tool_desk import ToolDesk, in_flight, overlaps
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["Budget", "GrowthPlan", "Limits", "Prompt", "Rollout", "RolloutStats", "grow"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The groups, one a prompt and in the order of the prompts, and what growing them took."""

    groups: tuple[Group, ...]
    stats: RolloutStats

    def drop_small_groups(self, minimum: int = 2) -> Rollout:
        """Without the groups that have fewer than ``minimum`` scored leaves; these are counted."""
        kept, dropped = drop_small_groups(self.groups, minimum)
        return Rollout(tuple(kept), replace(self.stats, dropped_groups=self.stats.dropped_groups + len(dropped)))


def grow(
    prompts: Sequence[Prompt],
    *,
    core: TurnCore[Any],
    engine: Engine,
    dialogue: Dialogue,
    plan: GrowthPlan,
    sampling: SamplingParams,
    limits: Limits,
    run_seed: int = 0,
    scorer: Scorer | None = None,
    finisher: Finisher | None = None,
    answers: Answers = "if_needed",
    on_tree: Callable[[Tree], None] | None = None,
    on_counted: Callable[[Tree, Tally], None] | None = None,
    only: Mapping[str, Collection[int]] | None = None,
) -> Rollout:
    """Grow ``plan.trees`` trees for every prompt and score their leaves.

    ``sampling`` gives temperature and stop strings; ``max_tokens`` of each turn follows from ``limits``. ``scorer``
    and ``finisher`` judge the finished trajectories of a round (default: the environment's own reward); the finisher is
    left out where the scorer needs no answer, unless ``answers`` is ``always``. ``on_tree`` is called
    with every tree that is finished, for progress bars (with an adaptive plan most are finished at the end);
    ``on_counted`` too, with what the tree used. ``only``: the indices of the trees to grow, by prompt uid (None: all);
    each becomes what it would have become among the others, so an adaptive plan, which compares trees, refuses it.

    A trajectory that fails for outside reasons (a tool past its retries, an engine error, a scorer that cannot
    judge) is a leaf of status ``failed``, without a reward, counted by type in ``stats.errors``.

    Equal arguments give equal trees whatever the batches were, given an engine whose draws depend on the request
    alone, and except for rules that declare ``needs = "any"``. An engine whose rounding depends on the batch needs
    ``limits.schedule = "fixed"`` for it.

    Raises ``ConfigError`` for repeated prompt uids and for rules or scorers that break their contract, ``EngineError``
    when the engine answers nothing at all, or no more.
    """
    repeated = [uid for uid, n in Counter(p.uid for p in prompts).items() if n > 1]
    if repeated:
        raise ConfigError(f"prompt uids must be unique in a rollout, found twice: {repeated[:5]}; number the instances")
    if only is not None and plan.adaptive is not None:
        raise ConfigError("an adaptive plan moves budgets between all trees of a rollout; some of them cannot be grown")
    strange = [(uid, i) for uid, chosen in (only or {}).items() for i in chosen if i not in range(plan.trees)]
    if strange:
        raise ConfigError(f"only: a prompt has the trees 0 to {plan.trees - 1}, found {strange[:5]}")
    sampling = replace(sampling, max_tokens=limits.max_turn_tokens)  # of nearly all turns
    setting = Setting(core, dialogue, sampling, limits, run_seed)
    judging = Judging(scorer, finisher, answers)
    nursery = _Nursery(setting, engine, plan, judging, on_tree, on_counted, only)
    return nursery.run(prompts)


class _Nursery:
    """All growing trees of a rollout, and what their episodes wait for."""

    def __init__(
        self,
        setting: Setting,
        engine: Engine,
        plan: GrowthPlan,
        judging: Judging,
        on_tree: Callable[[Tree], None] | None,
        on_counted: Callable[[Tree, Tally], None] | None,
        only: Mapping[str, Collection[int]] | None,
    ) -> None:
        limits = setting.limits
        self.setting = setting
        self.plan = plan
        self.on_tree = on_tree
        self.on_counted = on_counted
        self.only = only
        self.asynchronous = needs_of(plan.rule) == "any"
        self.inbox = Inbox()
        overlap = overlaps(limits.schedule, engine)
        self.engine = EngineDesk(engine)
        slots = in_flight(engine) if overlap else 0
        self.slots = min(slots, limits.max_batch_requests or slots)
        self.asked = 0
        self.tools = ToolDesk(
            setting.core.tools,
            retries=limits.tool_retries,
            backoff_s=limits.tool_backoff_s,
            inbox=self.inbox if overlap else None,
        )
        self.judge = JudgeDesk(judging, self.inbox if overlap else None)
        self.growing: dict[Growth, None] = {}
        self.ended: dict[Growth, None] = {}
        self.places = itertools.count()
        self.families: list[list[Growth]] = []
        self.resumable: deque[Growth] = deque()
        self.dealt = plan.adaptive is None
        self.moved_used = 0
        self.turns: deque[Job] = deque()

    def run(self, prompts: Sequence[Prompt]) -> Rollout:
        seeds = self._plant(prompts)
        with _sparing_the_collector(), self.inbox:
            try:
                while self._fill(seeds) or (self._deal() and self._fill(seeds)):
                    self._advance()
            except BaseException:  # Ctrl-C too: what runs in threads should not keep anybody waiting
                self.engine.abandon()
                raise
        self.engine.check()
        groups = tuple(Group(f[0].prompt.uid, [g.tree for g in f]) for f in self.families)
        stats = self._stats()
        _warn(groups, stats)
        return Rollout(groups, stats)

    def _advance(self) -> None:
        self._generate()
        self.inbox.take()
        self.tools.start()
        if not self._busy():
            self._wait()
        self._end_rounds()

    def _stats(self) -> RolloutStats:
        given = [g.given for f in self.families for g in f]
        return RolloutStats.of(
            ((total(f), sum((g.given for g in f), Allowance())) for f in self.families),
            trees=sum(map(len, self.families)),
            tool_attempts=self.tools.attempts,
            budget=self.plan.budget,
            settled=sum(all(g.certain for g in f) for f in self.families),
            moved=sum((g for g in given if g.expansions > 0), Allowance()),
            moved_used=self.moved_used,
        )

    # Trees

    def _plant(self, prompts: Sequence[Prompt]) -> Generator[Growth, None, None]:
        """The trees of all prompts, one after the other, each made when there is room for it."""
        plan = self.plan
        for prompt in prompts:
            indices = range(plan.trees) if self.only is None else sorted(set(self.only.get(prompt.uid, ())))
            if not indices:
                continue
            plant = self._roots(prompt)
            self.families.append([])
            for index in indices:
                task = prompt.task if isinstance(prompt.task, Question) else None
                share = (plan.budget or Budget()).share(index, plan.trees)
                seed = derive_seed(self.setting.run_seed, prompt.uid, index, "tree")
                tree = Tree(plant(), prompt.uid, index, task, seed=seed)
                growth = Growth(prompt, tree, share, plan.rounds * plan.expansions, self.families[-1])
                growth.family.append(growth)
                yield growth

    def _roots(self, prompt: Prompt) -> Callable[[], Node]:
        """What makes the roots of a prompt's trees: all share one prefix handle, so the engine computes it once."""
        core, dialogue = self.setting.core, self.setting.dialogue
        try:
            state, text = core.initial(prompt.task, seed=derive_seed(self.setting.run_seed, prompt.uid, "env"))
            ids = tuple(dialogue.prompt_ids(text))
        except TurnTreeError as error:
            failure = as_failure(error)
            info = FrozenDict({"error": failure.kind, "message": failure.message})
            return functools.partial(Node, branchable=False, info=info)
        return functools.partial(Node, observation_ids=ids, observation=text, state=state, prefix=Prefix(ids))

    def _fill(self, seeds: Generator[Growth, None, None]) -> bool:
        """Go on with trees that waited, then start new ones, while there is room; whether any tree is in flight."""
        limit = self.setting.limits.max_concurrent_trees
        while limit is None or len(self.growing) < limit:
            if self.resumable:
                growth = self.resumable.popleft()
                self._expand(growth)
                self._end(growth)
            else:
                fresh = next(seeds, None)
                if fresh is None:
                    break
                growth = fresh
                for _ in range(self.plan.chains):
                    self._launch(growth, growth.tree.root, None)
            if growth.in_flight:
                growth.place = next(self.places)
                self.growing[growth] = None
        return bool(self.growing)

    def _launch(self, growth: Growth, parent: Node, origin: Node | None) -> None:
        """Schedule one trajectory from ``parent``."""
        ordinal = growth.next_ordinal(parent)
        if parent.parent is None and "error" in parent.info:  # the prompt itself could not be made
            growth.tally.trajectories += 1
            leaf = failed_leaf(ordinal, Failed(parent.info["error"], parent.info["message"]))
            self._land(growth, parent.add_child(leaf))
            return
        growth.running += 1
        episode = Episode(self.setting, growth.tree, growth.tally).play(parent, ordinal, origin)
        self._resume(growth, episode, None)

    def _resume(self, growth: Growth, episode: Generator[Ask, Any, Node], reply: Any) -> None:
        try:
            ask = episode.send(reply)
        except StopIteration as end:
            growth.running -= 1
            self._land(growth, end.value)
            return
        if isinstance(ask, Request):
            self.turns.append(Job(growth, episode, ask))
        else:
            self.tools.put(ask, functools.partial(self._resume, growth, episode))

    def _land(self, growth: Growth, leaf: Node) -> None:
        growth.landed.append(leaf)
        if self.asynchronous or not growth.running:
            self.ended[growth] = None

    # Batches

    def _generate(self) -> None:
        """One batch by this thread, or as many requests as the engine still takes, each in a thread of its own."""
        if not self._may_ask():
            return
        size = min(len(self.turns), self.setting.limits.max_batch_requests or len(self.turns))
        if self.slots:
            size = min(size, self.slots - self.asked)
        jobs = [self.turns.popleft() for _ in range(size)]
        self.asked += size
        if not self.slots:
            self._replied(jobs, self.engine.ask([job.ask for job in jobs]))
            return
        for job in jobs:
            work, then = functools.partial(self.engine.ask, [job.ask]), functools.partial(self._replied, [job])
            self.inbox.submit("engine", self.slots, work, then)

    def _may_ask(self) -> bool:
        """Whether turns are ready and the engine takes them."""
        return bool(self.turns) and (not self.slots or self.asked < self.slots)

    def _replied(self, jobs: Sequence[Job], replies: Sequence[tuple[int, Generation | Failed]]) -> None:
        self.asked -= len(jobs)
        for index, reply in replies:
            self._resume(jobs[index].growth, jobs[index].episode, reply)

    def _busy(self) -> bool:
        """Whether there is something to do before anything arrives."""
        return self._may_ask() or self._may_judge()

    def _wait(self) -> None:
        """Until something arrives or a tool call is to be tried again."""
        if self.inbox.pending:
            self.inbox.take(self.tools.wait_s())
        else:
            time.sleep(self.tools.wait_s() or 0.0)

    # Rounds

    def _may_judge(self) -> bool:
        return bool(self.ended) and not self.judge.busy

    def _end_rounds(self) -> None:
        """Score what landed in trees whose round is over, then start their next round or finish them."""
        if not self._may_judge():
            return
        ended, self.ended = self.ended, {}
        ready = sorted((g for g in ended if self.asynchronous or not g.running), key=lambda g: g.place)
        live: list[tuple[Growth, Node]] = []
        for growth in ready:
            live += [(growth, leaf) for leaf in growth.landed if leaf.status != "failed"]
            growth.judged, growth.landed = len(growth.landed), []
        self.judge.ask([as_finished(*pair) for pair in live], functools.partial(self._go_on, ready, live))

    def _go_on(self, ready: Sequence[Growth], live: Sequence[tuple[Growth, Node]], scored: Sequence[Scored]) -> None:
        for (_, leaf), outcome in zip(live, scored, strict=True):
            reward(leaf, outcome)
        for growth in ready:
            growth.judged = 0
            if not self._waits(growth):
                for _ in range(self._picks(growth)):
                    self._expand(growth)
                self._end(growth)
            if not growth.in_flight:
                self.growing.pop(growth, None)

    def _picks(self, growth: Growth) -> int:
        """How often the rule is asked now: once a round, or until as many trajectories run as may at the same time."""
        if not self.asynchronous:
            return 1
        return max(0, max(self.plan.chains, self.plan.expansions) - growth.running)

    def _end(self, growth: Growth) -> None:
        """Finish a tree that grows no more, unless the deal may still extend it."""
        if self.dealt and not growth.in_flight:
            self._finish(growth)

    def _expand(self, growth: Growth) -> None:
        """One round of the tree, or one pick of an asynchronous rule; nothing once plan or budget is used up."""
        tree, plan = growth.tree, self.plan
        step = 1 if self.asynchronous else plan.expansions
        k = min(step, growth.left)
        if not k or not growth.tally.within(growth.budget, running=growth.running) or not tree.root.branchable:
            return
        if growth.budget.leaves is not None:
            k = min(k, growth.budget.leaves - growth.tally.trajectories - growth.running)
        rng = derive_rng(self.setting.run_seed, tree.prompt_uid, tree.index, "pick", growth.picks)
        picks = ask_rule(plan.rule, tree, k, rng)
        growth.left -= min(step, growth.left)
        growth.picks += step
        self.moved_used += len(picks) if growth.given.expansions > 0 else 0
        tree.rounds = growth.picks // plan.expansions
        for pick in picks:
            self._launch(growth, pick.parent, Node(picked=pick.picked, score=pick.score, reason=pick.reason))

    def _finish(self, growth: Growth) -> None:
        """Prune, count, let go of the engine's handles, and hand the tree over."""
        self._prune(growth)
        growth.tally.close(growth.tree)
        for node in growth.tree.root.walk():
            node.prefix = None
        growth.scheduled.clear()
        if self.on_tree is not None:
            self.on_tree(growth.tree)
        if self.on_counted is not None:
            self.on_counted(growth.tree, growth.tally)

    def _prune(self, growth: Growth) -> None:
        leaves, keep = growth.tree.scored_leaves(), self.plan.kept_leaves
        if keep is None or len(leaves) <= keep:
            return
        rng = derive_rng(self.setting.run_seed, growth.prompt.uid, growth.tree.index, "keep")
        chosen = set(rng.choice(len(leaves), size=keep, replace=False).tolist())
        for i, leaf in enumerate(leaves):
            leaf.pruned = i not in chosen

    # Adaptive budgets

    def _waits(self, growth: Growth) -> bool:
        """Whether a tree whose first chains just ended has to wait for those of its prompt's other trees."""
        if self.plan.adaptive is None or growth.certain is not None:
            return False
        others = [g.certain for g in growth.family if g is not growth]
        growth.certain = is_certain(growth.tree, self.plan.adaptive)
        if growth.certain:
            return False not in others
        if False not in others:  # the first that is not certain lets go on those that waited
            self.resumable.extend(g for g in growth.family if g.certain)
        return False

    def _deal(self) -> bool:
        """Give what settled prompts left over to the other trees, once; whether any of these may go on."""
        if self.dealt:
            return False
        self.dealt = True
        settled = [f for f in self.families if all(g.certain for g in f)]
        surplus = [left_over(self.plan, total(f)) for f in settled]
        heirs = self._heirs()
        shares = allowances(sum(surplus, Allowance()), len(heirs))
        for family, given in zip(settled, surplus, strict=True):
            family[0].given = -given if shares else Allowance()
        for heir, share in zip(heirs, shares, strict=False):
            heir.given, heir.left, heir.budget = share, share.expansions, heir.budget.extended(share)
        self.resumable.extend(heirs[: len(shares)])
        for growth in (g for f in self.families for g in f if not g.given.expansions > 0):
            self._finish(growth)
        return bool(shares)

    def _heirs(self) -> list[Growth]:
        """The trees that may be given more, in the order of the deal; see ``turntree.trainers.adaptive``."""
        order: list[tuple[bool, int, int, Growth]] = []
        for place, family in enumerate(self.families):
            if family[0].tree.root.branchable and not all(g.certain for g in family):
                alike = not rewards_differ(g.tree for g in family)
                order.extend((alike, g.tree.index, place, g) for g in family)
        return [growth for *_, growth in sorted(order, key=lambda row: row[:3])]


@contextmanager
def _sparing_the_collector() -> Iterator[None]:
    """Garbage collection passes over what exists already: with torch loaded a full pass takes half a second.

    Growing makes so many small objects that Python would make such passes all the time. Left alone where somebody else
    froze objects, which a thaw would undo.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _warn(groups: Sequence[Group], stats: RolloutStats) -> None:
    """Show why leaves failed: later only numbers remain of them."""
    if not stats.failed:
        return
    leaves = (leaf for group in groups for tree in group.trees for leaf in tree.leaves())
    first = next(leaf for leaf in leaves if leaf.status == "failed")
    _log.warning(
        "%d of %d trajectories failed (%s); the first one: %s",
        stats.failed,
        stats.trajectories,
        ", ".join(f"{kind} x {n}" for kind, n in sorted(stats.errors.items())),
        first.info["message"] or first.info["error"],
    )
