"""Runs whose searches go to a server: it dies and comes back, its answers are kept and replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.agents import ByteTokenizer, Dialogue
from turntree.agents.engines import ScriptedEngine
from turntree.envs.search_qa import SearchQACore
from turntree.envs.tools import SearchTool
from turntree.errors import ConfigError
from turntree.search_backend import BM25Backend
from turntree.search_backend.replay import ReplayBackend
from turntree.trainers.config import RunConfig
from turntree.trainers.evaluate import EvalRow, evaluate
from turntree.trainers.rollout import Limits
from turntree.trainers.task import build_task, eval_sampling

TAGS = "env.grammar=turntree.envs.grammar:TagGrammar"
FAST = ("search.args.retries=1", "search.args.backoff_s=0.01", "search.args.breaker_reset_s=0.05", "env.tool_retries=0")


def play(config: RunConfig, *, on_batch: Callable[[int], None] | None = None, count: int = 9) -> tuple[EvalRow, ...]:
    """Questions one after the other: each searches its own words, then answers."""
    task = build_task(config, ByteTokenizer())

    def say(context: str, seed: int) -> str:
        question = context.rpartition("Question:")[2]
        return (
            "<answer>x</answer>" if "</information>" in question else f"<search>{question.split('<')[0][:60]}</search>"
        )

    return evaluate(
        task.questions[:count],
        core=task.core,
        engine=ScriptedEngine(say),
        dialogue=Dialogue(ByteTokenizer()),
        sampling=eval_sampling(config, task.core),
        limits=Limits(128, max_context_tokens=8192, tool_backoff_s=0.0),
        batch=1,
        on_batch=on_batch,
    ).rows


def seen(rows: tuple[EvalRow, ...]) -> list[Any]:
    return [(row.id, row.status, row.searches) for row in rows]


def test_a_server_that_dies_fails_leaves_and_the_run_goes_on(
    make_config: Callable[..., RunConfig], bed: Any, serve_process: Callable[..., Any], tmp_path: Path
) -> None:
    """Killed after three questions, started again after six: only those between are failed, none is scored."""
    corpus = str(bed.world / "corpus.jsonl")
    servers = [serve_process("--corpus", corpus)]
    url = f"search.args.url={servers[0].url}/retrieve"

    def on_batch(done: int, total: list[int] = [0]) -> None:  # noqa: B006
        total[0] += 1
        if total[0] == 3:
            servers[0].process.kill()
            servers[0].process.wait(timeout=30)
        elif total[0] == 6:
            servers.append(serve_process("--corpus", corpus, "--port", str(servers[0].port)))

    rows = play(make_config(TAGS, "search.backend=http", url, *FAST), on_batch=on_batch)
    assert [row.status == "failed" for row in rows] == [False] * 3 + [True] * 3 + [False] * 3
    local = play(make_config(TAGS))
    assert [row for i, row in enumerate(seen(rows)) if not 3 <= i < 6] == [
        row for i, row in enumerate(seen(local)) if not 3 <= i < 6
    ]


def test_what_a_server_answered_is_replayed_without_it(
    make_config: Callable[..., RunConfig], bed: Any, search_server: Callable[..., str], tmp_path: Path
) -> None:
    store = f"search.store={tmp_path / 'searches.sqlite'}"
    url = f"search.args.url={search_server(BM25Backend.from_corpus(bed.world / 'corpus.jsonl'))}/retrieve"
    live = play(make_config(TAGS, "search.backend=http", url, *FAST, store, "search.store_mode=record"))
    dead = "search.args.url=http://127.0.0.1:9/retrieve"
    replay = make_config(TAGS, "search.backend=http", dead, store, "search.store_mode=replay", "env.tool_retries=0")
    assert seen(play(replay)) == seen(live)
    missing = play(replay, count=10)
    assert [row.status for row in missing].count("failed") == 1
    local = make_config(TAGS, store, "search.store_mode=replay")
    assert seen(play(local)) == seen(live), "the same corpus and settings, in this process"


def test_stores_are_wired_and_checked(make_config: Callable[..., RunConfig], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"search\.store"):
        make_config("search.store_mode=replay")
    with pytest.raises(ConfigError, match="record"):
        make_config(f"search.store={tmp_path / 's'}", "search.store_mode=write")
    with pytest.raises(ConfigError, match=r"search\.args\.url"):
        build_task(make_config(TAGS, "search.backend=http"), ByteTokenizer())
    with pytest.raises(ConfigError, match="it takes url, dialect"):
        build_task(make_config(TAGS, "search.backend=http", "search.args.url=http://h/", "+search.args.kk=1"), None)
    config = make_config(TAGS, f"search.store={tmp_path / 's'}")
    core = build_task(config, ByteTokenizer()).core
    assert isinstance(core, SearchQACore)
    tool = core.tools["search"]
    assert isinstance(tool, SearchTool)
    assert isinstance(tool.backend, ReplayBackend)
    plain = build_task(make_config(TAGS), ByteTokenizer()).core
    assert core.fingerprint == plain.fingerprint
