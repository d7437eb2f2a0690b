"""A tiny decoder and its own tokenizer, small enough to train on one core while you watch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from turntree.errors import ConfigError

__all__ = ["TAGS", "build_tiny_model", "build_tokenizer"]

TAGS = (
    *("<think>", "</think>", "<search>", "</search>"),
    *("<information>", "</information>", "<answer>", "</answer>"),
)
"""Tags that are one token each; they are ordinary text, never special tokens."""

PAD, END = "<|pad|>", "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# A token never reaches over the border of a word, number, run of signs or run of line ends.
_WORD = r"\n+| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s"
_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer(words: Iterable[str], syllables: Iterable[str] = (), tokens: Iterable[str] = ()) -> Any:
    """A ``PreTrainedTokenizerFast`` over whole words, syllables of names, tags and single bytes.

    Any Unicode text survives encode and decode unchanged: what no word or syllable covers falls back to its UTF-8
    bytes. A word is one token with and without a space before it; a capitalised name is split into ``syllables``.
    The vocabulary depends on the set of words and syllables only, not on their order. ``tokens`` are further texts,
    such as the tags of other tools, that are one token each wherever they stand.

    Padding is ``<|pad|>`` (id 0), a turn ends with ``<|end|>``; the chat template costs three tokens a message.
    """
    import transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    specials = (PAD, END, *_ROLES)
    # The alphabet writes each byte as one printable character, so that pieces are exact byte strings.
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {to_bytes.pre_tokenize_str(p)[0][0] for p in _pieces(words, syllables)}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Equal scores make the segmentation with the fewest tokens win; bytes lose every tie.
    vocab = [(s, 0.0) for s in specials] + [(c, -11.0) for c in alphabet]
    vocab += [(p, -10.0) for p in sorted(pieces - set(alphabet))]
    core = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORD), "isolated"), to_bytes])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    core.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*TAGS, *tokens)])
    make: Any = transformers.PreTrainedTokenizerFast
    return make(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=list(_ROLES),
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(
    tokenizer: Any,
    *,
    hidden: int = 96,
    layers: int = 2,
    heads: int = 4,
    head_dim: int | None = None,
    max_positions: int = 2048,
    seed: int = 0,
) -> Any:
    """A ``LlamaForCausalLM`` with random weights, tied embeddings, float32.

    By default it has 0.22 M parameters and 96 more for each token of the vocabulary. ``head_dim`` is ``hidden / heads``
    by default; vLLM on CPU needs 32 (0.25 M parameters). The global random state is left as it was. Raises
    ``ConfigError`` when ``hidden`` does not split over ``heads``, or ``head_dim`` is not even.
    """
    import torch
    import transformers

    if hidden % (2 * heads) != 0:
        raise ConfigError(f"hidden must be a multiple of 2 * heads = {2 * heads}, found {hidden}")
    if head_dim is not None and (head_dim < 2 or head_dim % 2):
        raise ConfigError(f"head_dim must be even and at least 2 (rotary positions turn pairs), found {head_dim}")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=-(-8 * hidden // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim or hidden // heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        # Weights this large let so narrow a network find attention patterns in hundreds of steps, not thousands.
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        make: Any = transformers.LlamaForCausalLM
        model = make(config)
    return model.eval()


def _pieces(words: Iterable[str], syllables: Iterable[str]) -> set[str]:
    """Texts that become one token: words and syllables in the forms they take in sentences."""
    found = {form for word in words if word.strip() for form in (word.strip(), " " + word.strip())}
    for syllable in syllables:
        if low := syllable.strip().lower():
            name = low[0].upper() + low[1:]
            found |= {low, name, " " + name}
    return found | {f" {digit}" for digit in range(10)} | {"\n\n", " ("}
