"""HFEngine against plain forward passes of the same tiny model."""

from __future__ import annotations

import gc
import math
from typing import Any

import numpy as np
import pytest
import torch

from turntree.agents.engines import Engine, Generation, HFEngine, Prefix, Request, SamplingParams
from turntree.agents.engines.kv import BatchCache
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.agents.tokenizer import ByteTokenizer, decode, encode
from turntree.errors import ConfigError, EngineError
from turntree.trainers.config import EngineConfig

WORDS = ["the", "a", "of", "is", "who", "what", "where", "born", "in", "capital", "director", "film", "search", "I"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer(WORDS, ["mar", "tel", "qui", "no"])


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    model = build_tiny_model(tokenizer, hidden=32, layers=2, heads=4, max_positions=512, seed=3)
    with torch.no_grad():  # Sharper than the initial weights, so that greedy texts are not one repeated token.
        for name, p in model.named_parameters():
            p.mul_(1 if p.ndim == 1 else 2.4 if "layers" in name else 1.2)
    return model


@pytest.fixture
def engine(model: Any, tokenizer: Any) -> HFEngine:
    return HFEngine(model, tokenizer)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(5, 300, length).tolist())


def plain_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].double()
    return logits


def plain_greedy(model: Any, ids: list[int], n: int, ends: frozenset[int] = frozenset()) -> list[int]:
    out: list[int] = []
    while len(out) < n and not (out and out[-1] in ends):
        out.append(int(plain_logits(model, ids + out)[-1].argmax()))
    return out


def greedy(n: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(n, temperature=0.0, **kwargs)


def assert_like_plain(model: Any, request: Request, generation: Generation) -> None:
    """Log-probs and exact entropies equal those of one plain forward pass over the whole row."""
    ids = request.prefix.token_ids() + list(generation.ids)
    temperature = request.params.temperature or 1.0
    logprobs = (plain_logits(model, ids)[len(request.prefix) - 1 : -1] / temperature).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(generation.ids)[:, None]).squeeze(1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    np.testing.assert_allclose(generation.logprobs, chosen.numpy(), atol=2e-5)
    np.testing.assert_allclose(generation.entropies, entropies.numpy(), atol=2e-5)


def test_greedy_equals_plain_forward_passes(model: Any, engine: HFEngine) -> None:
    request = Request(Prefix(prompt(0, 7)), greedy(12), seed=0)
    generation = engine.generate([request])[0]
    assert list(generation.ids) == plain_greedy(model, request.prefix.token_ids(), 12, engine.end_ids)
    assert len(set(generation.ids)) > 2
    assert_like_plain(model, request, generation)
    assert isinstance(engine, Engine)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_first_token_logprob_equals_plain_forward(model: Any, engine: HFEngine, temperature: float) -> None:
    requests = [Request(Prefix(prompt(i, 3 + 4 * i)), SamplingParams(9, temperature), seed=i) for i in range(6)]
    for request, generation in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, generation)


def test_ragged_batch_equals_row_by_row(model: Any, tokenizer: Any) -> None:
    params = [SamplingParams(5 + 3 * i, temperature=[0.0, 1.0, 0.8][i % 3]) for i in range(9)]
    requests = [Request(Prefix(prompt(i, 1 + 5 * i)), params[i], seed=100 + i) for i in range(9)]
    together = HFEngine(model, tokenizer).generate(requests)
    for request, got in zip(requests, together, strict=True):
        alone = HFEngine(model, tokenizer, cache=False).generate([request])[0]
        assert got.ids == alone.ids
        assert got.finish_reason == alone.finish_reason
        np.testing.assert_allclose(got.logprobs, alone.logprobs, atol=2e-5)


def test_draws_depend_on_the_seed_alone(model: Any, tokenizer: Any) -> None:
    root = Prefix(prompt(1, 20))
    first = Request(root, SamplingParams(16), seed=11)
    others = [Request(Prefix(prompt(40 + i, 3 + i)), SamplingParams(4 + i), seed=i) for i in range(7)]
    alone = HFEngine(model, tokenizer).generate([first])[0]
    for batch in ([first, *others], [*others[:3], first, *others[3:]]):
        got = HFEngine(model, tokenizer, max_batch_rows=5).generate(batch)
        assert got[batch.index(first)].ids == alone.ids
    other_seed = HFEngine(model, tokenizer).generate([Request(root, SamplingParams(16), seed=12)])[0]
    assert other_seed.ids != alone.ids


