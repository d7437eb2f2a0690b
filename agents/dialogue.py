"""The transcript in token space: token in, token out, append only.

The prompt is tokenised once through the chat template, a turn's tokens are those that were sampled, an observation
is tokenised once, when it is appended. Nothing is decoded and encoded again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from turntree.agents.engines.protocol import Generation, Prefix
from turntree.agents.stops import find_stop, tokens_to_stop
from turntree.agents.tokenizer import Tokenizer, decode, encode, end_ids, special_tokens
from turntree.envs.core import Finish
from turntree.errors import ConfigError, EngineError, TemplateError

__all__ = ["Dialogue", "Style", "TemplateReport", "TurnText", "cut_text", "turn_budget"]

Style = Literal["inline", "chat", "tools"]
"""``inline``: observations continue the assistant's message (Search-R1); ``chat``: each is a message of the user;
``tools``: results of tools are messages of role ``tool``, every other observation is one of the user."""

# Words that no template treats in a special way; the tabs around them show whether contents are trimmed.
_USERS = ("\tQuolmarn one?\t", "\tQuolmarn two?\t", "\tQuolmarn three?\t")
_TURNS = ("\tVastreel one.\t", "\tVastreel two.\t")
_THOUGHT = "<think>Vastreel thought</think>\n\n"
# Texts whose ids a dialogue keeps; of 500 tokens each they take 20 MB at most.
_REMEMBERED = 1024
# A result as HermesGrammar writes it; what it holds is data without such tags.
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>\n?", re.DOTALL)


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
            return f"dialogue: {self.style}, the chat template keeps earlier turns as they are"
        return (
            f"dialogue: {self.style}, append-only in training and evaluation alike; the chat template would rewrite "
            f"earlier turns ({', '.join(self.rewrites)})"
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
    results: _Results | None = None


@dataclass(frozen=True, slots=True)
class _Results:
    """Template texts around messages of role ``tool``: after a turn, between two, after the last, before a user's."""

    head: str
    between: str
    tail: str
    to_user: str
    trims: bool


