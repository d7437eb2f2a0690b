"""Conversations as ids that stand in for the tokens of a server whose tokenizer is not here.

A rollout keeps an episode as ids. Behind a chat endpoint there are none, so the text itself is packed into integers:
nothing is lost, messages keep their borders, and a turn gets exactly as many ids as the server counted tokens. Thus
one rollout, one set of limits and one count of tokens serve text and token endpoints alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from turntree.agents.engines.protocol import Prefix
from turntree.agents.stops import find_stop
from turntree.agents.tokenizer import ByteTokenizer, encode
from turntree.errors import EngineError

__all__ = ["Message", "TextTokenizer", "estimate", "messages", "turn_ids"]

Message = dict[str, str]
"""``{"role": "system" | "user" | "assistant", "content": text}``"""

_START, _END, _PAD, _HIDDEN = range(4)
_CURE = "make contexts with Dialogue(TextTokenizer(), style='chat')"
_BYTES = 4
"""Bytes of UTF-8 in the stand-in of a token, where no server has counted: about what English text takes."""


class TextTokenizer(ByteTokenizer):
    """Stands in for an unknown tokenizer: an id is a run of UTF-8 bytes, encode and decode are exact inverses.

    ``encode`` packs four bytes into an id, an estimate of the token count; :func:`turn_ids` packs text into a known
    count. Ids below 256 are the border of a message, its end, padding, and a token without text (hidden reasoning).
    """

    eos_token_id = _END
    pad_token_id = _PAD

    def __len__(self) -> int:
        return 1 << (8 * _BYTES + 1)

    def get_added_vocab(self) -> dict[str, int]:
        """Special tokens by text."""
        return {token: i for i, token in enumerate(self.specials)}

    def encode(self, text: str, *, add_special_tokens: bool = False, split_special_tokens: bool = False) -> list[int]:
        """Ids of four bytes each; special tokens are recognised unless ``split_special_tokens``."""
        del add_special_tokens
        if split_special_tokens:
            return _pack(text.encode("utf-8"), -(-len(text.encode("utf-8")) // _BYTES))
        ids: list[int] = []
        while text:
            start, token = min(((text.find(t), t) for t in self.specials if t in text), default=(len(text), ""))
            ids += self.encode(text[:start], split_special_tokens=True)
            if token:
                ids.append(self.specials.index(token))
            text = text[start + len(token) :]
        return ids

    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of ``ids``; a broken character becomes U+FFFD."""
        del clean_up_tokenization_spaces
        specials = [b"" if skip_special_tokens else token.encode() for token in self.specials]
        return b"".join(specials[i] if i < _HIDDEN else _unpack(i) for i in ids).decode("utf-8", errors="replace")


def _pack(data: bytes, count: int) -> list[int]:
    """``data`` in ``count`` ids, of bytes as equal in number as can be; those too many come first and hold nothing."""
    pieces = min(count, len(data))
    cuts = [i * len(data) // pieces for i in range(pieces + 1)] if pieces else [0]
    # The 1 in front keeps leading zero bytes, and ids above 255.
    parts = [int.from_bytes(b"\x01" + data[a:b], "big") for a, b in pairwise(cuts)]
    return [_HIDDEN] * (count - pieces) + parts


def _unpack(i: int) -> bytes:
    return b"" if i < 256 else i.to_bytes((i.bit_length() + 7) // 8, "big")[1:]


def turn_ids(text: str, tokens: int, *, stops: Sequence[str] = ()) -> tuple[int, ...]:
    """A turn as ``tokens`` ids (at least one where there is text); no id reaches over the end of a stop string."""
    data = text.encode("utf-8", "replace")
    tokens = max(tokens, bool(data))
    match = find_stop(text, stops)
    head = len(text[: match[0]].encode("utf-8", "replace")) if match else len(data)
    if head == len(data) or tokens < 2:
        return tuple(_pack(data, tokens))
    first = min(max(1, round(tokens * head / len(data))), tokens - 1)
    return (*_pack(data[:head], first), *_pack(data[head:], tokens - first))


def messages(prefix: Prefix) -> list[Message]:
    """The conversation that a context of a :class:`TextTokenizer` dialogue of style ``chat`` holds.

    Raises ``EngineError`` for ids that are no such conversation.
    """
    found: list[Message] = []
    ids = prefix.token_ids()
    starts = [i for i, token in enumerate(ids) if token == _START]
    for start, stop in pairwise([*starts, len(ids)]):
        part = ids[start + 1 : stop]
        end = part.index(_END) if _END in part else len(part)
        role, border, content = TextTokenizer().decode(part[:end]).partition("\n")
        if not border or role not in ("system", "user", "assistant"):
            raise EngineError(f"expected a message of a chat dialogue, found {role[:40]!r}; {_CURE}")
        found.append({"role": role, "content": content})
    if len(found) < 2 or found[-1] != {"role": "assistant", "content": ""}:
        raise EngineError(f"expected a conversation that ends where the assistant goes on; {_CURE}")
    return found[:-1]


def estimate(text: str) -> int:
    """About how many tokens ``text`` takes."""
    return len(encode(TextTokenizer(), text))