def test_samples_follow_the_distribution(model: Any, engine: HFEngine) -> None:
    root = Prefix(prompt(2, 5))
    n = 4000
    drawn = engine.generate([Request(root, SamplingParams(1, 0.8), seed=i) for i in range(n)])
    counts = np.bincount([g.ids[0] for g in drawn], minlength=model.config.vocab_size) / n
    probs = (plain_logits(model, root.token_ids())[-1] / 0.8).softmax(-1).numpy()
    likely = probs > 0.01
    assert likely.any()
    np.testing.assert_allclose(counts[likely], probs[likely], atol=5 * np.sqrt(0.25 / n))


def grow_chain(engine: HFEngine, root: Prefix, turns: int) -> list[Prefix]:
    nodes = [root]
    for turn in range(turns):
        generation = engine.generate([Request(nodes[-1], greedy(6), seed=turn)])[0]
        nodes.append(generation.continuation.extend(prompt(turn, 4)))
    return nodes


def test_forked_cache_equals_no_cache(model: Any, tokenizer: Any) -> None:
    engine = HFEngine(model, tokenizer)
    nodes = grow_chain(engine, Prefix(prompt(3, 30)), 3)
    # Branches from every depth in one ragged batch, several from the same node.
    requests = [Request(node, greedy(8), seed=i) for i, node in enumerate(nodes * 2)]
    sampled = [Request(node, SamplingParams(8), seed=i) for i, node in enumerate(nodes * 2)]
    for request, got in zip(requests + sampled, engine.generate(requests + sampled), strict=True):
        flat = Request(Prefix(request.prefix.token_ids()), request.params, request.seed)
        assert got.ids == HFEngine(model, tokenizer, cache=False).generate([flat])[0].ids
        assert got.continuation.token_ids() == request.prefix.token_ids() + list(got.ids)
        assert_like_plain(model, request, got)


def test_a_branch_pays_for_new_tokens_only(model: Any, tokenizer: Any) -> None:
    engine = HFEngine(model, tokenizer)
    root = Prefix(prompt(4, 40))
    first = engine.generate([Request(root, greedy(6), seed=i) for i in range(5)])
    assert engine.stats.prefilled_tokens == 40  # Once for all five children.
    assert engine.store is not None
    assert engine.store.tokens == 40 + 5 * 5  # The last sampled token of each turn was never fed.
    before = engine.stats.prefilled_tokens
    node = first[0].continuation.extend(prompt(9, 7))
    engine.generate([Request(node, greedy(3), seed=0), Request(node, greedy(3), seed=1), Request(root, greedy(3), 2)])
    assert engine.stats.prefilled_tokens - before == 1 + 7


def test_memory_is_freed_with_the_handles(model: Any, tokenizer: Any) -> None:
    engine = HFEngine(model, tokenizer)
    nodes = grow_chain(engine, Prefix(prompt(5, 10)), 3)
    assert engine.store is not None
    held = engine.store.tokens
    assert held > 0
    del nodes[-2:]
    gc.collect()
    assert 10 <= engine.store.tokens < held
    nodes.clear()
    gc.collect()
    assert engine.store.tokens == 0
    assert len(engine.store) == 0


def test_update_weights_drops_stale_caches(tokenizer: Any) -> None:
    model = build_tiny_model(tokenizer, hidden=32, layers=2, seed=1)
    engine = HFEngine(model, tokenizer)
    request = Request(Prefix(prompt(6, 12)), greedy(5), seed=0)
    before = engine.generate([request])[0]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(0)) * 0.3)
    engine.update_weights(7)
    assert engine.store is not None
    assert engine.store.tokens == 0
    after = engine.generate([request])[0]
    assert (before.version, after.version, engine.version) == (0, 7, 7)
    assert_like_plain(model, request, after)
    assert after.logprobs != before.logprobs


