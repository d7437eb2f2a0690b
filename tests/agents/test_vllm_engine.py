"""What vLLM is asked, how its answers are read, what reaches it of the weights; the real thing runs as slow tests."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.agents.test_reaper import gone, until
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.engines.vllm import VLLMEngine, check_published, publish_folder, require_vllm
from turntree.agents.engines.vllm_local import LocalServer, local_server
from turntree.agents.engines.vllm_request import finish_reason, make_generation, sampling_arguments, topk_entropy
from turntree.agents.engines.vllm_server import VLLMServerEngine
from turntree.agents.models import load_model, save_model, save_weights
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import encode
from turntree.errors import ConfigError, EngineError
from turntree.trainers.compose import compose

REQUEST = Request(Prefix([5, 6]), SamplingParams(4), seed=1, key=("q", 0))
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make venv-vllm")


# Words --------------------------------------------------------------------------------------------------------------


def test_requests_say_everything_that_a_server_could_default() -> None:
    params = SamplingParams(9, 0.7, top_p=0.9, top_k=5, stop=("</a>", "</b>"))
    asked = sampling_arguments(params, seed=2**63 - 1, end_ids=frozenset({7, 2}), entropy_topk=3)
    assert asked["max_tokens"] == 9
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["min_p"]) == (0.7, 0.9, 5, 0.0)
    assert (asked["presence_penalty"], asked["frequency_penalty"], asked["repetition_penalty"]) == (0.0, 0.0, 1.0)
    assert asked["stop"] == ["</a>", "</b>"]
    assert asked["stop_token_ids"] == [2, 7]
    assert asked["include_stop_str_in_output"] is True
    assert asked["skip_special_tokens"] is False
    assert asked["logprobs"] == 3
    assert asked["seed"] == 2**63 - 1  # derived seeds have 63 bits, which is what vLLM takes
    assert json.loads(json.dumps(asked)) == asked


@given(st.integers(min_value=0, max_value=2**64))
def test_seeds_stay_in_range(seed: int) -> None:
    asked = sampling_arguments(SamplingParams(1), seed=seed, end_ids=frozenset())
    assert 0 <= asked["seed"] < 2**63
    assert asked["seed"] % 2**62 == seed % 2**62


def test_greedy_requests_need_no_seed_and_cold_ones_are_refused() -> None:
    assert sampling_arguments(SamplingParams(1, 0.0), seed=3, end_ids=frozenset())["seed"] is None
    assert sampling_arguments(SamplingParams(1, 0.01), seed=3, end_ids=frozenset())["temperature"] == 0.01
    with pytest.raises(EngineError, match="raises temperatures below"):
        sampling_arguments(SamplingParams(1, 0.009), seed=3, end_ids=frozenset())


@pytest.mark.parametrize(
    ("said", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("error", "abort"), (None, "abort")]
)
def test_what_is_no_end_of_a_text_is_aborted(said: str | None, ours: str) -> None:
    assert finish_reason(said) == ours


@given(st.lists(st.floats(-12, 0), min_size=1, max_size=8))
def test_topk_entropy_is_that_of_the_renormalised_distribution(logprobs: list[float]) -> None:
    p = np.exp(np.array(logprobs))
    p /= p.sum()
    assert topk_entropy(logprobs) == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-9)


def test_answers_become_generations() -> None:
    got = make_generation(
        REQUEST, ids=[8, 9], logprobs=[-0.5, -1.0], reason="stop", stop="</a>", version=3, entropies=[0.1, 0.2]
    )
    assert (got.ids, got.logprobs, got.version, got.stop_string) == ((8, 9), (-0.5, -1.0), 3, "</a>")
    assert got.entropy_kind == "topk"
    assert got.continuation.token_ids() == [5, 6, 8, 9]
    ended = make_generation(REQUEST, ids=[2], logprobs=[-0.1], reason="stop", stop=2, version=0)
    assert (ended.stop_string, ended.entropy_kind, ended.entropies) == (None, "none", ())
    assert make_generation(REQUEST, ids=[], logprobs=[], reason="abort", stop=None, version=0).finish_reason == "abort"


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [([1, 2], [-1.0], "a log-prob for each of 2"), ([1], [float("nan")], "diverged"), ([], [], "at least one token")],
)
def test_answers_that_cannot_be_are_refused(ids: list[int], logprobs: list[float], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make_generation(REQUEST, ids=ids, logprobs=logprobs, reason="stop", stop=None, version=0)


# Weights on their way -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(["the", "river", "begins", "in", "where", "does"], ["ka", "ro", "mi"])


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return build_tiny_model(tokenizer, hidden=64, layers=1, heads=2, seed=3)


def test_untied_weights_are_the_same_model(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_weights(model, tmp_path, untie=True)
    tokenizer.save_pretrained(tmp_path)
    check_published(tmp_path, packed=True)
    again, _ = load_model(tmp_path)
    ids = torch.tensor([[5, 9, 30, 7]])
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert again.get_output_embeddings().weight is not again.get_input_embeddings().weight
    assert model.config.tie_word_embeddings is True


def test_weights_that_cpu_workers_would_take_in_part_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        check_published(tmp_path, packed=False)
    save_weights(model, tmp_path)
    check_published(tmp_path, packed=False)
    with pytest.raises(ConfigError, match="keep its old output layer"):
        check_published(tmp_path, packed=True)


def test_published_weights_are_gone_afterwards(model: Any, tmp_path: Path) -> None:
    with publish_folder(partial(save_weights, model), tmp_path / "shm") as folder:
        assert (folder / "model.safetensors").is_file()
    assert list((tmp_path / "shm").iterdir()) == []


def test_options() -> None:
    config = compose(["engine=vllm", "engine.block_size=64", "engine.args.tensor_parallel_size=2"])
    assert (config.engine.name, config.engine.block_size) == ("vllm", 64)
    assert config.engine.args == {"tensor_parallel_size": 2}
    assert compose(["engine=vllm_server"]).engine.base_url.startswith("http://127.0.0.1")
    for wrong in (
        "engine.sync=ftp",
        "engine.max_concurrent_requests=0",
        "engine.gpu_memory_utilization=0",
        "engine.timeout_s=0",
    ):
        with pytest.raises(ConfigError, match=wrong.split("=")[0]):
            compose([wrong])
    with pytest.raises(ConfigError, match="base_url is empty"):
        VLLMServerEngine("", build_tokenizer(["a"]))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_names_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"turntree\[vllm\].*make venv-vllm"):
        require_vllm()


# The real thing -----------------------------------------------------------------------------------------------------


def log_probs(model: Any, generation: Generation, temperature: float) -> np.ndarray:
    ids, n = generation.continuation.token_ids(), len(generation.ids)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -n - 1 : -1] / temperature
    found: np.ndarray = logits.log_softmax(-1).gather(1, torch.tensor(generation.ids)[:, None])[:, 0].numpy()
    return found


def assert_like_model(model: Any, generations: Sequence[Generation], temperature: float) -> None:
    for generation in generations:
        np.testing.assert_allclose(generation.logprobs, log_probs(model, generation, temperature), atol=1e-4)


def branches(tokenizer: Any, *, n: int = 4, tokens: int = 8, temperature: float = 0.7) -> list[Request]:
    root = Prefix(encode(tokenizer, "where does the river in Karomi begins " * 8))
    return [Request(root, SamplingParams(tokens, temperature), seed=2**62 + i, key=(i,)) for i in range(n)]


def shake(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def write_adapter(folder: Path, model: Any, *, rank: int) -> None:
    """A LoRA adapter of the query projections, in PEFT's files; ``model`` gets the same weights, merged."""
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(2), dict[str, torch.Tensor]()
    for i, layer in enumerate(model.model.layers):
        weight = layer.self_attn.q_proj.weight
        a = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
        b = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
        name = f"base_model.model.model.layers.{i}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        with torch.no_grad():
            weight.add_(b @ a)  # alpha = rank: a scale of 1
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.slow
@needs_vllm
def test_adapters_entropies_and_what_is_left_when_the_consumer_stops(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    save_model(model, tokenizer, tmp_path / "model")
    engine = VLLMEngine(tmp_path / "model", tokenizer, max_context_tokens=256, entropy_topk=3, lora_rank=8)
    try:
        plain = engine.generate(branches(tokenizer))
        assert_like_model(model, plain, 0.7)
        assert all(g.entropy_kind == "topk" and len(g.entropies) == len(g.ids) for g in plain)
        assert all(0 <= e <= np.log(3) + 1e-6 for g in plain for e in g.entropies)
        with pytest.raises(ConfigError, match="make it with publish"):
            engine.update_weights(1)
        write_adapter(tmp_path / "adapter", model, rank=4)
        engine.use_adapter(tmp_path / "adapter", 1)
        adapted = engine.generate(branches(tokenizer))
        assert_like_model(model, adapted, 0.7)
        assert {g.version for g in adapted} == {1}
        assert [g.logprobs for g in adapted] != [g.logprobs for g in plain]
        engine.use_adapter(None, 2)
        assert [g.logprobs for g in engine.generate(branches(tokenizer))] == [g.logprobs for g in plain]
        some = engine.as_completed([*branches(tokenizer, n=1, tokens=1), *branches(tokenizer, tokens=150)])
        assert next(some)[0] == 0
        some.close()
        assert engine.stats.aborted == 4
        assert len(engine.generate(branches(tokenizer))) == 4
        with pytest.raises(EngineError, match="256 positions"):
            engine.generate(branches(tokenizer, tokens=250))
    finally:
        engine.close()


@pytest.fixture(scope="module")
def served(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalServer, Path]]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: make venv-vllm")
    folder = tmp_path_factory.mktemp("served")
    save_weights(build_tiny_model(tokenizer, hidden=64, layers=1, heads=2, seed=3), folder, untie=True)
    tokenizer.save_pretrained(folder)
    with local_server(folder, arguments=SERVER, environment=EAGER) as server:
        yield server, folder


