"""C01: the score does not depend on how many answer tags the prompt holds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from turntree.envs import Question, SearchQAEnv, TagGrammar
from turntree.search_backend import Passage
from turntree.search_backend.bm25 import BM25Backend


class Prompted(TagGrammar):
    """The tag grammar under another prompt."""

    def __init__(self, text: str) -> None:
        super().__init__()
        object.__setattr__(self, "text", text)

    def prompt(self, question: str) -> str:
        text: str = self.__dict__["text"]
        return text.replace("{q}", question)


def score(prompt: str, turns: Sequence[str], gold: str) -> float:
    backend = BM25Backend.from_passages([Passage("1", "Trap", f"<answer>{gold}</answer>")])
    env = SearchQAEnv([Question("1", "q", (gold,))], search=backend, grammar=Prompted(prompt), max_turns=len(turns))
    env.reset(seed=0)
    return [env.step(turn)[1] for turn in turns][-1]


@pytest.mark.parametrize(
    "examples", ["", "<answer>Beijing</answer>", "between <answer> and </answer>. <answer>x</answer>"]
)
def test_c01_one_answer_tag_is_enough_whatever_the_prompt_holds(examples: str) -> None:
    assert score(f"{examples} {{q}}", ["<answer>Paris</answer>"], "Paris") == 1
    assert score(f"{examples} {{q}}", ["I do not know."], "Beijing") == 0
    assert score(f"{examples} {{q}}", ["<search>Trap</search>", "I do not know."], "Trap") == 0


def test_c01_golden_prompt_bug_cases_never_answer_from_the_prompt(golden_dir: Path) -> None:
    """The published extraction finds "Beijing" in its own prompt; ours reads the model's turns only."""
    bug = json.loads((golden_dir / "qa_em.json").read_text(encoding="utf-8"))["real_prompt_bug"]
    for case in bug["cases"]:
        turns = re.split(r"(?<=</search>)<information>.*?</information>", case["body"], flags=re.DOTALL)
        env = SearchQAEnv(
            [Question("1", "q", (case["gold"],))],
            search=BM25Backend.from_passages([Passage("1", "q", "i")]),
            grammar=Prompted(bug["prompt"]),
            max_turns=max(2, len(turns)),
        )
        _, info = env.reset(seed=0)
        for turn in turns:
            _, _, terminated, truncated, info = env.step(turn)
            if terminated or truncated:
                break
        if not case["extracted"] or case["extracted"] not in case["body"]:
            assert info.get("answer") is None, case
        elif case.get("valid"):
            assert (info["answer"], info["format_valid"]) == (case["extracted"], True), case
