"""The transcript in token space: token in, token out, append only.

The prompt is tokenised once through the chat template, a turn's tokens are those that were sampled, an observation
is tokenised once, when it is appended. Nothing is decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from turntree.agents.engines.protocol import Generation, Prefix
from turntree.agents.stops import find_stop, tokens_to_stop
from turntree.agents.tokenizer import Tokenizer, decode, encode, end_ids, special_tokens
from turntree.envs.core import Finish
from turntree.errors import ConfigError, EngineError, TemplateError

__all__ = ["Dialogue", "Style", "TemplateReport", "TurnText", "cut_text", "turn_budget"]

Style = Literal["inline", "chat"]
"""``inline``: observations continue the assistant's message (Search-R1); ``chat``: each is a message of the user."""

# Words that no template treats in a special way; the tabs around them show whether contents are trimmed.
_USERS = ("\tQuolmarn one?\t", "\tQuolmarn two?\t", "\tQuolmarn three?\t")
_TURNS = ("\tVastreel one.\t", "\tVastreel two.\t")
_THOUGHT = "<think>Vastreel thought</think>\n\n"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What the probe found. ``text()`` is the line that a run prints and stores.

    ``rewrites``: what the template would change in earlier turns (``thinking``, ``whitespace``, ``history``); such
    a transcript is kept append-only. ``turn_end`` and ``observation_end`` are the boundary ids that ``chat`` adds
    before and after an observation, all with mask 0.
    """

    style: Style
    has_template: bool
    rewrites: tuple[str, ...] = ()
    end_of_turn: int | None = None
    turn_end: tuple[int, ...] = ()
    observation_end: tuple[int, ...] = ()

    def text(self) -> str:
        """One line for people."""
        if not self.has_template:
            return f"dialogue: {self.style}, no chat template: plain text"
        if self.style == "inline":
            return "dialogue: inline, an episode is one message of the assistant: the chat template rewrites nothing"
        if not self.rewrites:
            return "dialogue: chat, the chat template keeps earlier turns as they are"
        return (
            f"dialogue: chat, append-only in training and evaluation alike; the chat template would rewrite earlier "
            f"turns ({', '.join(self.rewrites)})"
        )


@dataclass(frozen=True, slots=True)
class TurnText:
    """A turn as the environment reads it.

    ``text`` ends with the stop string, if one was reached; what the last token holds beyond it (``residue``) stays
    in the context and is never parsed. ``overrun``: the engine went on for whole tokens after the stop string.
    """

    text: str
    finish: Finish
    stop: str | None = None
    residue: str = ""
    overrun: bool = False


@dataclass(frozen=True, slots=True)
class _Template:
    """A chat template as text pieces around the contents of a dialogue."""

    head: str
    generation: str
    between: str
    trims_user: bool
    rewrites: tuple[str, ...]


class Dialogue:
    """Builds the token ids of an episode: prompt once, then observation after observation.

    ``on_rewrite`` says what to do with a template that changes earlier turns when it renders a longer conversation
    (Qwen3 drops their thinking): ``append`` runs it append-only and says so in ``report``, ``refuse`` raises
    :class:`TemplateError`. A tokenizer without a chat template runs ``inline`` on plain text.

    Raises ``TemplateError`` when the template cannot be rendered or taken apart for ``style``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        style: Style = "inline",
        system: str | None = None,
        on_rewrite: Literal["append", "refuse"] = "append",
        generation_config: Any = None,
    ) -> None:
        if style not in ("inline", "chat"):
            raise ConfigError(f"style must be 'inline' or 'chat', found {style!r}")
        if on_rewrite not in ("append", "refuse"):
            raise ConfigError(f"on_rewrite must be 'append' or 'refuse', found {on_rewrite!r}")
        self.tokenizer = tokenizer
        self.style: Style = style
        self.system = system
        self._specials = special_tokens(tokenizer)
        self._template = _probe(tokenizer, system, style=style) if tokenizer.chat_template else None
        self.report = self._make_report()
        self.end_ids = end_ids(tokenizer, generation_config) | {i for i in [self.report.end_of_turn] if i is not None}
        if self.report.rewrites and on_rewrite == "refuse":
            raise TemplateError(
                "expected a chat template that keeps earlier turns, found one that rewrites them "
                f"({', '.join(self.report.rewrites)}); use on_rewrite='append' to run it append-only"
            )

    def _make_report(self) -> TemplateReport:
        template = self._template
        if template is None:
            if self.style == "chat":
                raise TemplateError(
                    "style='chat' needs a tokenizer with a chat template, found none; use style='inline'"
                )
            return TemplateReport(self.style, has_template=False)
        between = encode(self.tokenizer, template.between, allow_special=True)
        end = next((i for i in between if i in self._specials.values()), None)
        if self.style == "inline":
            return TemplateReport(self.style, True, template.rewrites, end)
        generation = encode(self.tokenizer, template.generation, allow_special=True)
        return TemplateReport(self.style, True, template.rewrites, end, between, generation)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Ids of the whole prompt, generation prompt included; ``prompt`` becomes the first message of the user."""
        if self._template is None:
            text = prompt if self.system is None else f"{self.system}\n\n{prompt}"
            return (*_bos(self.tokenizer), *encode(self.tokenizer, text))
        return self._message(self._template.head, prompt, self._template.generation)

    def observation_ids(self, text: str, *, after: Sequence[int]) -> tuple[int, ...]:
        """Ids that the environment adds after a turn whose ids end with ``after``; all of them have mask 0.

        ``inline``: the text alone. ``chat``: the boundary after the turn (without its end-of-turn token if that was
        sampled), the text, and the boundary up to the next turn.
        """
        template = self._template
        if self.style == "inline" or template is None:
            return encode(self.tokenizer, text)
        ids = self._message(template.between, text, template.generation)
        end = self.report.end_of_turn
        if end is None or not after or after[-1] != end:
            return ids
        return ids[ids.index(end) + 1 :]

    def _message(self, head: str, text: str, tail: str) -> tuple[int, ...]:
        """Ids of a message of the user between template texts; special tokens in ``text`` stay plain characters."""
        if self._template is not None and self._template.trims_user:
            text = text.strip()
        if not any(token in text for token in self._specials):
            return encode(self.tokenizer, head + text + tail, allow_special=True)
        parts = ((head, True), (text, False), (tail, True))
        return tuple(i for part, special in parts for i in encode(self.tokenizer, part, allow_special=special))

    def read_turn(self, generation: Generation) -> TurnText:
        """The text of a turn, cut at its stop string; sampled end-of-turn tokens are not part of it.

        Raises ``EngineError`` for an aborted generation, and when the engine names a stop string that its tokens do
        not contain.
        """
        if generation.finish_reason == "abort":
            raise EngineError("expected a finished turn, found an aborted generation; discard it and sample again")
        ids = list(generation.ids)
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        text = decode(self.tokenizer, ids)
        finish: Finish = generation.finish_reason
        stop = generation.stop_string
        if stop is None:
            return TurnText(text, finish)
        match = find_stop(text, (stop,))
        if match is None:
            raise _stripped(stop, text)
        cut = tokens_to_stop(self.tokenizer, ids, (stop,))
        overrun = cut is not None and cut[0] < len(ids)
        return TurnText(text[: match[0]], finish, stop, text[match[0] :], overrun)

    def cut_at_stop(self, generation: Generation, stops: Sequence[str], *, max_tokens: int | None = None) -> Generation:
        """The generation as it should have been: ended by the token that completes a stop string, or at the limit.

        For engines that ignore stop strings or limits. Ids, log-probs and entropies are cut together;
        ``metrics["overrun_tokens"]`` counts what was discarded. A generation that is in order is returned as it is.

        Raises ``EngineError`` when lengths disagree or the engine stripped the stop string from its tokens.
        """
        _check_lengths(generation)
        if generation.finish_reason == "abort":
            return generation
        match = tokens_to_stop(self.tokenizer, generation.ids, stops)
        if match is None and generation.stop_string is not None:
            raise _stripped(generation.stop_string, decode(self.tokenizer, generation.ids))
        limit = len(generation.ids) if max_tokens is None else max_tokens
        if match is not None and match[0] <= limit:
            if match[0] == len(generation.ids) and generation.stop_string == match[1]:
                return generation
            return replace(_cut(generation, match[0]), finish_reason="stop", stop_string=match[1])
        if len(generation.ids) <= limit:
            return generation
        return replace(_cut(generation, limit), finish_reason="length", stop_string=None)


def turn_budget(context_tokens: int, *, max_turn_tokens: int, max_context_tokens: int) -> int:
    """``max_tokens`` of the next turn; 0 means that the context is full and the episode ends (``reason="context"``).

    An observation that fits exactly is kept: only the turn after it finds no room.
    """
    return max(0, min(max_turn_tokens, max_context_tokens - context_tokens))


def cut_text(tokenizer: Tokenizer, text: str, max_tokens: int) -> tuple[str, bool]:
    """The longest beginning of ``text`` of at most ``max_tokens`` tokens, and whether anything was cut.

    The cut falls between characters, so that no multi-byte character is split.
    """
    if len(encode(tokenizer, text)) <= max_tokens:
        return text, False
    low, high = 0, len(text)
    while low + 1 < high:
        middle = (low + high) // 2
        if len(encode(tokenizer, text[:middle])) <= max_tokens:
            low = middle
        else:
            high = middle
    while low and len(encode(tokenizer, text[:low])) > max_tokens:
        low -= 1
    return text[:low], True


def _cut(generation: Generation, n: int) -> Generation:
    """The first ``n`` tokens of a generation; ids, log-probs and entropies together."""
    ids = generation.ids[:n]
    return replace(
        generation,
        ids=ids,
        logprobs=generation.logprobs[:n],
        entropies=generation.entropies[:n],
        continuation=Prefix(ids, generation.continuation.parent),
        metrics={**generation.metrics, "overrun_tokens": float(len(generation.ids) - n)},
    )


def _check_lengths(generation: Generation) -> None:
    n = len(generation.ids)
    if len(generation.logprobs) != n or len(generation.entropies) not in (0, n):
        raise EngineError(
            f"expected one log-prob (and one or no entropy) per token, found {n} tokens, {len(generation.logprobs)} "
            f"log-probs and {len(generation.entropies)} entropies; the engine breaks the contract"
        )
    if generation.continuation.ids != generation.ids:
        raise EngineError(
            f"expected a continuation that adds the {n} generated tokens to the prefix, found one that adds "
            f"{len(generation.continuation.ids)} others; the engine breaks the contract"
        )


def _stripped(stop: str, text: str) -> EngineError:
    return EngineError(
        f"the engine says it stopped at {stop!r}, but its tokens end with {text[-40:]!r}: it strips stop strings; "
        "switch that off (vLLM: include_stop_str_in_output=True), sampled ids must stay whole"
    )


def _bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The beginning-of-text token, if the tokenizer itself starts every text with it."""
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer.encode("a", add_special_tokens=True)[:1]
    return (bos,) if bos is not None and list(first) == [bos] else ()