SERVER = ("--block-size", "32", "--enforce-eager", "--max-model-len", "256", "--dtype", "float32")
EAGER = {"TORCH_COMPILE_DISABLE": "1"}


@pytest.mark.slow
def test_server_weights_and_its_end(served: tuple[LocalServer, Path], model: Any, tokenizer: Any) -> None:
    server, _ = served
    engine = VLLMServerEngine(
        server.base_url,
        tokenizer,
        max_context_tokens=256,
        publish=partial(save_weights, model, untie=True),
        timeout_s=60,
        retries=1,
    )
    first = engine.generate(branches(tokenizer))
    assert_like_model(model, first, 0.7)
    assert [g.ids for g in engine.generate(branches(tokenizer))] == [g.ids for g in first]
    assert engine.stats.reused_tokens > 0
    stopped = SamplingParams(8, 0.7, stop=(tokenizer.decode(first[0].ids[3:4]),))
    cut = engine.generate([Request(branches(tokenizer)[0].prefix, stopped, seed=2**62)])[0]
    assert cut.finish_reason == "stop"
    assert cut.ids == first[0].ids[: len(cut.ids)]
    kept = {name: t.clone() for name, t in model.state_dict().items()}
    shake(model)
    engine.update_weights(4)
    changed = engine.generate(branches(tokenizer))
    assert_like_model(model, changed, 0.7)
    assert {g.version for g in changed} == {4}
    model.load_state_dict(kept)
    engine.update_weights(5)
    assert [g.logprobs for g in engine.generate(branches(tokenizer))] == [g.logprobs for g in first]
    some = engine.as_completed([*branches(tokenizer, n=1, tokens=1), *branches(tokenizer, n=8, tokens=150)])
    next(some)
    some.close()
    assert len(engine.generate(branches(tokenizer))) == 4
    assert_updates_in_flight(engine, model, tokenizer)
    server.kill()
    with pytest.raises(EngineError, match=r"failed after 2 tries"):
        engine.generate(branches(tokenizer))


