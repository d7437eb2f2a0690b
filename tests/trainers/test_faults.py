"""Runs whose retriever, checker or engine is behind a faulty network.

The laws: failures never become rewards; no rollout hangs past its limits; budgets stay exact; after recovery training
goes on; metrics show what happened; and what a retry mends leaves no trace.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.proxy import PASS, Fault, FaultyProxy, faulty_proxy
from turntree.commands import run_evaluate
from turntree.errors import EngineError
from turntree.search_backend import BM25Backend
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.metrics import TIMING
from turntree.trainers.run_folder import read_metrics
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Node

MakeConfig = Callable[..., RunConfig]
KINDS = (
    Fault("reset"),
    Fault("slow", 2.5),
    Fault("half"),
    Fault("no_json"),
    Fault("shape"),
    Fault("busy", 0.05),
    Fault("error"),
)
TIMEOUT = "search.args.timeout_s=1.5"
PATIENT = (TIMEOUT, "search.args.retries=3", "search.args.backoff_s=0.01", "search.args.breaker_failures=50")
HASTY = (TIMEOUT, "search.args.retries=0", "search.args.breaker_failures=1000", "env.tool_retries=0")


def rows(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(run / "metrics.jsonl")]


def leaves(run: Path, step: int | None = None) -> list[Node]:
    return [leaf for stored in TreeStore(run / "trees").read(step) for leaf in stored.tree.leaves()]


def world_index(bed: Any) -> BM25Backend:
    return BM25Backend.from_corpus(bed.world / "corpus.jsonl")


@pytest.fixture(scope="module")
def fingerprint(bed: Any) -> str:
    """Given to the client, which would ask the server for it: a request that no fault is meant for."""
    return f"search.args.fingerprint={world_index(bed).fingerprint}"


@pytest.fixture(scope="module")
def retriever(bed: Any, search_server: Callable[..., str]) -> Iterator[FaultyProxy]:
    with faulty_proxy(search_server(world_index(bed))) as proxy:
        yield proxy


def searching(make_config: MakeConfig, url: str, out: Path, *more: str) -> RunConfig:
    """One query a request, so that every query meets a fault of its own."""
    where = ("search.backend=http", f"search.args.url={url}/retrieve", "search.args.max_queries=1")
    return make_config(*where, f"out={out}", *more)


def assert_exact(run: Path) -> None:
    """Rewards are what the environment saw, failed leaves have none, and every count is the sum of its parts."""
    metrics, nodes = rows(run), [n for stored in TreeStore(run / "trees").read() for n in stored.tree.nodes()]
    for leaf in (node for node in nodes if node.is_leaf):
        if leaf.status == "failed":
            assert leaf.reward is None
        else:
            seen = sum("retrieved" in node.info for node in leaf.trajectory())
            assert leaf.reward == pytest.approx(seen / 4), "the reward `busy` of the bed"
    discarded = sum(row["budget/discarded_tokens"] for row in metrics)
    assert metrics[-1]["total/generated_tokens"] == sum(len(n.turn_ids) for n in nodes) + discarded
    assert metrics[-1]["total/tool_calls"] == sum("retrieved" in n.info for n in nodes)
    assert metrics[-1]["total/trajectories"] == sum(n.is_leaf for n in nodes)
    for row in metrics:
        kinds = sum(value for key, value in row.items() if key.startswith("budget/error/"))
        assert row["budget/failed"] == kinds
    assert sum(row["budget/failed"] for row in metrics) == sum(n.status == "failed" for n in nodes)


# The retriever --------------------------------------------------------------------------------------------------------


def test_what_a_retry_mends_leaves_no_trace(
    make_config: MakeConfig, retriever: FaultyProxy, fingerprint: str, tmp_path: Path
) -> None:
    """Every kind of fault, each followed by an answer: trees, metrics and budgets equal the run without a fault."""
    retriever.play([])
    train(searching(make_config, retriever.url, tmp_path / "calm", *PATIENT, fingerprint, "trainer.steps=1"))
    assert retriever.met.keys() == {"pass"}
    assert rows(tmp_path / "calm")[0]["budget/failed"] == 0
    asked = retriever.met["pass"]
    retriever.play([fault for kind in KINDS for fault in (kind, PASS, PASS)])
    train(searching(make_config, retriever.url, tmp_path / "rough", *PATIENT, fingerprint, "trainer.steps=1"))
    assert all(retriever.met[kind.kind] == 1 for kind in KINDS)
    assert retriever.met["pass"] >= asked, "what failed was asked again"
    assert rows(tmp_path / "rough") == rows(tmp_path / "calm")
    trees = [{f.name: f.read_bytes() for f in (tmp_path / n / "trees").iterdir()} for n in ("rough", "calm")]
    assert trees[0] == trees[1]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_faults_that_stay_fail_leaves_and_never_become_rewards(
    make_config: MakeConfig, retriever: FaultyProxy, fingerprint: str, tmp_path: Path, seed: int
) -> None:
    """A seeded half of the requests of two steps fails for good; then the network is well again."""
    rng = np.random.default_rng(seed)
    fast = [kind for kind in KINDS if kind.kind != "slow"]
    faults = [fast[int(rng.integers(len(fast)))] if rng.random() < 0.5 else PASS for _ in range(1000)]
    retriever.play([Fault("slow", 2.5), *fast, *faults])
    run = tmp_path / "run"
    config = searching(make_config, retriever.url, run, *HASTY, fingerprint, "trainer.steps=4")
    start = time.monotonic()
    train(config, on_step=lambda step, metrics: retriever.calm() if step == 2 else None)
    assert time.monotonic() - start < 120
    metrics = rows(run)
    assert_exact(run)
    failed = sum(row["budget/failed"] for row in metrics)
    assert 0 < failed < metrics[-1]["total/trajectories"]
    assert metrics[0]["budget/error/RetrievalError/count"] == metrics[0]["budget/failed"] > 0
    assert all(retriever.met[kind.kind] for kind in KINDS)
    assert [row["budget/failed"] for row in metrics[2:]] == [0, 0], "after recovery nothing fails any more"
    assert metrics[-1]["total/updates"] > metrics[1]["total/updates"]
    assert sum(row["budget/tool_calls"] for row in metrics) <= retriever.answered


def test_a_long_outage_costs_its_steps_and_training_goes_on(
    make_config: MakeConfig, retriever: FaultyProxy, fingerprint: str, tmp_path: Path
) -> None:
    """The server is gone from the first search to the end of the second step."""
    retriever.play([Fault("outage", 3600)])
    run = tmp_path / "run"

    def back(step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            retriever.recover()

    config = searching(
        make_config, retriever.url, run, *HASTY, fingerprint, "env.grammar=users_rules:OnlySearch", "trainer.steps=4"
    )
    start = time.monotonic()
    train(config, on_step=back)
    assert time.monotonic() - start < 120
    metrics = rows(run)
    assert_exact(run)
    assert [row["budget/failed"] == row["budget/trajectories"] for row in metrics] == [True, True, False, False]
    assert [row["budget/dropped_groups"] for row in metrics[:2]] == [4, 4]
    assert metrics[1]["total/updates"] == 0
    assert metrics[-1]["total/updates"] > 0
    assert metrics[-1]["budget/failed"] == 0


# The checker ----------------------------------------------------------------------------------------------------------


LEGAL = '''
from users_rules import Babble

from turntree.envs.grammar import Validity


class Legal(Babble):
    """Any babble is legal."""

    fingerprint = "legal"

    def validity(self, turns):
        return Validity(True)
'''


@pytest.mark.parametrize("retries", [0, 3])
def test_votes_that_do_not_arrive_leave_no_zero(
    make_config: MakeConfig, openai_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """All that is said is "complete": whatever the network does, a score is 1 or there is none."""
    (tmp_path / "legal_babble.py").write_text(LEGAL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    say = {"kind": "say", "usage": {"prompt_tokens": 5, "completion_tokens": 5}, "text": "<verdict>complete</verdict>"}
    openai_server.faults(*[say] * 400)
    with faulty_proxy(openai_server.url) as proxy:
        proxy.play([fault for kind in KINDS for fault in (kind, PASS)])
        given = (f"base_url={proxy.url}/v1", "model=tiny", f"retries={retries}", "timeout_s=1.5", "backoff_s=0.01")
        llm = ("reward.scorer_args.checker=llm", *(f"reward.scorer_args.checker_args.{option}" for option in given))
        scorer = (
            "reward.scorer=turntree.agents.completeness:CompletenessScorer",
            "reward.scorer_args.votes=1",
            "reward.scorer_args.penalties.repeated=0",
        )
        train(
            make_config(*scorer, *llm, "env.grammar=legal_babble:Legal", "trainer.steps=2", f"out={tmp_path / 'run'}")
        )
        met = Counter(proxy.met)
    metrics = rows(tmp_path / "run")
    found = leaves(tmp_path / "run")
    assert all(met[kind.kind] == 1 for kind in KINDS)
    assert [leaf for leaf in found if leaf.status == "failed"] == [leaf for leaf in found if leaf.reward is None]
    assert all(row["tree/reward/completeness"] == 1.0 for row in metrics), "mean over the leaves that have one"
    assert {leaf.reward for leaf in found if leaf.status != "failed"} == {1.0}
    failed = sum(row["budget/failed"] for row in metrics)
    assert failed == sum(v for row in metrics for k, v in row.items() if k.startswith("budget/error/"))
    assert failed == 0 if retries else failed > 0


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[Fault("outage", 3600)], [Fault("error")] * 400], ids=["outage", "burst of 500"])
def test_a_checker_that_is_gone_stops_the_run_which_goes_on_when_it_is_back(
    make_config: MakeConfig,
    openai_server: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    faults: list[Fault],
) -> None:
    """No vote, no reward, no update; rollouts without any would cost for nothing."""
    (tmp_path / "legal_babble.py").write_text(LEGAL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    say = {"kind": "say", "usage": {"prompt_tokens": 5, "completion_tokens": 5}, "text": "<verdict>complete</verdict>"}
    openai_server.faults(*[say] * 400)
    with faulty_proxy(openai_server.url) as proxy:
        given = (f"base_url={proxy.url}/v1", "model=tiny", "retries=0", "timeout_s=1.5", "backoff_s=0.01")
        config = make_config(
            "reward.scorer=turntree.agents.completeness:CompletenessScorer",
            "reward.scorer_args.votes=1",
            "reward.scorer_args.penalties.repeated=0",
            "reward.scorer_args.checker=llm",
            *(f"reward.scorer_args.checker_args.{option}" for option in given),
            "env.grammar=legal_babble:Legal",
            "resume=true",
            f"out={tmp_path / 'run'}",
        )
        proxy.play(faults)
        start = time.monotonic()
        with pytest.raises(EngineError, match="votes in a row, so nothing is rewarded"):
            train(config)
        assert time.monotonic() - start < 240
        assert not any(row["total/updates"] for row in rows(tmp_path / "run"))
        proxy.recover()
        proxy.calm()
        train(config)
    metrics = rows(tmp_path / "run")
    assert [row["budget/failed"] for row in metrics] == [0, 0]
    assert {leaf.reward for leaf in leaves(tmp_path / "run")} == {1.0}


# The engine -----------------------------------------------------------------------------------------------------------


def evaluated(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()]
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8")), found


@pytest.mark.slow
def test_an_engine_behind_a_faulty_network(bed: Any, openai_server: Any, tmp_path: Path) -> None:
    """With retries the rows equal those of a calm network; without, what failed is counted, and resume plays it."""

    def options(url: str, name: str, retries: int, *more: str) -> list[str]:
        return [
            *bed.args,
            "engine=openai",
            f"engine.base_url={url}",
            "engine.model=tiny",
            f"engine.retries={retries}",
            "engine.timeout_s=2",
            "engine.max_concurrent_requests=1",
            f"env.test_questions={bed.world}",
            f"out={tmp_path / name}",
            *more,
        ]

    openai_server.faults()
    run_evaluate(options(openai_server.url, "calm", 0, "engine.timeout_s=30"))
    summary, calm = evaluated(tmp_path / "calm")
    assert summary["failed"] == 0
    hard = [kind if kind.kind != "slow" else Fault("slow", 2.5) for kind in KINDS]
    with faulty_proxy(openai_server.url.removesuffix("/v1")) as proxy:
        proxy.play([fault for kind in hard for fault in (kind, PASS)])
        run_evaluate(options(f"{proxy.url}/v1", "rough", 4))
        assert evaluated(tmp_path / "rough")[1] == calm
        assert all(proxy.met[kind.kind] == 1 for kind in hard)

        proxy.play([fault for kind in hard for fault in (kind, PASS)])
        run_evaluate(options(f"{proxy.url}/v1", "hasty", 0))
        summary, found = evaluated(tmp_path / "hasty")
        assert 0 < summary["failed"] <= len(hard)
        assert summary["n"] + summary["failed"] == len(calm)
        failed = {row["id"] for row in found if row["status"] == "failed"}
        assert len(failed) == summary["failed"]
        assert [row for row in found if row["id"] not in failed] == [row for row in calm if row["id"] not in failed]
        proxy.play([])
        run_evaluate(options(f"{proxy.url}/v1", "hasty", 0, "resume=true"))
        assert evaluated(tmp_path / "hasty")[1] == calm


@pytest.mark.slow
@pytest.mark.parametrize("faults", [[Fault("outage", 3600)], [Fault("error")] * 400, [Fault("busy", 30.0)] * 400])
def test_an_engine_that_is_gone_ends_in_time_and_what_it_missed_is_played_later(
    bed: Any, openai_server: Any, tmp_path: Path, faults: list[Fault]
) -> None:
    """Whatever an engine does not answer is a failed row, never a wrong answer; nothing hangs for an hour."""
    common = [*bed.args, "engine=openai", "engine.model=tiny", f"env.test_questions={bed.world}", "eval.limit=6"]
    openai_server.faults()
    run_evaluate([*common, f"engine.base_url={openai_server.url}", f"out={tmp_path / 'calm'}"])
    calm = evaluated(tmp_path / "calm")[1]
    with faulty_proxy(openai_server.url.removesuffix("/v1")) as proxy:
        hasty = [*common, f"engine.base_url={proxy.url}/v1", "engine.retries=0", "engine.timeout_s=3"]
        proxy.play(faults)
        start = time.monotonic()
        with contextlib.suppress(EngineError):  # one that answers nobody may end it, which then says how to go on
            run_evaluate([*hasty, f"out={tmp_path / 'rough'}"])
        assert time.monotonic() - start < 120
        if (tmp_path / "rough" / "evaluation.jsonl").is_file():
            assert not any(row["em"] for row in evaluated(tmp_path / "rough")[1] if row["status"] == "failed")
        proxy.recover()
        proxy.calm()
        run_evaluate([*hasty, f"out={tmp_path / 'rough'}", "resume=true", "engine.timeout_s=60"])
        summary, found = evaluated(tmp_path / "rough")
    assert summary["failed"] == 0
    assert found == calm
