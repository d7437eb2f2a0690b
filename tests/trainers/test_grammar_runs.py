"""Grammars in rollouts, cold starts and runs: calls as JSON, results of role tool, boxed answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turntree.agents import ByteTokenizer, Dialogue
from turntree.agents.engines import SamplingParams, ScriptedEngine
from turntree.agents.teacher import Teacher, trajectories
from turntree.agents.tokenizer import decode
from turntree.commands import run_train
from turntree.envs import Action, HermesGrammar, Limits, Question, SearchQACore, tool
from turntree.search_backend import BM25Backend, Passage
from turntree.trainers.expansion import random_nodes
from turntree.trainers.packing import pack_groups
from turntree.trainers.rollout import GrowthPlan, Prompt, grow
from turntree.trainers.rollout import Limits as TokenLimits
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.sft import demonstration_group

STEPS = [{"query": "Hamlet", "supporting_id": "d1", "answer": "Shakespeare"}]
QUESTION = Question.from_json(
    {"id": "q", "question": "Who wrote Hamlet?", "golden_answers": ["Shakespeare"], "metadata": {"steps": STEPS}}
)
BACKEND = BM25Backend.from_passages([Passage("d1", "Hamlet", "A tragedy by Shakespeare."), Passage("d2", "Faust", "x")])


@tool(effects="external")
def note(text: str) -> str:
    """Writes to the world outside."""
    return f"noted {text}"


def grown(grammar: HermesGrammar, *turns: str) -> Any:
    """One chain in a conversation with messages of role tool."""
    tokenizer = ByteTokenizer()
    core = SearchQACore(BACKEND, limits=Limits(max_turns=4, top_k=1), grammar=grammar, tools={"note": note})
    return grow(
        [Prompt("q", task=QUESTION)],
        core=core,
        engine=ScriptedEngine(list(turns), tokenizer),
        dialogue=Dialogue(tokenizer, style="tools"),
        plan=GrowthPlan(trees=1, chains=1, rounds=0, expansions=0, rule=random_nodes),
        sampling=SamplingParams(max_tokens=1000, stop=core.grammar.stop),
        limits=TokenLimits(max_turn_tokens=1000, max_context_tokens=20_000),
    )


def test_a_rollout_with_parallel_calls_is_the_templates_conversation() -> None:
    grammar = HermesGrammar()
    searches = grammar.write("t", Action("search", "Hamlet"), Action("search", "Faust"))
    rollout = grown(grammar, searches, "Shakespeare")
    (leaf,) = rollout.groups[0].trees[0].leaves()
    assert (leaf.status, leaf.reward, rollout.stats.tool_calls) == ("answered", 1.0, 2)
    (pack,) = pack_groups(rollout.groups, max_pack_tokens=20_000)
    ids, mask = pack["tokens", "ids"].tolist(), pack["tokens", "loss_mask"].tolist()
    said = [
        {"role": "assistant", "content": searches},
        {"role": "tool", "content": "Doc 1(Title: Hamlet) A tragedy by Shakespeare."},
        {"role": "tool", "content": "Doc 1(Title: Faust) x"},
    ]
    conversation = ByteTokenizer().apply_chat_template(said, add_generation_prompt=True) + "Shakespeare<|im_end|>"
    assert decode(ByteTokenizer(), ids).endswith(conversation)
    sampled = [token for token, kept in zip(ids, mask, strict=True) if kept]
    assert decode(ByteTokenizer(), sampled).replace("<|im_end|>", "") == searches + "Shakespeare"


def test_nothing_branches_after_an_external_call() -> None:
    grammar = HermesGrammar()
    noting = '<tool_call>{"name": "note", "arguments": {"text": "x"}}</tool_call>'
    both = grammar.write("t", Action("search", "Hamlet")) + noting
    rollout = grown(grammar, both, "Shakespeare")
    nodes = list(rollout.groups[0].trees[0].nodes())
    assert "noted x" in nodes[1].observation
    assert not any(node.branchable for node in nodes if node.action)


def test_a_cold_start_teaches_where_an_answer_ends() -> None:
    core = SearchQACore(BACKEND, grammar=HermesGrammar())
    (demo,) = trajectories(core, [QUESTION], teacher=Teacher(), seed=0)
    dialogue = Dialogue(ByteTokenizer(), style="tools")
    group = demonstration_group(demo, dialogue, uid="q", max_tokens=9000, stops=core.stop)
    (pack,) = pack_groups([group], max_pack_tokens=9000)
    ids, mask = pack["tokens", "ids"].tolist(), pack["tokens", "loss_mask"].tolist()
    ends = [i for i, token in enumerate(ids) if token == ByteTokenizer.eos_token_id and mask[i]]
    assert len(ends) == len(demo.turns)
    assert ends[-1] == len(ids) - 1


@pytest.mark.parametrize(
    ("grammar", "dialogue"), [("AtpoGrammar", "inline"), ("HermesGrammar", "chat"), ("HermesGrammar", "tools")]
)
def test_a_run_trains_in_every_grammar(bed: Any, tmp_path: Path, grammar: str, dialogue: str) -> None:
    own = [f"env.grammar=turntree.envs.grammar:{grammar}", f"model.dialogue={dialogue}", "reward.name=atpo"]
    base = [arg for arg in bed.args if not arg.startswith(("env.grammar", "reward.name", "sampling.max_context"))]
    out = tmp_path / "run"
    run_train([*base, *own, "sampling.max_context_tokens=1000", "trainer.steps=1", f"out={out}"])
    (row,) = read_metrics(out / "metrics.jsonl")
    assert -1 <= row["critic/score/mean"] <= 1
    assert row["budget/generated_tokens"] > 0
