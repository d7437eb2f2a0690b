"""Training with the completeness reward, given by configuration alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train

RULES = '''
from users_rules import Babble

from turntree.envs.grammar import Validity


class Free(Babble):
    """Any babble is legal."""

    fingerprint = "free"

    def validity(self, turns):
        return Validity(True)
'''

SCORER = "reward.scorer=turntree.agents.completeness:CompletenessScorer"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "free_rules.py").write_text(RULES, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "env.grammar=free_rules:Free"


PLANS = '''
from free_rules import Free

from turntree.envs.core import Action
from turntree.envs.grammar import ParsedTurn


class Plans(Free):
    """Stops where :class:`Babble` would have answered."""

    fingerprint = "plans"

    def parse(self, text):
        parsed = super().parse(text)
        if "<finish>" in text or (parsed.action.kind == "answer" and not text.startswith("<think> t ")):
            return ParsedTurn(Action("finish", ""))
        return parsed
'''

#: Votes and trees combine: the panel below votes three times on each leaf, at random, by content.
PANEL = """
import zlib

from turntree.agents.completeness import Vote, call_turns


class Panel:
    fingerprint = "panel"
    constant = False
    needs_answer = False

    def content(self, finished):
        return repr([turn.calls for turn in call_turns(finished)])

    def vote(self, ballots):
        return [Vote(bool(zlib.crc32(f"{self.content(b.finished)}{b.seed}".encode()) % 2)) for b in ballots]
"""


@pytest.mark.parametrize("agent", ["react", "planner_summarizer"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce_pp", "tree_grpo", "at2po"])
def test_every_algorithm_trains_both_agents_by_completeness(
    make_config: Callable[..., RunConfig], free: str, tmp_path: Path, algorithm: str, agent: str
) -> None:
    """Two updates each: trees and votes combine, the rule part counts, the answer is never asked for."""
    (tmp_path / "plans_rules.py").write_text(PLANS, encoding="utf-8")
    (tmp_path / "panel_rules.py").write_text(PANEL, encoding="utf-8")
    out, split = tmp_path / "run", agent == "planner_summarizer"
    options = (
        "env.grammar=plans_rules:Plans" if split else free,
        f"agent={agent}",
        "reward.scorer_args.checker=panel_rules:Panel",
        "reward.scorer_args.votes=3",
        "reward.scorer_args.penalties.max_argument=5",
        "reward.scorer_args.penalties.bad_argument=0.05",
        "trainer.prompts_per_step=2",
        "trainer.steps=2",
        "sampling.max_turn_tokens=8",
    )
    train(make_config(f"algorithm={algorithm}", SCORER, *options, f"out={out}"))
    found = rows(out)
    assert [row["total/updates"] for row in found] == [1, 2]
    for row in found:
        total = row["tree/reward/completeness"] + row["tree/reward/rule"]
        assert row["critic/score/mean"] == pytest.approx(total)
        assert -0.5 <= row["critic/score/min"] <= row["critic/score/max"] <= 1
        assert row["budget/failed"] == 0
        assert row.get("summarizer/requests", 0) == 0
    assert any(row["tree/reward/rule"] < 0 for row in found)
    assert any(row["actor/grad_norm"] > 0 for row in found)
    assert {row["tree/reward/completeness"] for row in found} - {0.0, 1.0}


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_pp"])
def test_rules_of_token_rewards_train_without_a_kl(
    make_config: Callable[..., RunConfig], free: str, tmp_path: Path, algorithm: str
) -> None:
    """With ``kl_coef=0`` no token has a reward of its own; the leaf's still reaches every token."""
    out = tmp_path / "run"
    length = "reward.scorer_args.penalties.max_argument=5"
    train(make_config(f"algorithm={algorithm}", "algorithm.kl_coef=0", SCORER, length, free, f"out={out}"))
    assert all(row["total/skipped_updates"] == 0 and row["actor/grad_norm"] > 0 for row in rows(out))


@pytest.mark.parametrize("algorithm", ["tree_grpo"])
def test_completeness_trains(make_config: Callable[..., RunConfig], free: str, tmp_path: Path, algorithm: str) -> None:
    out, steps = tmp_path / "run", 2 if algorithm == "tree_grpo" else 1
    penalties = (
        "reward.scorer_args.penalties.repeated=0.5",
        "reward.scorer_args.penalties.floor=-0.25",
        "reward.scorer_args.penalties.max_argument=5",
    )
    train(make_config(f"algorithm={algorithm}", SCORER, *penalties, free, f"trainer.steps={steps}", f"out={out}"))
    found = rows(out)
    assert len(found) == steps
    for row in found:
        assert 0 <= row["tree/reward/completeness"] <= 1
        assert -0.25 <= row["tree/reward/rule"] <= 0
        total = row["tree/reward/completeness"] + row["tree/reward/rule"]
        assert row["critic/score/mean"] == pytest.approx(total)
        assert row["critic/score/min"] >= -0.25
        assert row["budget/failed"] == 0
    assert any(row["critic/score/max"] > row["critic/score/min"] for row in found)


def test_votes_of_a_server_that_fails_leave_no_zero(
    make_config: Callable[..., RunConfig], free: str, openai_server: Any, tmp_path: Path
) -> None:
    """Every other vote is nonsense: those leaves are failed and counted, the others are worth what was said."""
    say = {"kind": "say", "usage": {"prompt_tokens": 5, "completion_tokens": 5}}
    texts = ("<verdict>complete</verdict>", "no idea")
    openai_server.faults(*[{**say, "text": texts[i % 2]} for i in range(400)])
    given = (f"base_url={openai_server.url}", "model=tiny", "retries=0", "concurrency=8")
    llm = ("reward.scorer_args.checker=llm", *(f"reward.scorer_args.checker_args.{option}" for option in given))
    options = ("reward.scorer_args.votes=1", "reward.scorer_args.penalties.repeated=0", "trainer.steps=1")
    train(make_config(SCORER, *llm, *options, free, f"out={tmp_path / 'run'}"))
    (row,) = rows(tmp_path / "run")
    assert row["budget/error/verdict/count"] == row["budget/failed"] > 0
    assert row["tree/reward/completeness"] == row["critic/score/min"] == 1
