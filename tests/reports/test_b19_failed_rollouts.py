"""B19: one rollout of a group of six raises before its first token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import Request, SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import EngineError
from turntree.search_backend.passage import Passage
from turntree.trainers.credit import at2po, grpo, tree_grpo
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, Rollout, grow


class Shelf:
    fingerprint = "shelf"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def roll(bad: Sequence[int], *, chains: int = 6, one_by_one: bool = False) -> Rollout:
    """Two prompts; in the first, the chains ``bad`` raise before their first token."""
    tokenizer, core = ByteTokenizer(), SearchQACore(Shelf())

    def fail(request: Request) -> bool:
        return request.key[0] == "p0" and request.key[2] in bad

    return grow(
        [Prompt(f"p{i}", Question("q", "Where?", ("Paris",))) for i in range(2)],
        core=core,
        engine=ScriptedEngine(lambda _, s: f"<answer>{'Paris' if s % 2 else 'Rome'}</answer>", tokenizer, fail=fail),
        dialogue=Dialogue(tokenizer),
        plan=GrowthPlan(chains=chains),
        sampling=SamplingParams(max_tokens=1, stop=tuple(core.grammar.stop)),
        limits=Limits(64, 4096, max_batch_requests=1 if one_by_one else None),
    )


@pytest.mark.parametrize("one_by_one", [False, True])
def test_b19_the_error_is_counted_by_type_and_its_message_kept(one_by_one: bool) -> None:
    rollout = roll([0], one_by_one=one_by_one)
    assert rollout.stats.as_dict()["error/EngineError/count"] == 1
    (failed,) = [leaf for leaf in rollout.groups[0].trees[0].leaves() if leaf.status == "failed"]
    assert failed.turn_ids == ()
    assert "scripted failure" in failed.info["message"]
    assert failed.reward is None


def test_b19_the_root_error_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    roll([0, 3])
    assert "2 of 12 trajectories failed (EngineError x 2); the first one: request ('p0', 0, 0)" in caplog.text
    caplog.clear()
    roll([])
    assert not caplog.records


def test_b19_credit_is_that_of_the_rest_of_the_group() -> None:
    """Documented policy: failed leaves leave the batch, and statistics are those of the leaves that remain."""
    rollout = roll([0])
    whole = roll([])
    leaves = rollout.groups[0].scored_leaves()
    assert [leaf.ordinal for leaf in leaves] == [1, 2, 3, 4, 5]
    whole.groups[0].trees[0].root.children.pop(0)
    for rule in (grpo, tree_grpo, at2po):
        got, want = rule(rollout.groups).values, rule(whole.groups).values
        assert [[a.tolist() for a in g] for g in got] == [[a.tolist() for a in g] for g in want]


def test_b19_a_group_with_too_few_leaves_left_is_dropped_whole() -> None:
    rollout = roll([0, 1, 2, 3, 4])
    assert rollout.stats.as_dict()["error/EngineError/count"] == 5
    kept = rollout.drop_small_groups(2)
    assert [g.uid for g in kept.groups] == ["p1"]
    assert kept.stats.dropped_groups == 1


def test_b19_a_rollout_without_any_turn_raises_the_root_error() -> None:
    tokenizer, core = ByteTokenizer(), SearchQACore(Shelf())
    with pytest.raises(EngineError, match="scripted failure"):
        grow(
            [Prompt("p0", Question("q", "Where?", ("Paris",)))],
            core=core,
            engine=ScriptedEngine(["x"], tokenizer, fail=lambda _: True),
            dialogue=Dialogue(tokenizer),
            plan=GrowthPlan(chains=6),
            sampling=SamplingParams(max_tokens=1),
            limits=Limits(64, 4096),
        )