# The template probe ------------------------------------------------------------------------------------------------


def _probe(tokenizer: Tokenizer, system: str | None, *, style: Style) -> _Template:
    """Take the template apart by rendering one-, two- and three-turn dialogues of marked contents."""
    one = _render(tokenizer, system, _USERS[:1])
    user = next((u for u in (_USERS[0], _USERS[0].strip()) if one.count(u) == 1), None)
    if user is None:
        raise TemplateError(
            f"expected the chat template to show the user's text once, found {one!r}; use a template that does"
        )
    head, generation = one.split(user)
    if style == "inline":
        return _Template(head, generation, _between_inline(tokenizer, system), user != _USERS[0], ())
    # Empty renderings of a first turn differ from later ones in some templates: the second boundary must agree.
    two = _render(tokenizer, system, _USERS[:2], _TURNS[:1])
    three = _render(tokenizer, system, _USERS, _TURNS)
    first = _boundary(two, _TURNS[0], _USERS[1])
    second = _boundary(three, _TURNS[1], _USERS[2])
    if first != second or not three.endswith(generation):
        raise TemplateError(
            f"expected the same text between a turn and the next message everywhere, found {first!r} after the first "
            f"turn and {second!r} after the second; use style='inline' or a regular template"
        )
    return _Template(head, generation, first, user != _USERS[0], _rewrites(tokenizer, system, one, three))


