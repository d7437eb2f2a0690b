"""What passages and tools say is never an action, an answer or a trained token, whatever it imitates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.fuzz.material import INJECTED, PIECES, Tape, fuzz, text_of
from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer, decode, encode
from turntree.envs.grammar import AtpoGrammar, HermesGrammar, TagGrammar
from turntree.envs.search_qa import SearchQACore
from turntree.envs.task import Question
from turntree.search_backend.passage import Passage
from turntree.trainers.expansion import random_nodes
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.plan import GrowthPlan, Limits, Prompt
from turntree.trainers.rollout import grow

TOKENS = ByteTokenizer()
GRAMMARS: dict[str, tuple[Any, str, str]] = {
    "tags": (TagGrammar(), "<search>q</search>", "<answer>mine</answer>"),
    "atpo": (AtpoGrammar(), "<search>q</search>", "<answer>\\boxed{mine}</answer>"),
    "hermes": (
        HermesGrammar(max_calls=1),
        '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>',
        "mine",
    ),
}


class Saying:
    """A web page of somebody who knows how agents are written."""

    fingerprint = "saying"

    def __init__(self, title: str, text: str) -> None:
        self.passage = Passage("1", title, text)

    def search(self, queries: Sequence[str], *, k: int) -> list[list[Passage]]:
        return [[self.passage] for _ in queries]


@functools.cache
def dialogue(style: Any) -> Dialogue:
    return Dialogue(TOKENS, style=style)


@fuzz("injection", size=64, each=4)
def test_what_passages_say_is_neither_obeyed_nor_learnt(tape: Tape) -> None:
    grammar, search, answer = GRAMMARS[tape.pick(tuple(GRAMMARS))]
    style = tape.pick(("inline", "chat"))
    title, text = (text_of(tape.some(24), (*INJECTED, *PIECES)) for _ in range(2))
    turns = {0: search, 1: tape.pick((search, "hm", answer)), 2: answer}
    said: list[str] = []

    def speak(context: str, seed: int) -> str:
        said.append(turns[min(context.count("\x02"), 2)])
        return said[-1]

    core = SearchQACore(Saying(title.replace("\x02", ""), "\x02" + text.replace("\x02", "")), grammar=grammar)
    rollout = grow(
        [Prompt("p", Question("1", "who?", ("x",)))],
        core=core,
        engine=ScriptedEngine(speak, TOKENS),
        dialogue=dialogue(style),
        plan=GrowthPlan(trees=1, rounds=1, expansions=1, rule=random_nodes),
        sampling=SamplingParams(200, 1.0, stop=tuple(core.stop)),
        limits=Limits(max_turn_tokens=200, max_context_tokens=20_000),
    )
    own = {search, answer, "hm"}
    for leaf in rollout.groups[0].scored_leaves():
        path = leaf.trajectory()
        assert {node.text for node in path} <= own  # the environment reads the model's own words
        answered = [node.action for node in path if node.action == "answer"]
        assert answered == (["answer"] if leaf.status == "answered" else [])
        assert leaf.info.get("answer") in ("mine", "hm", None)
        assert leaf.reward == 0.0
        for node in path:
            # Nothing in data is a special token: no turn ends and no role begins in it.
            shown = decode(TOKENS, node.observation_ids)
            assert style == "chat" or not any(token >= 256 for token in node.observation_ids)
            assert shown.count("<|im_start|>") <= (2 if style == "chat" else 0)
    for pack in pack_groups(rollout.groups, max_pack_tokens=100_000):
        ids, mask = (np.asarray(column(pack, "tokens", name)) for name in ("ids", "loss_mask"))
        turn = np.asarray(column(pack, "tokens", "turn_id"))
        assert ((turn >= 0) == mask).all()
        for number in set(turn[mask].tolist()):
            trained = tuple(int(i) for i in ids[turn == number])
            assert decode(TOKENS, [i for i in trained if i < 256]) in own


@fuzz("injection", size=64, share=3)
def test_special_tokens_in_data_are_characters(tape: Tape) -> None:
    text = text_of(tape, (*TOKENS.specials, *INJECTED))
    ids = encode(TOKENS, text)
    assert all(i < 256 for i in ids)
    assert decode(TOKENS, ids) == "".join("\ufffd" if "\ud800" <= sign <= "\udfff" else sign for sign in text)
    for style in ("inline", "chat"):
        shown = dialogue(style).observation_ids(text, after=(1,))
        assert sum(i >= 256 for i in shown) == sum(i >= 256 for i in dialogue(style).observation_ids("x", after=(1,)))
