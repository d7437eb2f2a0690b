"""Evaluation through an OpenAI-compatible server: end to end, within its cost, resumed, and refused for training."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turntree.agents.engines.endpoint import Usage
from turntree.commands import Stopped, run_evaluate
from turntree.errors import CheckpointError, ConfigError, EngineError
from turntree.trainers.config import RunConfig
from turntree.trainers.learner import train
from turntree.trainers.remote import endpoint, remote_bench

TAGS = "env.grammar=turntree.envs.worlds.grammar:WorldGrammar"


@pytest.fixture
def overrides(bed: Any, openai_server: Any, tmp_path: Path) -> Callable[..., list[str]]:
    openai_server.faults()

    def make(*more: str) -> list[str]:
        return [
            *bed.args,
            "engine=openai",
            f"engine.base_url={openai_server.url}",
            "engine.model=tiny",
            "engine.max_concurrent_requests=2",
            f"env.test_questions={bed.world}",
            f"out={tmp_path / 'out'}",
            *more,
        ]

    return make


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()]
    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8")), rows


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"kind": "say", "text": text, "usage": {"prompt_tokens": 10, "completion_tokens": 4}, **more}


def test_training_is_refused_at_start_where_the_server_takes_no_weights(
    bed: Any, openai_server: Any, tmp_path: Path
) -> None:
    openai_server.faults()
    common = [*bed.args, f"out={tmp_path / 'run'}", "engine=vllm_server"]
    with pytest.raises(ConfigError, match=r"takes no weights: start it with VLLM_SERVER_DEV_MODE=1"):
        train([*common, f"engine.base_url={openai_server.url}"])
    with pytest.raises(EngineError, match="Connect"):
        train([*common, "engine.base_url=http://127.0.0.1:9/v1"])
    assert openai_server.log() == [], "nothing was generated"
    assert not (tmp_path / "run").exists()


def test_evaluation_through_chat(overrides: Any, openai_server: Any, tmp_path: Path) -> None:
    """The model itself answers 24 questions; all that the server counted is in the result, which names its protocol."""
    run_evaluate(overrides())
    summary, rows = load(tmp_path / "out")
    assert (summary["n"], summary["failed"], summary["unplayed"], summary["stopped"]) == (24, 0, 0, None)
    assert (summary["protocol"], summary["model"], summary["base_url"]) == ("chat", "tiny", openai_server.url)
    log = openai_server.log()
    assert {request["path"] for request in log} == {"/v1/chat/completions"}
    assert len(log) == summary["usage"]["requests"] == sum(row["turns"] for row in rows) > 24
    assert summary["usage"]["completion_tokens"] == sum(row["generated_tokens"] for row in rows) > 0
    assert summary["usage"]["estimated"] == 0
    conversation = max((request["body"]["messages"] for request in log), key=len)
    assert [m["role"] for m in conversation] == ["user", "assistant"] * (len(conversation) // 2) + ["user"]
    assert len(conversation) >= 3, "an observation is a message of the user"


def test_evaluation_samples_as_configured(overrides: Any, openai_server: Any, tmp_path: Path) -> None:
    """Neither temperature nor the number of siblings of training reaches the server."""
    openai_server.faults(*[say("<answer> yes </answer>")] * 24)
    options = ["sampling.temperature=1.0", "sampling.eval_temperature=0.3", "openai.sampling.top_p=0.9"]
    run_evaluate(overrides(TAGS, *options))
    summary, _ = load(tmp_path / "out")
    bodies = [request["body"] for request in openai_server.log()]
    assert len(bodies) == 24
    assert {(b["temperature"], b["top_p"], b["max_tokens"], "n" in b) for b in bodies} == {(0.3, 0.9, 12, False)}
    assert {tuple(b["stop"]) for b in bodies} == {tuple(summary["sampling"]["stop"])}
    assert (summary["sampling"]["temperature"], summary["openai_sampling"]) == (0.3, {"top_p": 0.9})


def test_the_cost_cap_gives_a_partial_result_that_resume_completes(
    overrides: Any, openai_server: Any, tmp_path: Path
) -> None:
    """A price of 1 a request, a cap of 5: what was played is kept, the rest is named, and a higher cap goes on."""
    priced = overrides(TAGS, "openai.completion_price=250000.0", "engine.max_concurrent_requests=1")
    openai_server.faults(*[say("<answer> yes </answer>")] * 24)
    with pytest.raises(EngineError, match=r"19 questions were not played.*max_cost=5.*resume=true"):
        run_evaluate([*priced, "openai.max_cost=5.0"])
    summary, first = load(tmp_path / "out")
    assert (summary["n"], summary["failed"], summary["unplayed"]) == (5, 0, 19)
    assert "max_cost=5" in summary["stopped"]
    assert (summary["usage"]["requests"], summary["usage"]["cost"]) == (5, 5.0)

    with pytest.raises(EngineError, match="19 questions"):
        run_evaluate([*priced, "openai.max_cost=5.0", "resume=true"])
    assert len(openai_server.log()) == 5, "what was spent before counts"

    with pytest.raises(CheckpointError, match=r"sampling"):
        run_evaluate([*priced, "resume=true", "sampling.eval_temperature=0.5"])

    run_evaluate([*priced, "openai.max_cost=100.0", "resume=true"])
    summary, rows = load(tmp_path / "out")
    assert (summary["n"], summary["unplayed"], summary["stopped"]) == (24, 0, None)
    assert (summary["usage"]["requests"], summary["usage"]["cost"]) == (24, 24.0)
    assert [row for row in rows if row["id"] in {r["id"] for r in first}] == first
    assert len(openai_server.log()) == 24

    openai_server.faults(*[say("<answer> yes </answer>")] * 24)
    run_evaluate(overrides(TAGS, f"out={tmp_path / 'whole'}"))
    assert load(tmp_path / "whole")[1] == rows, "resumed = never stopped"


def test_failed_questions_are_counted_and_played_again(overrides: Any, openai_server: Any, tmp_path: Path) -> None:
    quick = overrides(TAGS, "engine.max_concurrent_requests=1", "engine.retries=0")
    openai_server.faults(
        say("<answer> a </answer>"), {"kind": "status", "code": 400}, *[say("<answer> a </answer>")] * 22
    )
    run_evaluate(quick)
    summary, rows = load(tmp_path / "out")
    assert (summary["n"], summary["failed"]) == (23, 1)
    openai_server.faults(say("<answer> b </answer>"))
    run_evaluate([*quick, "resume=true"])
    summary, rows = load(tmp_path / "out")
    assert (summary["n"], summary["failed"], len(openai_server.log())) == (24, 0, 1)
    assert [row["prediction"] for row in rows] == ["a", "b", *["a"] * 22]


def test_a_server_that_dies_leaves_what_was_played(overrides: Any, openai_server: Any, tmp_path: Path) -> None:
    config = overrides(TAGS, "engine.retries=0", "engine.max_concurrent_requests=1")
    openai_server.faults(*[{"kind": "status", "code": 400, "body": {"error": {"message": "gone"}}}] * 24)
    with pytest.raises(EngineError, match="gone"):
        run_evaluate(config)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_ctrl_c_keeps_what_was_played(overrides: Any, openai_server: Any, tmp_path: Path) -> None:
    openai_server.faults(*[say("<answer> yes </answer>", seconds=0.2)] * 24)

    def stop() -> None:
        while not openai_server.log():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped, match=r"24 questions were not played: interrupted; go on with: .*resume=true"):
        run_evaluate(overrides(TAGS))
    thread.join()
    assert load(tmp_path / "out")[0]["stopped"] == "interrupted"
    assert len(openai_server.log()) < 24


def test_completions_equal_the_engine_in_this_process(overrides: Any, bed: Any, tmp_path: Path) -> None:
    """Token ids in and out: the same model, seeds and questions give the same rows as engine=hf."""
    run_evaluate(overrides("openai.protocol=completions"))
    run_evaluate([*bed.args, f"env.test_questions={bed.world}", f"out={tmp_path / 'hf'}"])
    there, here = load(tmp_path / "out"), load(tmp_path / "hf")
    assert there[1] == here[1]
    assert there[0]["protocol"] == here[0]["protocol"] == "tokens"
    assert not {"weights_hash", "dtype"} & there[0].keys(), "a server does not say what its weights are"
    different = {k for k in here[0] if there[0].get(k) != here[0][k]}
    assert different == {"engine", "model", "passport", "weights_hash", "dtype"}


def test_a_key_is_in_no_result(
    overrides: Any, openai_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-hidden-42")
    failing = {"kind": "status", "code": 400, "body": {"error": {"message": "no use for sk-hidden-42"}}}
    openai_server.faults(say("<answer> a </answer>"), failing, *[say("<answer> a </answer>")] * 22)
    run_evaluate(overrides(TAGS, "openai.api_key_env=MY_KEY", "engine.retries=0"))
    assert openai_server.log()[0]["headers"]["authorization"] == "Bearer sk-hidden-42"
    written = "".join(f.read_text(encoding="utf-8") for f in (tmp_path / "out").iterdir())
    shown = capsys.readouterr()
    assert "[key]" in caplog.text
    assert "sk-hidden-42" not in written + shown.out + shown.err + caplog.text


@pytest.mark.parametrize(
    ("protocol", "words"), [("chat", "returns text.*log-probs"), ("completions", "weights.*vllm_server")]
)
def test_training_is_refused_with_the_reason(
    make_config: Callable[..., RunConfig], tmp_path: Path, protocol: str, words: str
) -> None:
    config = make_config(
        "engine=openai", "engine.base_url=http://127.0.0.1:9/v1", "engine.model=m", f"openai.protocol={protocol}",
        f"out={tmp_path / 'run'}",
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"(?s)engine=openai evaluates, it does not train.*{words}"):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["engine.base_url="], "engine.base_url is empty"),
        (["engine.model="], "engine.model is empty"),
        (["openai.api_key_env=NO_SUCH_KEY_HERE"], "NO_SUCH_KEY_HERE is not set"),
        (["openai.protocol=completions", "model.path="], "served model's tokenizer"),
    ],
)
def test_what_is_missing_is_named(
    overrides: Any, openai_server: Any, tmp_path: Path, more: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_evaluate(overrides(TAGS, *more))
    assert openai_server.log() == []


def test_a_completions_server_without_ids_is_refused(overrides: Any, openai_server: Any) -> None:
    openai_server.faults(say("x"), say("x"))
    with pytest.raises(ConfigError, match=r"cannot serve openai\.protocol=completions: .*without token ids"):
        run_evaluate(overrides(TAGS, "openai.protocol=completions"))


@pytest.mark.parametrize(
    "bad", ["openai.sampling.max_turns=3", "openai.sampling.temperature=0.5", "openai.max_cost=3.0"]
)
def test_bad_options_are_refused_when_composed(make_config: Callable[..., RunConfig], bad: str) -> None:
    with pytest.raises(ConfigError, match=bad.split("=")[0].split(".")[-1]):
        make_config("engine=openai", bad)


def test_the_endpoint_is_what_was_configured(make_config: Callable[..., RunConfig]) -> None:
    config = make_config(
        "engine=openai", "engine.base_url=http://127.0.0.1:9/v1", "engine.model=m", "engine.timeout_s=5.0",
        "engine.max_concurrent_requests=3", "openai.prompt_price=1.0", "openai.max_cost=2.0",
    )  # fmt: skip
    made = endpoint(config)
    assert (made.base_url, made.model, made.timeout_s, made.concurrency) == ("http://127.0.0.1:9/v1", "m", 5.0, 3)
    bench = remote_bench(config, spent=Usage(cost=1.5))
    assert bench.engine.usage.cost == 1.5
    bench.engine.close()