class Dialogue:
    """Builds the token ids of an episode: prompt once, then observation after observation.

    ``on_rewrite`` says what to do with a template that changes earlier turns when it renders a longer conversation
    (Qwen3 drops their thinking): ``append`` runs it append-only and says so in ``report``, ``refuse`` raises
    :class:`TemplateError`. A tokenizer without a chat template runs ``inline`` on plain text. ``tools``: schemas that
    the template lists in its own way (``HermesGrammar.functions()``, with ``schemas="template"`` there).

    Raises ``TemplateError`` when the template cannot be rendered or taken apart for ``style``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        style: Style = "inline",
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        on_rewrite: Literal["append", "refuse"] = "append",
        generation_config: Any = None,
    ) -> None:
        if style not in get_args(Style):
            raise ConfigError(f"style must be one of {', '.join(map(repr, get_args(Style)))}, found {style!r}")
        if tools and not tokenizer.chat_template:
            raise TemplateError("tools= are listed by a chat template, found none; let the grammar list them")
        if on_rewrite not in ("append", "refuse"):
            raise ConfigError(f"on_rewrite must be 'append' or 'refuse', found {on_rewrite!r}")
        self.tokenizer = tokenizer
        self.style: Style = style
        self.system = system
        self._encode = _remembering(tokenizer)
        self._specials = special_tokens(tokenizer)
        self._template = _probe(_Frame(tokenizer, system, tuple(tools)), style) if tokenizer.chat_template else None
        self.report = self._make_report()
        self.end_ids = end_ids(tokenizer, generation_config) | {i for i in [self.report.end_of_turn] if i is not None}
        if self.report.rewrites and on_rewrite == "refuse":
            raise TemplateError(
                "expected a chat template that keeps earlier turns, found one that rewrites them "
                f"({', '.join(self.report.rewrites)}); use on_rewrite='append' to run it append-only"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_encode"}  # it cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._encode = _remembering(self.tokenizer)

    def _make_report(self) -> TemplateReport:
        template = self._template
        if template is None:
            if self.style != "inline":
                raise TemplateError(
                    f"style={self.style!r} needs a tokenizer with a chat template, found none; use style='inline'"
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
        sampled), the text, and the boundary up to the next turn. ``tools``: the same, results in messages of their own.
        """
        template = self._template
        if self.style == "inline" or template is None:
            return self._encode(text)
        results = _RESULT.findall(text) if template.results and text.startswith("<tool_response>\n") else []
        if results and template.results:
            ids = self._results(template.results, results, _RESULT.sub("", text).strip(), template)
        else:
            ids = self._message(template.between, text, template.generation)
        end = self.report.end_of_turn
        if end is None or not after or after[-1] != end:
            return ids
        return ids[ids.index(end) + 1 :]

    def _message(self, head: str, text: str, tail: str) -> tuple[int, ...]:
        """Ids of a message of the user between template texts."""
        if self._template is not None and self._template.trims_user:
            text = text.strip()
        return self._ids((head, text, tail))

    def _results(self, around: _Results, results: Sequence[str], rest: str, template: _Template) -> tuple[int, ...]:
        """Ids of messages of role ``tool``, and of one of the user where there is a ``rest``."""
        parts = [around.head]
        for i, result in enumerate(results):
            last = around.to_user if rest else around.tail
            parts += [result.strip() if around.trims else result, around.between if i + 1 < len(results) else last]
        return self._ids((*parts, rest, template.generation) if rest else tuple(parts))

    def _ids(self, parts: Sequence[str]) -> tuple[int, ...]:
        """Ids of texts in turn of the template and of data; special tokens in data stay plain characters."""
        if not any(token in data for data in parts[1::2] for token in self._specials):
            return self._encode("".join(parts), allow_special=True)
        return tuple(i for n, part in enumerate(parts) for i in self._encode(part, allow_special=n % 2 == 0))

    def written_ids(self, text: str, stops: Sequence[str]) -> tuple[int, ...]:
        """Ids of a turn that somebody wrote, with what ends it: a stop string, else the end-of-turn token."""
        ids = encode(self.tokenizer, text)
        if text.endswith(tuple(stops)):
            return ids
        end = self.report.end_of_turn if self.report.end_of_turn is not None else self.tokenizer.eos_token_id
        return ids if end is None else (*ids, int(end))

    def finish_turn(
        self, generation: Generation, stops: Sequence[str], *, max_tokens: int | None = None
    ) -> tuple[Generation, TurnText]:
        """:meth:`cut_at_stop`, then :meth:`read_turn` of what was kept; raises as they do."""
        _check_lengths(generation)
        if generation.finish_reason == "abort":
            raise _aborted()
        text = decode(self.tokenizer, generation.ids)
        kept = self._cut(generation, text, stops, max_tokens)
        return kept, self._read(kept, text if kept is generation else None, overrun=False)

    def read_turn(self, generation: Generation) -> TurnText:
        """The text of a turn, cut at its stop string; sampled end-of-turn tokens are not part of it.

        Raises ``EngineError`` for an aborted generation, and when the engine names a stop string that its tokens do
        not contain.
        """
        return self._read(generation, None, overrun=None)

    def _read(self, generation: Generation, text: str | None, *, overrun: bool | None) -> TurnText:
        """``text``: of all ids, ``overrun``: whether the engine went on after its stop string, where they are known."""
        if generation.finish_reason == "abort":
            raise _aborted()
        length = len(generation.ids)
        while length and generation.ids[length - 1] in self.end_ids:
            length -= 1
        ids = generation.ids[:length]
        if text is None or length < len(generation.ids):
            text = decode(self.tokenizer, ids)
        finish: Finish = generation.finish_reason
        stop = generation.stop_string
        if stop is None:
            return TurnText(text, finish)
        match = find_stop(text, (stop,))
        if match is None:
            raise _stripped(stop, text)
        if overrun is None:
            overrun = find_stop(decode(self.tokenizer, ids[:-1]), (stop,)) is not None
        return TurnText(text[: match[0]], finish, stop, text[match[0] :], overrun)

    def cut_at_stop(self, generation: Generation, stops: Sequence[str], *, max_tokens: int | None = None) -> Generation:
        """The generation as it should have been: ended by the token that completes a stop string, or at the limit.

        For engines that ignore stop strings or limits. Ids, log-probs and entropies are cut together;
        ``metrics["overrun_tokens"]`` counts what was discarded. A generation that is in order is returned as it is.

        Raises ``EngineError`` when lengths disagree or the engine stripped the stop string from its tokens.
        """
        _check_lengths(generation)
        return generation if generation.finish_reason == "abort" else self._cut(generation, None, stops, max_tokens)

    def _cut(
        self, generation: Generation, text: str | None, stops: Sequence[str], max_tokens: int | None
    ) -> Generation:
        """``text``: of all ids, where it is known."""
        match = tokens_to_stop(self.tokenizer, generation.ids, stops, text=text)
        if match is None and generation.stop_string is not None:
            raise _stripped(generation.stop_string, decode(self.tokenizer, generation.ids))
        limit = len(generation.ids) if max_tokens is None else max_tokens
        if match is not None and match[0] <= limit:
            if match[0] == len(generation.ids) and generation.stop_string == match[1]:
                return generation
            return replace(_first(generation, match[0]), finish_reason="stop", stop_string=match[1])
        if len(generation.ids) <= limit:
            return generation
        return replace(_first(generation, limit), finish_reason="length", stop_string=None)


def _remembering(tokenizer: Tokenizer) -> Callable[..., tuple[int, ...]]:
    """``encode`` with a memory: trajectories of one prompt ask the same, so four in ten observations come again."""
    return functools.lru_cache(maxsize=_REMEMBERED)(functools.partial(encode, tokenizer))


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


def _first(generation: Generation, n: int) -> Generation:
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


def _aborted() -> EngineError:
    return EngineError("expected a finished turn, found an aborted generation; discard it and sample again")


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