def assert_updates_in_flight(engine: VLLMServerEngine, model: Any, tokenizer: Any) -> None:
    """Turns in flight end under the weights they started with; those that waited here start under the new ones."""
    old, narrow = (
        copy.deepcopy(model),
        VLLMServerEngine(
            engine.base_url, tokenizer, publish=partial(save_weights, model, untie=True), max_concurrent_requests=3
        ),
    )
    narrow.update_weights(6)
    waiting = narrow.as_completed([*branches(tokenizer, n=1, tokens=1), *branches(tokenizer, n=8, tokens=60)])
    first = next(waiting)[1]
    shake(model)
    narrow.update_weights(7)
    arrived = [first, *(reply for _, reply in waiting)]
    for version, weights in ((6, old), (7, model)):
        turns = [g for g in arrived if isinstance(g, Generation) and g.version == version]
        assert len(turns) >= 3
        assert_like_model(weights, turns, 0.7)
    assert {g.version for g in arrived if isinstance(g, Generation)} == {6, 7}


@pytest.mark.slow
def test_a_server_that_was_started_again_is_not_taken_for_the_trained_one(
    served: tuple[LocalServer, Path], model: Any, tokenizer: Any
) -> None:
    publish = partial(save_weights, model, untie=True)
    with local_server(served[1], arguments=SERVER, environment=EAGER) as server:
        engine = VLLMServerEngine(server.base_url, tokenizer, max_context_tokens=256, publish=publish, retries=1)
        shake(model)
        engine.update_weights(1)
        assert_like_model(model, engine.generate(branches(tokenizer)), 0.7)
        server.kill()
        # What was on its way fails request by request: failed leaves of a rollout, no exception that ends all.
        lost = dict(engine.as_completed(branches(tokenizer)))
        assert len(lost) == 4
        assert all(isinstance(reply, EngineError) and "failed after 2 tries" in str(reply) for reply in lost.values())
        with pytest.raises(EngineError, match="Connect"):
            engine.update_weights(2)
        port = int(server.base_url.split(":")[-1].removesuffix("/v1"))
        with local_server(served[1], arguments=SERVER, environment=EAGER, port=port):
            with pytest.raises(EngineError, match="restarted after it took version 1"):
                engine.generate(branches(tokenizer))
            with pytest.raises(EngineError, match="resume=true goes on"):
                engine.generate(branches(tokenizer))
            again = VLLMServerEngine(server.base_url, tokenizer, max_context_tokens=256, publish=publish)
            again.update_weights(1)
            assert_like_model(model, again.generate(branches(tokenizer)), 0.7)


