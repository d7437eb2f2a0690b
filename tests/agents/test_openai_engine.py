"""Chat and completions against a real server process, with every way in which one goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.chat import ChatClient
from turntree.agents.engines.endpoint import Endpoint
from turntree.agents.engines.hf import HFEngine
from turntree.agents.engines.openai import Capabilities, ChatEngine, CompletionsEngine
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.engines.transcript import TextTokenizer
from turntree.agents.models import load_model, load_tokenizer
from turntree.agents.tokenizer import decode, encode
from turntree.errors import ConfigError, CostLimitError, EngineError

MESSAGES = [{"role": "user", "content": "Who ?"}]


@pytest.fixture
def client(openai_server: Any) -> Iterator[Any]:
    """``client(**options)``: a chat client whose retries do not wait long."""
    made: list[ChatClient] = []

    def make(**options: Any) -> ChatClient:
        made.append(
            ChatClient(Endpoint(openai_server.url, "tiny", **{"backoff_s": 0.01, "timeout_s": 60.0, **options}))
        )
        return made[-1]

    openai_server.faults()
    yield make
    for one in made:
        one.close()


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"kind": "say", "text": text, "usage": {"prompt_tokens": 7, "completion_tokens": 5}, **more}


# The text client ------------------------------------------------------------------------------------------------------


def test_the_model_answers_and_tokens_are_counted(client: Any, openai_server: Any) -> None:
    chat = client(prompt_price=1.0, completion_price=10.0)
    reply = chat.complete(MESSAGES, max_tokens=6, temperature=0.7, seed=3)
    again = chat.complete(MESSAGES, max_tokens=6, temperature=0.7, seed=3)
    assert reply == again, "the seed decides the draw"
    assert (reply.completion_tokens, reply.estimated) == (6, False)
    usage = chat.usage
    assert (usage.requests, usage.completion_tokens, usage.estimated) == (2, 12, 0)
    assert usage.cost == pytest.approx((usage.prompt_tokens + 10 * 12) / 1e6)
    sent = openai_server.log()[0]
    assert sent["path"] == "/v1/chat/completions"
    assert sent["body"] == {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0.7, "seed": 3}
    assert "authorization" not in sent["headers"]


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "status", "code": 429, "headers": {"Retry-After": "0"}},
        {"kind": "status", "code": 500},
        {"kind": "status", "code": 503, "body": "<html>busy</html>"},
        {"kind": "status", "code": 408},
        {"kind": "cut"},
        {"kind": "malformed"},
        {"kind": "malformed", "body": "[1]"},
        {"kind": "malformed", "body": '{"choices": [{"message": null}]}'},
        {"kind": "empty"},
    ],
)
def test_what_another_try_may_mend_is_tried_again(client: Any, openai_server: Any, fault: dict[str, Any]) -> None:
    openai_server.faults(fault, say("done"))
    chat = client()
    assert chat.complete(MESSAGES, max_tokens=5).text == "done"
    assert (chat.usage.retries, len(openai_server.log())) == (1, 2)


def test_tries_end_and_the_error_says_what_the_server_said(client: Any, openai_server: Any) -> None:
    openai_server.faults(*[{"kind": "status", "code": 502, "body": {"error": {"message": "bad gateway"}}}] * 5)
    with pytest.raises(
        EngineError, match=r"chat/completions \(model tiny\) failed after 3 tries: status 502: bad gate"
    ):
        client(retries=2).complete(MESSAGES, max_tokens=5)
    assert len(openai_server.log()) == 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"kind": "status", "code": 401, "body": {"error": {"message": "bad key sk-loop-1"}}}, r"401: bad key \[key\]"),
        ({"kind": "status", "code": 404, "body": {"error": {"message": "no model tiny"}}}, "no model tiny"),
        ({"kind": "status", "code": 429, "body": {"error": {"code": "insufficient_quota", "message": "x"}}}, "quota"),
        ({"kind": "status", "code": 302, "headers": {"Location": "http://127.0.0.1:9/"}}, "redirects are not followed"),
        ({"kind": "status", "code": 429, "headers": {"Retry-After": "3600"}}, "failed after 1 try: status 429"),
        (say("", finish="content_filter"), "content_filter"),
        (say("", finish="tool_calls"), "tool_calls"),
        (say("half a", finish="abort"), "aborted"),
    ],
)
def test_what_no_try_can_mend_is_not_tried_again(
    client: Any, openai_server: Any, fault: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOP_KEY", "sk-loop-1")
    openai_server.faults(fault)
    with pytest.raises(EngineError, match=words) as error:
        client(api_key_env="LOOP_KEY").complete(MESSAGES, max_tokens=5)
    (sent,) = openai_server.log()
    assert sent["headers"]["authorization"] == "Bearer sk-loop-1"
    assert "sk-loop-1" not in repr(error.value)


def test_a_retry_waits_as_long_as_the_server_asks(client: Any, openai_server: Any) -> None:
    openai_server.faults({"kind": "status", "code": 429, "headers": {"Retry-After": "0.3"}}, say("done"))
    client().complete(MESSAGES, max_tokens=5)
    first, second = openai_server.log()
    assert second["at"] - first["at"] >= 0.3


@pytest.mark.parametrize("fault", [{"kind": "hang", "seconds": 1.5}, {"kind": "dribble", "times": 30}])
def test_a_request_has_an_end_even_when_the_server_keeps_it_open(
    client: Any, openai_server: Any, fault: dict[str, Any]
) -> None:
    openai_server.faults(fault)
    with pytest.raises(EngineError, match=r"failed after 1 try: no .*answer within timeout_s=0\.3"):
        client(timeout_s=0.3, retries=0).complete(MESSAGES, max_tokens=5)


def test_a_server_that_is_not_there(client: Any) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1/v1.*ConnectError"):
        client(retries=1).__class__(Endpoint("http://127.0.0.1:1/v1", "m", retries=1, backoff_s=0.01)).complete(
            MESSAGES, max_tokens=5
        )


def test_usage_that_is_missing_is_estimated_and_flagged(client: Any, openai_server: Any) -> None:
    openai_server.faults({"kind": "say", "text": "twelve bytes"}, say("x", usage={"prompt_tokens": None}))
    chat = client()
    reply = chat.complete(MESSAGES, max_tokens=5)
    assert (reply.estimated, reply.completion_tokens) == (True, 3)
    assert chat.complete(MESSAGES, max_tokens=5).estimated
    assert (chat.usage.requests, chat.usage.estimated, chat.usage.completion_tokens) == (2, 2, 4)


def test_batches_keep_their_order_and_their_bound(client: Any, openai_server: Any) -> None:
    openai_server.faults(*[say("x", seconds=0.1)] * 9)
    chat = client(concurrency=3)
    conversations = [[{"role": "user", "content": str(i)}] for i in range(9)]
    replies = chat.complete_all(conversations, max_tokens=5)
    assert [r.text for r in replies] == ["x"] * 9
    assert openai_server.most_at_once() == 3
    openai_server.faults(say("x"), {"kind": "status", "code": 400}, say("x"))
    outcomes = client(concurrency=1).complete_all(conversations[:3], max_tokens=5)
    assert [isinstance(o, EngineError) for o in outcomes] == [False, True, False]


def test_the_cost_stops_what_has_not_started(client: Any, openai_server: Any) -> None:
    """Two in flight when the first answer reaches the cost: both finish, are counted, and nothing else starts."""
    openai_server.faults(*[say("x", seconds=0.2)] * 8)
    chat = client(concurrency=2, completion_price=1e6 / 5, max_cost=1.0)
    outcomes = chat.complete_all([MESSAGES] * 8, max_tokens=5)
    assert [isinstance(o, CostLimitError) for o in outcomes] == [False, False] + [True] * 6
    assert len(openai_server.log()) == 2
    assert chat.usage.cost == 2.0
    with pytest.raises(CostLimitError, match="max_cost=1"):
        chat.complete(MESSAGES, max_tokens=5)
    assert len(openai_server.log()) == 2


def test_unknown_sampling_keys_never_reach_the_server(client: Any, openai_server: Any) -> None:
    with pytest.raises(ConfigError, match=r"unknown sampling key 'max_turns'"):
        client().complete(MESSAGES, max_tokens=5, max_turns=3)
    with pytest.raises(ConfigError, match=r"'temprature' \(did you mean 'temperature'\?\)"):
        client().complete(MESSAGES, max_tokens=5, temprature=0.5)
    assert openai_server.log() == []


# The chat engine ------------------------------------------------------------------------------------------------------

STOPS = ("</search>", "</answer>")


def chat_request(text: str = "Who ?", **options: Any) -> tuple[Dialogue, Request]:
    dialogue = Dialogue(TextTokenizer(), style="chat")
    params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, "stop": STOPS, **options})
    return dialogue, Request(Prefix(dialogue.prompt_ids(text)), params, seed=2**40 + 5)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (say("<search>a</search>"), ("<search>a</search>", "stop", "</search>", 0)),
        (say("<search>a", choice={"stop_reason": "</search>"}), ("<search>a</search>", "stop", "</search>", 0)),
        (say("<search>a", choice={"matched_stop": "</search>"}), ("<search>a</search>", "stop", "</search>", 0)),
        (say("<search>a"), ("<search>a</search>", "stop", "</search>", 0)),
        (
            say("<search>a</search>junk <answer>b</answer>", finish="length"),
            ("<search>a</search>", "stop", "</search>", 3),
        ),
        (say("<search>a", finish="length"), ("<search>a", "length", None, 0)),
        (say("done"), ("done", "stop", None, 0)),
        (say("", choice={"message": {"content": None, "reasoning_content": "hm"}}), ("", "stop", None, 0)),
    ],
)
def test_a_turn_of_text(openai_server: Any, fault: dict[str, Any], expected: Any) -> None:
    openai_server.faults(fault)
    engine = ChatEngine(Endpoint(openai_server.url, "tiny"))
    dialogue, request = chat_request()
    (turn,) = engine.generate([request])
    assert len(turn.ids) == len(turn.logprobs) == 5, "as many as the server counted"
    assert all(math.isnan(v) for v in turn.logprobs)
    kept = dialogue.cut_at_stop(turn, STOPS, max_tokens=20)
    read = dialogue.read_turn(kept)
    assert (read.text, read.finish, read.stop, kept.metrics.get("overrun_tokens", 0)) == expected
    assert turn.continuation.length == 12, "7 + 5, the server's own count"
    usage = engine.usage
    assert usage.restored_stops + usage.inferred_stops == int(expected[2] is not None and "</s" not in fault["text"])
    engine.close()


def test_the_conversation_is_sent_as_messages_with_the_sampling_that_was_asked_for(openai_server: Any) -> None:
    openai_server.faults(say("<search>a"), say("<answer>b"))
    engine = ChatEngine(
        Endpoint(openai_server.url, "tiny", sampling={"top_p": 0.5}, max_tokens_key="max_completion_tokens")
    )
    dialogue, request = chat_request("Who <|im_end|> ?", temperature=0.25, max_tokens=9)
    (turn,) = engine.generate([request])
    context = turn.continuation.extend(dialogue.observation_ids("found: x", after=turn.ids))
    engine.generate([Request(context, request.params, seed=1)])
    first, second = (r["body"] for r in openai_server.log())
    assert first == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Who <|im_end|> ?"}],
        "temperature": 0.25,
        "top_p": 0.5,
        "max_completion_tokens": 9,
        "seed": (2**40 + 5) % 2**31,
        "stop": list(STOPS),
    }
    assert second["messages"][1:] == [
        {"role": "assistant", "content": "<search>a</search>"},
        {"role": "user", "content": "found: x"},
    ]
    engine.close()


def test_one_request_that_fails_leaves_the_others_alone(openai_server: Any) -> None:
    openai_server.faults(say("a"), {"kind": "status", "code": 400}, say("c", finish="abort"))
    engine = ChatEngine(Endpoint(openai_server.url, "tiny", concurrency=1))
    _, request = chat_request()
    outcomes = dict(engine.as_completed([request] * 3))
    assert [getattr(outcomes[i], "finish_reason", "error") for i in range(3)] == ["stop", "error", "abort"]
    openai_server.faults(say("a"), {"kind": "status", "code": 400})
    with pytest.raises(EngineError, match="status 400"):
        engine.generate([request] * 2)
    with pytest.raises(EngineError, match="vllm_server"):
        engine.update_weights(1)
    engine.close()


def test_ctrl_c_starts_nothing_more(openai_server: Any) -> None:
    """Whoever reads the answers stops: requests in flight end, the rest is never sent."""
    openai_server.faults(*[say("a", seconds=0.1)] * 20)
    engine = ChatEngine(Endpoint(openai_server.url, "tiny", concurrency=2))
    _, request = chat_request()
    arriving = engine.as_completed([request] * 20)
    next(arriving)
    arriving.close()  # type: ignore[attr-defined]
    assert len(openai_server.log()) <= 6
    engine.close()


def test_ctrl_c_does_not_wait_for_a_slow_rate(openai_server: Any) -> None:
    """One request a minute: those that wait for their minute are given up at once."""
    openai_server.faults(*[say("a")] * 3)
    engine = ChatEngine(Endpoint(openai_server.url, "tiny", concurrency=3, requests_per_minute=1))
    _, request = chat_request()
    arriving = engine.as_completed([request] * 3)
    assert next(arriving)[0] in (0, 1, 2)
    arriving.close()  # type: ignore[attr-defined]
    assert len(openai_server.log()) == 1
    engine.close()


# The completions engine -----------------------------------------------------------------------------------------------


def test_token_ids_and_logprobs_equal_those_of_the_engine_behind(openai_server: Any, bed: Any) -> None:
    openai_server.faults()
    model, tokenizer = load_model(bed.model)
    engine = CompletionsEngine(Endpoint(openai_server.url, "tiny"), tokenizer)
    assert engine.probe() == Capabilities(True, True, True, tempered=True)
    request = Request(Prefix(encode(tokenizer, "Who ?")), SamplingParams(9, stop=("e",)), seed=11)
    (there,) = engine.generate([request])
    (here,) = HFEngine(model, tokenizer).generate([request])
    assert (there.ids, there.stop_string, there.finish_reason) == (here.ids, here.stop_string, here.finish_reason)
    assert there.logprobs == pytest.approx(here.logprobs, abs=1e-5)
    assert there.continuation.token_ids() == [*request.prefix.token_ids(), *there.ids]
    body = openai_server.log()[-1]["body"]
    assert (body["prompt"], body["return_token_ids"]) == (request.prefix.token_ids(), True)
    engine.close()


def choice(**more: Any) -> dict[str, Any]:
    return {"kind": "say", "text": more.pop("text", "x"), "usage": None, "choice": more}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (
            {"kind": "status", "code": 400, "body": {"error": {"message": "prompt must be text"}}},
            choice(),
            "must be text",
        ),
        (choice(), choice(), "without token ids"),
        (choice(token_ids=[300], logprobs=None), choice(), "no log-prob for each token"),
        (choice(token_ids=[300], logprobs={"token_logprobs": [-1.0, -2.0]}), choice(), "no log-prob for each token"),
        (choice(token_ids=[5], text="something else", logprobs={"token_logprobs": [-1.0]}), choice(), "models differ"),
    ],
)
def test_a_server_without_tokens_is_refused_with_the_reason(
    openai_server: Any, bed: Any, first: Any, second: Any, words: str
) -> None:
    openai_server.faults(first, second)
    engine = CompletionsEngine(Endpoint(openai_server.url, "tiny"), load_tokenizer(bed.model))
    found = engine.probe()
    assert words in found.refusal()
    assert words in found.refusal(training=True)
    engine.close()


def test_log_probs_of_another_temperature_are_found_out(openai_server: Any, bed: Any) -> None:
    tokenizer = load_tokenizer(bed.model)
    ids = encode(tokenizer, "x")
    raw = choice(token_ids=list(ids), text=decode(tokenizer, ids), logprobs=_raw(len(ids)))
    openai_server.faults(raw, raw)
    engine = CompletionsEngine(Endpoint(openai_server.url, "tiny"), tokenizer)
    found = engine.probe()
    assert (found.tempered, found.refusal()) == (False, "")
    assert "processed_logprobs" in found.refusal(training=True)
    engine.close()


def _raw(n: int) -> dict[str, Any]:
    return {"token_logprobs": [-1.0] * n, "top_logprobs": [{"x": -1.0}] * n}


def test_an_aborted_completion_is_marked(openai_server: Any, bed: Any) -> None:
    openai_server.faults({**choice(token_ids=[300], logprobs=_raw(1)), "finish": "abort"})
    engine = CompletionsEngine(Endpoint(openai_server.url, "tiny"), load_tokenizer(bed.model))
    (turn,) = engine.generate([Request(Prefix([300]), SamplingParams(4), seed=0)])
    assert isinstance(turn, Generation)
    assert turn.finish_reason == "abort"
    engine.close()