def _render(tokenizer: Tokenizer, system: str | None, users: Sequence[str], turns: Sequence[str] = ()) -> str:
    """Text of the dialogue user, turn, user, ... with a generation prompt."""
    messages: list[Mapping[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    for i, user in enumerate(users):
        messages.append({"role": "user", "content": user})
        if i < len(turns):
            messages.append({"role": "assistant", "content": turns[i]})
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # Templates are programs: they raise jinja errors, type errors, and their own.
        raise TemplateError(
            f"the chat template cannot render messages of roles {[m['role'] for m in messages]}: {error}; use "
            " style='inline', leave system out, or use another template"
        ) from error


def _between_inline(tokenizer: Tokenizer, system: str | None) -> str:
    """The text after a turn, from which the end-of-turn token is read; empty when the template cannot say."""
    try:
        return _boundary(_render(tokenizer, system, _USERS[:2], _TURNS[:1]), _TURNS[0], _USERS[1])
    except TemplateError:
        return ""


def _boundary(text: str, turn: str, user: str) -> str:
    """What the template puts between a turn and the next message of the user, white space of contents left out."""
    start, end = text.find(turn.strip()), text.find(user.strip())
    if start < 0 or end < start:
        raise TemplateError(
            f"expected {turn.strip()!r} before {user.strip()!r} in the rendered dialogue, found {text!r}"
        )
    between = text[start + len(turn.strip()) : end]
    between = between.removeprefix(turn[len(turn.rstrip()) :])
    return between.removesuffix(user[: len(user) - len(user.lstrip())])


def _rewrites(tokenizer: Tokenizer, system: str | None, one: str, three: str) -> tuple[str, ...]:
    """What a longer rendering changes in earlier turns."""
    found: list[str] = []
    thinking = _render(tokenizer, system, _USERS, [_THOUGHT + turn.strip() for turn in _TURNS])
    if any(_THOUGHT + turn.strip() not in thinking for turn in _TURNS):
        found.append("thinking")
    if any(turn not in three for turn in _TURNS):
        found.append("whitespace")
    if not three.startswith(one):
        found.append("history")
    return tuple(found)