@pytest.mark.slow
@needs_vllm
def test_a_killed_process_ends_the_engine_and_never_hangs(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_model(model, tokenizer, tmp_path / "model")
    engine = VLLMEngine(
        tmp_path / "model", tokenizer, max_context_tokens=1024, publish=partial(save_weights, model, untie=True)
    )
    waiting = engine.as_completed([*branches(tokenizer, n=1, tokens=1), *branches(tokenizer, tokens=800)])
    next(waiting)
    for process in engine.llm.llm_engine.engine_core.resources.engine_manager.processes:
        process.kill()
    with pytest.raises(EngineError, match="a step failed"):
        list(waiting)
    with pytest.raises(EngineError, match=r"is gone since .*resume=true goes on"):
        engine.generate(branches(tokenizer))
    with pytest.raises(EngineError):
        engine.update_weights(1)
    engine.close()


HOLDER = """
import sys, time
from turntree.agents.engines.vllm import VLLMEngine
from turntree.agents.models import load_tokenizer

if __name__ == "__main__":
    engine = VLLMEngine(sys.argv[1], load_tokenizer(sys.argv[1]), max_context_tokens=256)
    processes = engine.llm.llm_engine.engine_core.resources.engine_manager.processes
    print("processes", *[process.pid for process in processes], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@needs_vllm
def test_a_killed_trainer_leaves_no_process_of_vllm_behind(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_model(model, tokenizer, tmp_path / "model")
    (tmp_path / "holder.py").write_text(HOLDER, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "holder.py"), str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        line = next(line for line in holder.stdout if line.startswith("processes"))
        holder.kill()
    pids = [int(word) for word in line.split()[1:]]
    assert pids
    assert until(lambda: all(map(gone, pids)))


class _Bed:
    """Stands where ``vllm.LLM`` does and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def sleep(self, *, level: int) -> None:
        self.told.append(f"sleep {level}")

    def wake_up(self) -> None:
        self.told.append("wake")

    def collective_rpc(self, name: str, **_: Any) -> None:
        self.told.append(name)

    def reset_prefix_cache(self) -> bool:
        return True


@needs_vllm
def test_an_engine_that_rests_is_woken_by_whatever_needs_it(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = _Bed()
    monkeypatch.setattr(VLLMEngine, "_start", lambda self, folder: bed)
    engine = VLLMEngine(tmp_path, tokenizer, publish=partial(save_weights, model, untie=True), sleep=True)
    engine.rest()  # not started yet: nothing to put to sleep
    assert engine.llm is bed
    assert bed.told == []
    engine.rest()
    engine.rest()
    assert bed.told == ["sleep 1"]
    assert engine.llm is bed
    assert bed.told == ["sleep 1", "wake"]
    engine.rest()
    engine.update_weights(1)
    assert bed.told == ["sleep 1", "wake", "sleep 1", "wake", "reload_weights"]


@needs_vllm
def test_an_engine_rests_only_when_told_to(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bed = _Bed()
    monkeypatch.setattr(VLLMEngine, "_start", lambda self, folder: bed)
    engine = VLLMEngine(tmp_path, tokenizer)
    assert engine.llm is bed
    engine.rest()
    assert bed.told == []


@pytest.mark.slow
@needs_vllm
def test_vllm_on_a_cpu_stays_awake(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    save_model(model, tokenizer, tmp_path / "model")
    engine = VLLMEngine(tmp_path / "model", tokenizer, max_context_tokens=256, sleep=True)
    try:
        first = engine.generate(branches(tokenizer))
        engine.rest()
        assert [g.ids for g in engine.generate(branches(tokenizer))] == [g.ids for g in first]
    finally:
        engine.close()


@pytest.mark.slow
@needs_vllm
def test_heads_that_cpus_cannot_run_are_named(tokenizer: Any, tmp_path: Path) -> None:
    save_model(build_tiny_model(tokenizer, hidden=96, layers=1, heads=4), tokenizer, tmp_path / "model")
    engine = VLLMEngine(tmp_path / "model", tokenizer, max_context_tokens=256)
    with pytest.raises(ConfigError, match=r"heads of 24 dimensions.*--head-dim 32"):
        engine.generate(branches(tokenizer))


@pytest.mark.slow
def test_servers_that_cannot_be_trained_on_are_refused(
    served: tuple[LocalServer, Path], model: Any, tokenizer: Any
) -> None:
    raw = (*SERVER, "--logprobs-mode", "raw_logprobs")
    with local_server(served[1], arguments=raw, environment=EAGER, dev_mode=False) as server:
        engine = VLLMServerEngine(server.base_url, tokenizer, publish=partial(save_weights, model, untie=True))
        with pytest.raises(EngineError, match="before the sampling temperature"):
            engine.generate(branches(tokenizer))
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            engine.update_weights(1)


@pytest.mark.slow
@needs_vllm
def test_quickstart_with_vllm(tmp_path: Path) -> None:
    small = [
        *("sft.steps=30", "sft.demonstrations=64", "trainer.steps=2", "trainer.prompts_per_step=4"),
        *("trainer.eval_every=0", "trainer.save_every=1", "trainer.importance_cap=2.0"),
    ]
    command = [str(Path(sys.executable).with_name("turntree")), "quickstart", "engine=vllm", f"out={tmp_path / 'run'}"]
    subprocess.run([*command, *small], check=True, capture_output=True, text=True, timeout=900)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["mismatch/mean"] <= row["mismatch/max"] < 1e-3 for row in rows)
