"""Growing trees as published code does: all rows of the batch take each turn together, and each round too."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

from turntree.agents.engines.protocol import Engine, Prefix, Request
from turntree.agents.scorer import score
from turntree.envs.tools import execute
from turntree.trainers.episode import Ask, Episode, Setting
from turntree.trainers.growth import Growth, as_finished, reward
from turntree.trainers.plan import Budget, GrowthPlan, Prompt
from turntree.trainers.seeds import derive_rng, derive_seed
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["grow_with_barrier"]

Playing: TypeAlias = tuple[Growth, Generator[Ask, Any, Node], Ask]


def grow_with_barrier(
    prompts: Sequence[Prompt], *, engine: Engine, plan: GrowthPlan, setting: Setting
) -> tuple[Group, ...]:
    """The trees of ``turntree.trainers.rollout.grow``, without budgets, failures or judges, in lock step."""
    growths = [growth for prompt in prompts for growth in _plant(prompt, plan, setting)]
    _play([_launch(g, g.tree.root, None, setting) for g in growths for _ in range(plan.chains)], engine, setting)
    for _ in range(plan.rounds):
        playing = []
        for growth in growths:
            rng = derive_rng(setting.run_seed, growth.prompt.uid, growth.tree.index, "pick", growth.picks)
            growth.picks += plan.expansions
            for pick in plan.rule(growth.tree, plan.expansions, rng):
                origin = Node(picked=pick.picked, score=pick.score, reason=pick.reason)
                playing.append(_launch(growth, pick.parent, origin, setting))
        _play(playing, engine, setting)
    for growth in growths:
        for node in growth.tree.root.walk():
            node.prefix = None
    return tuple(Group(p.uid, [g.tree for g in growths if g.prompt is p]) for p in prompts)


def _plant(prompt: Prompt, plan: GrowthPlan, setting: Setting) -> list[Growth]:
    state, text = setting.core.initial(prompt.task, seed=derive_seed(setting.run_seed, prompt.uid, "env"))
    prefix = Prefix(tuple(setting.dialogue.prompt_ids(text)))
    growths: list[Growth] = []
    for index in range(plan.trees):
        root = Node(observation_ids=prefix.ids, observation=text, state=state, prefix=prefix)
        seed = derive_seed(setting.run_seed, prompt.uid, index, "tree")
        growths.append(Growth(prompt, Tree(root, prompt.uid, index, prompt.task, seed=seed), Budget(), 0, growths))
    return growths


def _launch(growth: Growth, parent: Node, origin: Node | None, setting: Setting) -> Playing:
    episode = Episode(setting, growth.tree, growth.tally).play(parent, growth.next_ordinal(parent), origin)
    return growth, episode, next(episode)


def _play(playing: Sequence[Playing], engine: Engine, setting: Setting) -> None:
    """Turn by turn: every row generates, then every row that asked for something searches, then the next turn."""
    landed: list[tuple[Growth, Node]] = []
    while playing:
        playing = _answer(playing, landed, lambda asks: engine.generate([a for a in asks if isinstance(a, Request)]))
        searching = [row for row in playing if not isinstance(row[2], Request)]
        playing = [row for row in playing if isinstance(row[2], Request)]
        playing += _answer(searching, landed, lambda asks: _search(asks, setting))
    finished = [as_finished(*pair) for pair in landed]
    for (_, leaf), scored in zip(landed, score(finished, scorer=None), strict=True):
        reward(leaf, scored)


def _search(asks: Sequence[Ask], setting: Setting) -> list[Any]:
    turns = [ask for ask in asks if isinstance(ask, tuple)]
    outcomes = iter(execute(setting.core.tools, [call for calls in turns for call in calls]))
    return [[next(outcomes) for _ in calls] for calls in turns]


def _answer(
    playing: Sequence[Playing], landed: list[tuple[Growth, Node]], ask_all: Callable[[Sequence[Ask]], Sequence[Any]]
) -> list[Playing]:
    if not playing:
        return []
    further: list[Playing] = []
    for (growth, episode, _), reply in zip(playing, ask_all([ask for _, _, ask in playing]), strict=True):
        try:
            further.append((growth, episode, episode.send(reply)))
        except StopIteration as end:
            landed.append((growth, end.value))
    return further