@pytest.mark.parametrize("seed", range(6))
def test_any_forest_of_prefixes_in_any_state_of_the_cache(model: Any, tokenizer: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = HFEngine(model, tokenizer, max_batch_rows=4)
    assert engine.store is not None
    nodes = [Prefix(prompt(seed, 6)), Prefix(prompt(seed + 50, 1))]
    for _ in range(3):
        for _ in range(6):  # Observations of any length, empty ones too.
            parent = nodes[int(rng.integers(len(nodes)))]
            nodes.append(parent.extend(prompt(int(rng.integers(99)), int(rng.integers(0, 5)))))
        chosen = [nodes[int(i)] for i in rng.integers(len(nodes), size=7)]
        requests = [Request(p, SamplingParams(int(rng.integers(1, 6))), seed=i) for i, p in enumerate(chosen)]
        for request, got in zip(requests, engine.generate(requests), strict=True):
            assert_like_plain(model, request, got)
            nodes.append(got.continuation)
        for handle in [n for n in nodes if engine.store.held(n) and rng.random() < 0.3]:
            del engine.store._entries[handle]


def test_eviction_bounds_the_cache_and_recomputes(model: Any, tokenizer: Any) -> None:
    engine = HFEngine(model, tokenizer, max_cached_tokens=25)
    nodes = grow_chain(engine, Prefix(prompt(7, 20)), 4)
    assert engine.store is not None
    assert engine.store.tokens <= 25
    requests = [Request(node, greedy(6), seed=0) for node in nodes]
    for request, got in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, got)
    # A hole in the middle of a chain: the root is recomputed, its descendants are not.
    free = HFEngine(model, tokenizer)
    nodes = grow_chain(free, Prefix(prompt(7, 20)), 3)
    free.generate([Request(nodes[-1], greedy(1), 0)])
    assert free.store is not None
    free.store._entries.pop(nodes[0])
    before = free.stats.prefilled_tokens
    request = Request(nodes[-1], greedy(6), 0)
    assert_like_plain(model, request, free.generate([request])[0])
    assert free.stats.prefilled_tokens - before == 20


def test_stop_inside_a_token_keeps_the_token_whole(model: Any) -> None:
    # The piece "ab" holds the stop string "a" and one more character.
    tokenizer = build_tokenizer(["ab", "cd"], [])
    tiny = build_tiny_model(tokenizer, hidden=32, layers=1, seed=0)
    target = encode(tokenizer, "ab")[0]
    force_tokens(tiny, [target])
    engine = HFEngine(tiny, tokenizer)
    generation = engine.generate([Request(Prefix([7, 8]), greedy(9, stop=("zz", "a")), seed=0)])[0]
    assert generation.ids == (target,)
    assert generation.finish_reason == "stop"
    assert generation.stop_string == "a"


