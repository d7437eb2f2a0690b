"""What the library needs of a tokenizer, and a byte tokenizer that needs no files."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from turntree.errors import TemplateError

__all__ = ["ByteTokenizer", "Tokenizer", "decode", "encode", "end_ids", "special_tokens"]


# Fast tokenizers keep split_special_tokens as state, which two threads would overwrite for each other.
_ENCODING = threading.Lock()
# Half of a UTF-16 pair: JSON files can hold it, UTF-8 and tokenizers cannot.
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used; :class:`ByteTokenizer` has it too."""

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def pad_token_id(self) -> Any: ...

    @property
    def chat_template(self) -> Any: ...

    @property
    def encode(self) -> Any: ...

    @property
    def decode(self) -> Any: ...

    @property
    def apply_chat_template(self) -> Any: ...

    @property
    def get_added_vocab(self) -> Any: ...


def encode(tokenizer: Tokenizer, text: str, *, allow_special: bool = False) -> tuple[int, ...]:
    """Token ids of ``text`` alone: nothing is added in front or behind.

    Unless ``allow_special``, text that looks like a special token (``<|im_end|>`` in a web page) is tokenised as
    ordinary characters, so that data cannot end a turn or open a new role. A lone surrogate is read as U+FFFD.
    """
    if not text:
        return ()
    if _LONE_SURROGATE.search(text):
        text = _LONE_SURROGATE.sub("\ufffd", text)
    with _ENCODING:
        if _encodes_plainly(type(tokenizer)):  # what transformers would call in the end, for half of the time
            return _encoded(cast(Any, tokenizer)._tokenizer, text, split=not allow_special)
        return tuple(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=not allow_special))


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of ``ids`` with every token visible; bytes that form no character become U+FFFD."""
    if not ids:
        return ""
    if _decodes_plainly(type(tokenizer)):  # what transformers would call in the end, for a third of the time
        return cast(str, tokenizer._tokenizer.decode(list(ids), skip_special_tokens=False))  # type: ignore[attr-defined]
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return cast(str, text)


def _encoded(inner: Any, text: str, *, split: bool) -> tuple[int, ...]:
    """Ids by the ``tokenizers.Tokenizer`` inside a fast one: nothing cut, padded or added."""
    if inner.truncation is not None:
        inner.no_truncation()
    if inner.padding is not None:
        inner.no_padding()
    if inner.encode_special_tokens != split:
        inner.encode_special_tokens = split
    # The fast one leaves out where in the text each token stands.
    return tuple(inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@functools.cache
def _encodes_plainly(kind: type) -> bool:
    """Whether a class encodes as transformers' fast tokenizers do, without a method of its own."""
    names = {getattr(getattr(kind, name, None), "__qualname__", "") for name in ("encode", "_encode_plus")}
    return names == {"PreTrainedTokenizerBase.encode", "TokenizersBackend._encode_plus"}


@functools.cache
def _decodes_plainly(kind: type) -> bool:
    """Whether a class decodes as transformers' fast tokenizers do, without a method of its own."""
    names = {getattr(getattr(kind, name, None), "__qualname__", "") for name in ("decode", "_decode")}
    return names == {"PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"}


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Special tokens by text: those that a chat template is made of, the library's plain tags left out."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if isinstance(decoder, Mapping):
        return {str(token): int(index) for index, token in decoder.items() if getattr(token, "special", True)}
    return dict(tokenizer.get_added_vocab())


def end_ids(tokenizer: Tokenizer, generation_config: Any = None) -> frozenset[int]:
    """Every id that ends a generation: the tokenizer's end-of-text and the generation config's list (or number)."""
    found: set[int] = set()
    for value in (tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(v) for v in value)
    return frozenset(found)


class ByteTokenizer:
    """One token a UTF-8 byte, three special tokens and a ChatML template; encode and decode are exact inverses.

    Ids 0-255 are bytes, then ``<|im_start|>``, ``<|im_end|>`` (end of turn) and ``<|endoftext|>`` (padding).
    """

    specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    _parts = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
    chat_template = "chatml"
    eos_token_id = 257
    pad_token_id = 258

    def __len__(self) -> int:
        return 256 + len(self.specials)

    def get_added_vocab(self) -> dict[str, int]:
        """Special tokens by text."""
        return {token: 256 + i for i, token in enumerate(self.specials)}

    def encode(self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        """UTF-8 bytes of ``text``; special tokens are recognised unless ``split_special_tokens``."""
        del add_special_tokens  # There is nothing to add: a plain text starts with its first byte.
        if split_special_tokens:
            return list(text.encode("utf-8"))
        ids: list[int] = []
        for part in self._parts.split(text):
            if part in self.specials:
                ids.append(256 + self.specials.index(part))
            else:
                ids += part.encode("utf-8")
        return ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ``ids``; a broken character becomes U+FFFD."""
        del clean_up_tokenization_spaces
        out = bytearray()
        for i in ids:
            if i < 256:
                out.append(i)
            elif not skip_special_tokens and i < len(self):  # A model may have more rows than there are tokens.
                out += self.specials[i - 256].encode("utf-8")
        return out.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """ChatML text of the conversation (``tokenize=True`` is not offered)."""
        if tokenize:
            raise TemplateError("ByteTokenizer renders text only; expected tokenize=False, then encode the text")
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