@dataclass(frozen=True, slots=True)
class _Frame:
    """What every rendering of a template has in common."""

    tokenizer: Tokenizer
    system: str | None
    tools: tuple[Mapping[str, Any], ...] = ()

    def render(self, users: Sequence[str], turns: Sequence[str] = (), *, roles: Sequence[str] = ()) -> str:
        """Text of the dialogue user, turn, user, ... with a generation prompt; ``roles`` of all but the first user."""
        messages = [("user", users[0]), *zip(roles or ["user"] * len(users[1:]), users[1:], strict=True)]
        for i, turn in enumerate(turns):
            messages.insert(2 * i + 1, ("assistant", turn))
        return self.written(messages)

    def written(self, messages: Sequence[tuple[str, str]]) -> str:
        """Text of messages, each a role and its content, after the system's."""
        first = [] if self.system is None else [("system", self.system)]
        said = [{"role": role, "content": content} for role, content in (*first, *messages)]
        more = {"tools": [dict(tool) for tool in self.tools]} if self.tools else {}
        try:
            made = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True, **more)
        except Exception as error:  # Templates are programs: they raise jinja errors, type errors, and their own.
            raise TemplateError(
                f"the chat template cannot render messages of roles {[m['role'] for m in said]}"
                f"{' with tools' if self.tools else ''}: {error}; use style='inline', leave system or tools out, or "
                "use another template"
            ) from error
        return str(made)


def _probe(frame: _Frame, style: Style) -> _Template:
    """Take the template apart by rendering one-, two- and three-turn dialogues of marked contents."""
    one = frame.render(_USERS[:1])
    user = next((u for u in (_USERS[0], _USERS[0].strip()) if one.count(u) == 1), None)
    if user is None:
        raise TemplateError(
            f"expected the chat template to show the user's text once, found {one!r}; use a template that does"
        )
    head, generation = one.split(user)
    if style == "inline":
        return _Template(head, generation, _between_inline(frame), user != _USERS[0], ())
    # Empty renderings of a first turn differ from later ones in some templates: the second boundary must agree.
    two = frame.render(_USERS[:2], _TURNS[:1])
    three = frame.render(_USERS, _TURNS)
    first = _boundary(two, _TURNS[0], _USERS[1])
    second = _boundary(three, _TURNS[1], _USERS[2])
    if first != second or not three.endswith(generation):
        raise TemplateError(
            f"expected the same text between a turn and the next message everywhere, found {first!r} after the first "
            f"turn and {second!r} after the second; use style='inline' or a regular template"
        )
    roles = ("tool", "tool") if style == "tools" else ("user", "user")
    rewrites = _rewrites(frame, one, roles)
    results = _probe_results(frame, generation) if style == "tools" else None
    return _Template(head, generation, first, user != _USERS[0], rewrites, results)


def _probe_results(frame: _Frame, generation: str) -> _Results:
    """The texts around messages of role ``tool``, from dialogues with one and two of them."""
    start: list[tuple[str, str]] = [("user", _USERS[0]), ("assistant", _TURNS[0])]
    one = frame.written([*start, ("tool", _USERS[1])])
    trims = _USERS[1] not in one
    first, second = (u.strip() if trims else u for u in _USERS[1:])
    two = frame.written([*start, ("tool", _USERS[1]), ("tool", _USERS[2])])
    then = frame.written([*start, ("tool", _USERS[1]), ("user", _USERS[2])])
    if any(text.count(first) != 1 for text in (one, two, then)) or two.count(second) != 1:
        raise TemplateError(
            f"expected the chat template to show a result of role 'tool' once, found {one!r}; use 'chat'"
        )
    head, tail = _boundary(one, _TURNS[0], _USERS[1]), one.partition(first)[2]
    found = _Results(head, _cut_out(two, first, second), tail, _cut_out(then, first, _USERS[2].strip()), trims)
    if not two.endswith(second + tail) or not then.endswith(generation) or not tail.endswith(generation):
        raise TemplateError(
            f"expected the same text after every result of a tool, found {tail!r} after one; use style='chat'"
        )
    return replace(found, to_user=found.to_user.removesuffix("\t"))


def _cut_out(text: str, before: str, after: str) -> str:
    """What stands between two contents."""
    rest = text.partition(before)[2]
    if after not in rest:
        raise TemplateError(f"expected {after!r} after {before!r} in the rendered dialogue, found {text!r}")
    return rest.partition(after)[0]


def _between_inline(frame: _Frame) -> str:
    """The text after a turn, from which the end-of-turn token is read; empty when the template cannot say."""
    try:
        return _boundary(frame.render(_USERS[:2], _TURNS[:1]), _TURNS[0], _USERS[1])
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


def _rewrites(frame: _Frame, one: str, roles: Sequence[str]) -> tuple[str, ...]:
    """What a longer rendering changes in earlier turns."""
    found: list[str] = []
    three = frame.render(_USERS, _TURNS, roles=roles)
    thinking = frame.render(_USERS, [_THOUGHT + turn.strip() for turn in _TURNS], roles=roles)
    if any(_THOUGHT + turn.strip() not in thinking for turn in _TURNS):
        found.append("thinking")
    if any(turn not in three for turn in _TURNS):
        found.append("whitespace")
    if not three.startswith(one):
        found.append("history")
    return tuple(found)
