"""The rule checker on played episodes of search and code: whoever takes every gold step is complete, others are not."""

from __future__ import annotations

from collections import Counter

import pytest

from turntree.agents.completeness import Ballot, RuleChecker, Vote
from turntree.agents.scorer import Finished
from turntree.agents.teacher import Teacher, play
from turntree.envs.grammar import Grammar, PlannerGrammar, TagGrammar
from turntree.envs.limits import Limits
from turntree.envs.sandbox import PythonTool, probe
from turntree.envs.search_qa import SearchQACore
from turntree.envs.worlds import generate_world
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.search_backend import BM25Backend

pytestmark = pytest.mark.skipif(bool(probe().missing), reason=f"no isolation here: {probe().missing}")


def played(grammar: Grammar, teacher: Teacher) -> list[Finished]:
    world = generate_world("code", seed=1, questions=24)
    core = SearchQACore(
        BM25Backend.from_passages(world.passages),
        grammar=grammar,
        limits=Limits(max_turns=4),
        tools={"python": PythonTool(wall_s=60)},
    )
    return play(core, world.questions, teacher=teacher, seed=0)


def complete(found: list[Finished]) -> Counter[bool]:
    votes = RuleChecker().vote([Ballot(finished, 0) for finished in found])
    return Counter(vote.complete for vote in votes if isinstance(vote, Vote))


@pytest.mark.parametrize("grammar", [WorldGrammar(), PlannerGrammar(WorldGrammar()), TagGrammar()])
def test_the_oracle_is_complete_on_every_question(grammar: Grammar) -> None:
    found = played(grammar, Teacher())
    assert any(turn.action == "python" for finished in found for turn in finished.turns)
    assert complete(found) == {True: 24}


def test_who_stops_early_is_not() -> None:
    found = played(PlannerGrammar(WorldGrammar()), Teacher(laziness=1.0))
    one_hop = sum(finished.task.metadata["hops"] == 1 for finished in found)
    assert complete(found) == {True: one_hop, False: 24 - one_hop}
