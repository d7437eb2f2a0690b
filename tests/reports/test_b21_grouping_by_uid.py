"""B21: two questions with the same text and id but other answers stay two groups."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.errors import ConfigError
from turntree.search_backend.passage import Passage
from turntree.trainers.credit import grpo
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, Rollout, grow

TWINS = [Question("same", "Which city?", ("Paris",)), Question("same", "Which city?", ("Rome",))]


class Shelf:
    fingerprint = "shelf"

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


def roll(uids: Sequence[str], script: Sequence[str]) -> Rollout:
    tokenizer, core = ByteTokenizer(), SearchQACore(Shelf())
    return grow(
        [Prompt(uid, question) for uid, question in zip(uids, TWINS, strict=True)],
        core=core,
        engine=ScriptedEngine(script, tokenizer),
        dialogue=Dialogue(tokenizer),
        plan=GrowthPlan(chains=2),
        sampling=SamplingParams(max_tokens=1, stop=tuple(core.grammar.stop)),
        limits=Limits(64, 4096),
    )


def test_b21_equal_texts_are_scored_against_their_own_answers() -> None:
    rollout = roll(["0/0", "0/1"], ["<answer>Paris</answer>"] * 4)
    assert [g.uid for g in rollout.groups] == ["0/0", "0/1"]
    assert [[leaf.reward for leaf in g.scored_leaves()] for g in rollout.groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert not any(a.any() for g in grpo(rollout.groups).values for a in g)
    assert [g.trees[0].task for g in rollout.groups] == TWINS


def test_b21_equal_uids_are_refused_instead_of_merged() -> None:
    with pytest.raises(ConfigError, match="unique"):
        roll(["same", "same"], [])