def force_tokens(model: Any, favourites: list[int]) -> None:
    """Make a model prefer the favourites, whatever comes before: its last norm gives a constant direction."""
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.zero_()
        embedding[:, 0] = 1.0
        embedding[favourites, 1] = 5.0
        embedding[:, 1] += 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def test_stop_string_over_several_tokens_and_multibyte() -> None:
    tokenizer = ByteTokenizer()
    engine_model = byte_model(tokenizer)
    with torch.no_grad():  # the message never ends by itself, whatever the processor's rounding makes of the others
        engine_model.lm_head.weight[256:].zero_()
    # Greedy text of the model without stops, then stop at strings taken from the middle of it.
    root = Prefix(encode(tokenizer, "Where?"))
    text_ids = HFEngine(engine_model, tokenizer).generate([Request(root, greedy(40), seed=0)])[0].ids
    assert len(text_ids) == 40
    spans = [(start, start + length) for length in (1, 2, 4) for start in range(3, 36)]
    texts = [text for text in (decode(tokenizer, text_ids[a:b]) for a, b in spans) if "\ufffd" not in text]
    assert texts
    for wanted in texts[:: max(1, len(texts) // 6)]:
        got = HFEngine(engine_model, tokenizer).generate([Request(root, greedy(40, stop=(wanted,)), seed=0)])[0]
        text = decode(tokenizer, got.ids)
        assert got.ids == text_ids[: len(got.ids)]
        assert got.stop_string == wanted
        assert text.endswith(wanted)
        assert text.count(wanted) == 1


def byte_model(tokenizer: Any) -> Any:
    import transformers

    make: Any = transformers.LlamaForCausalLM
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = make(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
        model.lm_head.weight[128:] = -1.0  # ASCII only.
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_model_families_with_grouped_heads(family: str) -> None:
    import transformers as tf

    kinds: dict[str, Any] = {
        "llama": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
    }
    make_config, make_model = kinds[family]
    config = make_config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = make_model(config).eval()
    engine = HFEngine(model, ByteTokenizer())
    nodes = grow_chain(engine, Prefix(prompt(3, 11)[:11]), 2)
    requests = [Request(node, SamplingParams(7), seed=i) for i, node in enumerate(nodes * 2)]
    for request, got in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, got)


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_bfloat16(tokenizer: Any, how: str) -> None:
    model = build_tiny_model(tokenizer, hidden=32, layers=2, seed=1)
    request = Request(Prefix(prompt(8, 15)), SamplingParams(10), seed=4)
    if how == "weights":
        engine = HFEngine(model.to(torch.bfloat16), tokenizer)
    else:
        engine = HFEngine(model, tokenizer, autocast=torch.bfloat16)
    generation = engine.generate([request])[0]
    ids = request.prefix.token_ids() + list(generation.ids)
    logprobs = plain_logits(model.float(), ids)[len(request.prefix) - 1 : -1].log_softmax(-1)
    np.testing.assert_allclose(
        generation.logprobs, logprobs.gather(1, torch.tensor(generation.ids)[:, None]).squeeze(1), atol=0.05
    )


def test_top_k_and_top_p_keep_to_their_support(model: Any, engine: HFEngine) -> None:
    root = Prefix(prompt(2, 5))
    probs = plain_logits(model, root.token_ids())[-1].softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    drawn = engine.generate([Request(root, SamplingParams(1, top_k=3), seed=i) for i in range(200)])
    assert {g.ids[0] for g in drawn} == set(ranked[:3])
    nucleus = int((probs[ranked].cumsum(0) < 0.5).sum()) + 1
    drawn = engine.generate([Request(root, SamplingParams(1, top_p=0.5), seed=i) for i in range(600)])
    assert {g.ids[0] for g in drawn} <= set(ranked[:nucleus])
    np.testing.assert_allclose(drawn[0].logprobs[0], probs.log()[drawn[0].ids[0]], atol=2e-5)


def test_length_limit_and_state_of_the_model(model: Any, tokenizer: Any) -> None:
    model.train()
    generation = HFEngine(model, tokenizer).generate([Request(Prefix([9]), SamplingParams(4), seed=1)])[0]
    assert model.training
    assert model.config._attn_implementation != "turntree_cached"
    model.eval()
    ended = tokenizer.eos_token_id in generation.ids
    assert generation.finish_reason == ("stop" if ended else "length")
    assert len(generation.ids) == 4 or ended


def test_long_prompts_are_fed_in_slices(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_model(tokenizer, hidden=32, layers=2, seed=1)
    monkeypatch.setattr("turntree.agents.engines.hf._PREFILL_COLUMNS", 16)
    request = Request(Prefix(prompt(8, 50)), SamplingParams(70), seed=4)
    short = Request(Prefix(prompt(9, 20)), SamplingParams(3), seed=5)
    for asked, got in zip([request, short], HFEngine(model, tokenizer).generate([request, short]), strict=True):
        assert_like_plain(model, asked, got)


def test_refusals(model: Any, tokenizer: Any, engine: HFEngine) -> None:
    with pytest.raises(EngineError, match="max_tokens of at least 1"):
        engine.generate([Request(Prefix([5]), SamplingParams(0), seed=0)])
    with pytest.raises(EngineError, match="empty"):
        engine.generate([Request(Prefix([]), SamplingParams(3), seed=0)])
    with pytest.raises(EngineError, match="512 positions"):
        engine.generate([Request(Prefix(prompt(0, 500)), SamplingParams(13), seed=0)])
    with pytest.raises(ConfigError, match="max_batch_rows"):
        HFEngine(model, tokenizer, max_batch_rows=0)
    with pytest.raises(ConfigError, match="max_cached_tokens=-1: expected 0 or more, or None"):
        HFEngine(model, tokenizer, max_cached_tokens=-1)
    with pytest.raises(ConfigError, match=r"engine\.max_cached_tokens=-1 is out of range"):
        EngineConfig(max_cached_tokens=-1)
    assert engine.generate([]) == []


def test_diverged_weights_are_an_error(tokenizer: Any) -> None:
    model = build_tiny_model(tokenizer, hidden=32, layers=1)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="weights diverged"):
        HFEngine(model, tokenizer).generate([Request(Prefix([5]), SamplingParams(3), seed=0)])


WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": (
        "Qwen2",
        {
            "sliding_window": 6,
            "use_sliding_window": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gemma2": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
}


@pytest.mark.parametrize("family", WINDOWED)
def test_sliding_windows_and_caps(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' own eager attention; contexts are several windows long."""
    import transformers as tf

    name, options = WINDOWED[family]
    config = getattr(tf, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2, eos_token_id=None, bos_token_id=None, **options,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = getattr(tf, f"{name}ForCausalLM")(config).eval()
    model.config._attn_implementation = "eager"
    monkeypatch.setattr("turntree.agents.engines.hf._PREFILL_COLUMNS", 9)
    engine = HFEngine(model, ByteTokenizer())
    nodes = grow_chain(engine, Prefix(prompt(3, 19)), 2)
    requests = [Request(node, SamplingParams(7), seed=i) for i, node in enumerate(nodes * 2)]
    for request, got in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, got)


def test_attention_that_is_more_than_causal_is_refused() -> None:
    import transformers as tf

    make: Any = tf.GptOssForCausalLM
    config = tf.GptOssConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, head_dim=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="GptOssForCausalLM with attention sinks; use the vllm engine"):
        HFEngine(make(config), ByteTokenizer())


def test_latent_attention_is_refused() -> None:
    import transformers as tf

    make: Any = tf.DeepseekV3ForCausalLM
    config = tf.DeepseekV3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=12, first_k_dense_replace=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="DeepseekV3ForCausalLM with latent keys and values; use the vllm engine"):
        HFEngine(make(config), ByteTokenizer())


def test_attention_that_takes_no_function_is_refused() -> None:
    """GPT-J's own attention adds the mask to its scores, which with one of booleans gave wrong log-probs."""
    import transformers as tf

    make: Any = tf.GPTJForCausalLM
    config = tf.GPTJConfig(vocab_size=300, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    with pytest.raises(ConfigError, match=r"GPTJForCausalLM does not take attention functions.*; use the vllm engine"):
        HFEngine(make(config), ByteTokenizer())


def test_rotations_that_depend_on_the_length_bound_the_context() -> None:
    import transformers as tf

    make: Any = tf.LlamaForCausalLM
    rotation = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tf.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=32, rope_parameters=rotation,
    )  # fmt: skip
    assert HFEngine(make(config), ByteTokenizer()).max_context_tokens == 32
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 16}
    config.rope_parameters = {**longrope, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    assert HFEngine(make(config), ByteTokenizer()).max_context_tokens == 16


def test_waiting_requests_join_as_rows_finish(model: Any, tokenizer: Any) -> None:
    """Two rows of 24 tokens and twenty of 2, three at a time: the short ones take turns beside the long ones."""
    params = [SamplingParams(24 if i < 2 else 2) for i in range(22)]
    requests = [Request(Prefix(prompt(i, 3 + (7 * i) % 19)), p, seed=i) for i, p in enumerate(params)]
    engine = HFEngine(model, tokenizer, max_batch_rows=3)
    engine.end_ids = frozenset()
    together = engine.generate(requests)
    assert [len(g.ids) for g in together] == [p.max_tokens for p in params]
    assert engine.stats.decode_steps <= 40  # 88 rows' steps by three are at least 30
    for request, got in zip(requests, together, strict=True):
        alone = HFEngine(model, tokenizer, cache=False)
        alone.end_ids = frozenset()
        assert got.ids == alone.generate([request])[0].ids
        assert_like_plain(model, request, got)
        assert got.continuation.token_ids() == request.prefix.token_ids() + list(got.ids)


@pytest.mark.parametrize("cache", [True, False])
def test_the_bound_on_padded_tokens_holds_as_rows_join(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    sizes: list[int] = []
    plain = BatchCache.mask

    def watched(self: BatchCache, queries: int) -> torch.Tensor:
        if queries == 1:
            sizes.append(self.rows * (self.filled + 1))
        return plain(self, queries)

    monkeypatch.setattr(BatchCache, "mask", watched)
    rng = np.random.default_rng(0)
    requests = [
        Request(Prefix(prompt(i, int(rng.integers(1, 60)))), SamplingParams(int(rng.integers(1, 20))), seed=i)
        for i in range(20)
    ]
    engine = HFEngine(model, tokenizer, max_batch_tokens=200, max_cached_tokens=50, cache=cache)
    for request, got in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, got)
    assert 79 < max(sizes) <= 200
    if engine.store is not None:
        assert engine.store.tokens <= 50


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -0.5])
def test_temperatures_that_do_not_exist_are_refused(engine: HFEngine, temperature: float) -> None:
    with pytest.raises(EngineError, match="finite temperature >= 0"):
        engine.generate([Request(Prefix(prompt(0, 3)), SamplingParams(2, temperature), seed=0, key=("q",))])


