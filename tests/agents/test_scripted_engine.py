"""The test double keeps the engine's contract."""

from __future__ import annotations

import subprocess
import sys

import pytest

from turntree.agents.engines import Engine, Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer, decode, encode
from turntree.errors import EngineError

STOPS = ("</search>", "</answer>")
TOKENIZER = ByteTokenizer()


def request(context: str, seed: int = 0, *, limit: int = 100, key: tuple[int, ...] = ()) -> Request:
    return Request(Prefix(encode(TOKENIZER, context)), SamplingParams(limit, stop=STOPS), seed, key)


def echo(context: str, seed: int) -> str:
    return f"<search>{context[-3:]} {seed}</search> and on"


def test_contract() -> None:
    engine = ScriptedEngine(echo)
    assert isinstance(engine, Engine)
    got = engine.generate([request("abc", 5)])[0]
    assert decode(TOKENIZER, got.ids) == "<search>abc 5</search>"
    assert (got.finish_reason, got.stop_string, got.version) == ("stop", "</search>", 0)
    assert len(got.ids) == len(got.logprobs) == len(got.entropies)
    assert max(got.logprobs) <= 0
    assert got.continuation.token_ids() == [*encode(TOKENIZER, "abc"), *got.ids]
    engine.update_weights(3)
    assert engine.generate([request("abc")])[0].version == 3


def test_outputs_do_not_depend_on_the_batch() -> None:
    asked = [request(f"q{i}", i) for i in range(6)]
    together = ScriptedEngine(echo).generate(asked)
    engine = ScriptedEngine(echo, arrival_seed=1)
    shuffled = dict(engine.as_completed(asked))
    assert list(shuffled) != list(range(6))
    for i, got in enumerate(together):
        alone = ScriptedEngine(echo).generate([request(f"q{i}", i)])[0]
        assert (got.ids, got.logprobs, got.entropies) == (alone.ids, alone.logprobs, alone.entropies)
        assert shuffled[i].logprobs == got.logprobs
    assert len({got.logprobs for got in together}) == 6


def test_texts_without_a_stop_end_with_the_end_token_and_limits_hold() -> None:
    engine = ScriptedEngine(["hello", "hello", "<answer>x</answer>"])
    ended = engine.generate([request("a")])[0]
    assert ended.ids[-1] == TOKENIZER.eos_token_id
    assert ended.stop_string is None
    cut = engine.generate([request("a", limit=4)])[0]
    assert (decode(TOKENIZER, cut.ids), cut.finish_reason) == ("hell", "length")
    cut = engine.generate([request("a", limit=17)])[0]
    assert (cut.finish_reason, cut.stop_string) == ("length", None)
    with pytest.raises(EngineError, match="used up"):
        engine.generate([request("a")])


def test_scripts_by_key() -> None:
    engine = ScriptedEngine({(1,): "one", (2,): "two"})
    got = engine.generate([request("a", key=(2,)), request("a", key=(1,))])
    assert [decode(TOKENIZER, g.ids[:-1]) for g in got] == ["two", "one"]
    with pytest.raises(EngineError, match="scripted keys"):
        engine.generate([request("a", key=(3,))])


def test_faults() -> None:
    with pytest.raises(EngineError, match="scripted failure"):
        ScriptedEngine(echo, fail=lambda r: r.seed == 1).generate([request("a", 0), request("b", 1)])
    aborted = ScriptedEngine(echo, abort=lambda r: r.seed == 1).generate([request("a", 0), request("b", 1)])
    assert [g.finish_reason for g in aborted] == ["stop", "abort"]
    ran_on = ScriptedEngine(echo, ignore_stop=True).generate([request("abc", 5)])[0]
    assert decode(TOKENIZER, ran_on.ids).startswith("<search>abc 5</search> and on")
    over = ScriptedEngine(echo, ignore_limit=True).generate([request("abc", 5, limit=3)])[0]
    assert len(over.ids) > 3
    stripped = ScriptedEngine(echo, strip_stop=True).generate([request("abc", 5)])[0]
    assert (decode(TOKENIZER, stripped.ids), stripped.stop_string) == ("<search>abc 5", "</search>")
    with pytest.raises(EngineError, match="at least 1"):
        ScriptedEngine(echo).generate([request("a", limit=0)])


def test_scripted_rollouts_need_no_torch() -> None:
    code = "import sys, turntree.agents, turntree.agents.engines as e; e.ScriptedEngine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