@pytest.mark.parametrize("family", ["gpt2", "dynamic"])
def test_rows_that_end_at_the_last_position_leave_the_others_alone(family: str) -> None:
    """Positions past the last one are not in GPT-2's table, and would change the rotation of every row."""
    import transformers as tf

    model: Any
    if family == "gpt2":
        make: Any = tf.GPT2LMHeadModel
        config: Any = tf.GPT2Config(
            vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2, eos_token_id=None,
            bos_token_id=None,
        )  # fmt: skip
    else:
        make = tf.LlamaForCausalLM
        config = tf.LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=64, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = make(config).eval()
    engine = HFEngine(model, ByteTokenizer())
    engine.end_ids = frozenset()
    first = [Request(Prefix(prompt(0, 62)), SamplingParams(2), 0), Request(Prefix(prompt(1, 3)), SamplingParams(40), 1)]
    generations = engine.generate(first)
    for request, got in zip(first, generations, strict=True):
        assert_like_plain(model, request, got)
    # A long context with few new tokens beside a short one with many: the few are filled up on the right.
    held = generations[1].continuation
    second = [Request(held.extend(prompt(2, 2)), SamplingParams(19), 2)]
    second.append(Request(Prefix(prompt(3, 60)), SamplingParams(4), 3))
    for request, got in zip(second, engine.generate(second), strict=True):
        assert_like_plain(model, request, got)


def test_the_bound_on_padded_tokens_holds_while_contexts_are_fed(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held of one row lies before what is new of another: together they are longer than either row."""
    sizes: list[int] = []
    plain = BatchCache.mask

    def watched(self: BatchCache, queries: int) -> torch.Tensor:
        if queries > 1 and self.rows > 1:
            sizes.append(self.rows * (self.filled + queries))
        return plain(self, queries)

    monkeypatch.setattr(BatchCache, "mask", watched)
    engine = HFEngine(model, tokenizer, max_batch_tokens=300)
    held = engine.generate([Request(Prefix(prompt(0, 90)), greedy(2), 0)])[0].continuation
    requests = [Request(held.extend(prompt(i, 3)), greedy(2), 0) for i in range(2)]
    requests += [Request(Prefix(prompt(9 + i, 80)), greedy(2), 0) for i in range(2)]
    for request, got in zip(requests, engine.generate(requests), strict=True):
        assert_like_plain(model, request, got)
    assert sizes
    assert max(sizes) <= 300
