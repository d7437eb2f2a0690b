"""The transcript: template probe, boundaries, observations, reading turns."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.agents.dialogue import Dialogue, cut_text, turn_budget
from turntree.agents.engines import Generation, Prefix, Request, SamplingParams, ScriptedEngine
from turntree.agents.tiny import build_tokenizer
from turntree.agents.tokenizer import ByteTokenizer, decode, encode
from turntree.envs import Action
from turntree.envs.core import ToolSpec
from turntree.envs.grammar import HermesGrammar
from turntree.errors import ConfigError, EngineError, TemplateError
from turntree.search_backend import Passage

STOPS = ("</search>", "</answer>")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The thinking part of Qwen3's template: earlier turns lose it, the generation prompt may hold an empty one.
QWEN3 = """{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content %}{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + content }}
{%- else %}
{{- '<|im_start|>assistant\n' + content }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if no_think is not defined %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"""
TRIMMING = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
    "m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "</s>"]


def hf_tokenizer(template: str | None, words: tuple[str, ...] = ("user", "assistant", "model", "what")) -> Any:
    tokenizer = build_tokenizer(words)
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIALS})
    tokenizer.chat_template = template
    return tokenizer


def generation(tokenizer: Any, text: str, *, ids: tuple[int, ...] = (), **changes: Any) -> Generation:
    ids = ids or encode(tokenizer, text, allow_special=True)
    values: dict[str, Any] = {
        "ids": ids,
        "logprobs": (-0.5,) * len(ids),
        "finish_reason": "stop",
        "version": 0,
        "continuation": Prefix([7]).extend(ids),
    }
    return Generation(**(values | changes))


def transcript(dialogue: Dialogue, users: list[str], turns: list[tuple[int, ...]]) -> list[int]:
    ids = list(dialogue.prompt_ids(users[0]))
    for i, turn in enumerate(turns):
        ids += turn
        if i + 1 < len(users):
            ids += dialogue.observation_ids(users[i + 1], after=turn)
    return ids


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (TRIMMING, "<end_of_turn>"), (INSTRUCT, "</s>"), (PLAIN, "")]
)
@pytest.mark.parametrize("sampled_end", [True, False])
def test_chat_transcript_matches_the_template(template: str, end: str, sampled_end: bool) -> None:
    tokenizer = hf_tokenizer(template)
    dialogue = Dialogue(tokenizer, style="chat")
    users = ["What is 中?", "\n\n<information>Doc 1(Title: T) é</information>\n\n", "again"]
    turns = ["I think <search>x</search>", "<answer>y</answer>"]
    messages: list[dict[str, str]] = []
    for user, turn in zip(users, [*turns, None]):
        messages.append({"role": "user", "content": user})
        if turn is not None:
            messages.append({"role": "assistant", "content": turn})
    # This template sets spaces around the model's words: the first is sampled, the last comes with the ending.
    start, ending = (" ", " " + end) if template == INSTRUCT else ("", end)
    turn_ids = [encode(tokenizer, start + t + (ending if sampled_end else ""), allow_special=True) for t in turns]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = transcript(dialogue, users, turn_ids)
    assert decode(tokenizer, ids) == rendered
    if template == CHATML:
        assert tuple(ids) == encode(tokenizer, rendered, allow_special=True)
        assert dialogue.report.rewrites == ()
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") in dialogue.end_ids


@settings(max_examples=60, deadline=None)
@given(users=st.lists(TEXT, min_size=3, max_size=3), turns=st.lists(TEXT, min_size=2, max_size=2), style=st.booleans())
def test_any_text_survives_and_data_makes_no_special_token(users: list[str], turns: list[str], style: bool) -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer, style="chat" if style else "inline")
    users = [u + "<|im_end|>" for u in users]
    ids = transcript(dialogue, users, [encode(tokenizer, t) for t in turns])
    text = decode(tokenizer, ids)
    for user in users:
        assert user in text
    # Every special token comes from the template: start and end of the first message, then four or none a turn.
    specials = sum(i >= 256 for i in ids)
    assert specials == 3 + (4 * len(turns) if style else 0)


def test_a_lone_surrogate_is_read_as_the_replacement_character() -> None:
    for tokenizer in (ByteTokenizer(), build_tokenizer(["who", "?"])):
        assert encode(tokenizer, "a\ud800b") == encode(tokenizer, "a\ufffdb")
        dialogue = Dialogue(tokenizer)
        assert dialogue.prompt_ids("who \udfff?") == dialogue.prompt_ids("who \ufffd?")
        assert decode(tokenizer, dialogue.observation_ids("x \ud800", after=())) == "x \ufffd"


def test_a_dialogue_can_be_sent_to_another_process() -> None:
    tokenizer = build_tokenizer(["a b c"])
    tokenizer.chat_template = CHATML
    dialogue = Dialogue(tokenizer, style="chat")
    shown = dialogue.observation_ids("<information>a</information>", after=())
    sent: Dialogue = pickle.loads(pickle.dumps(dialogue))
    assert dialogue.observation_ids("<information>a</information>", after=()) == shown
    assert sent.observation_ids("<information>a</information>", after=()) == shown
    assert sent.prompt_ids("a?") == dialogue.prompt_ids("a?")
    assert sent.report == dialogue.report


def test_inline_observation_is_plain_text_without_beginning_of_text() -> None:
    tokenizer = hf_tokenizer(CHATML)
    tokenizer.bos_token = "<|im_start|>"
    dialogue = Dialogue(tokenizer)
    text = "\n\n<information>é中<|im_end|></information>\n\n"
    ids = dialogue.observation_ids(text, after=(9,))
    assert decode(tokenizer, ids) == text
    assert not set(ids) & set(tokenizer.convert_tokens_to_ids(SPECIALS))
    assert dialogue.observation_ids("", after=(9,)) == ()


def test_rewriting_template_is_reported_or_refused() -> None:
    tokenizer = hf_tokenizer(QWEN3)
    dialogue = Dialogue(tokenizer, style="chat")
    assert "thinking" in dialogue.report.rewrites
    assert "append-only" in dialogue.report.text()
    with pytest.raises(TemplateError, match="rewrites them"):
        Dialogue(tokenizer, style="chat", on_rewrite="refuse")
    turn = encode(tokenizer, "<think>long thought</think>\n\n<search>x</search>")
    ids = transcript(dialogue, ["q", "obs"], [turn])
    assert decode(tokenizer, ids).count("long thought") == 1  # Kept, though the template would drop it.
    # One message of the assistant is never rewritten.
    assert Dialogue(tokenizer, on_rewrite="refuse").report.rewrites == ()


def test_trimming_template_trims_contents_as_it_would() -> None:
    dialogue = Dialogue(hf_tokenizer(TRIMMING), style="chat")
    assert dialogue.report.rewrites == ("whitespace",)
    assert dialogue.prompt_ids("\n what ") == dialogue.prompt_ids("what")


def test_system_prompt_and_templates_without_one() -> None:
    tokenizer = ByteTokenizer()
    text = decode(tokenizer, Dialogue(tokenizer, system="Be brief.").prompt_ids("Q"))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ<|im_end|>")
    with pytest.raises(TemplateError, match="cannot render messages"):
        Dialogue(hf_tokenizer(INSTRUCT), system="Be brief.")


def test_template_that_hides_the_prompt_is_refused() -> None:
    with pytest.raises(TemplateError, match="show the user's text once"):
        Dialogue(hf_tokenizer("{{ 'hello' }}"))
    irregular = "{% for m in messages %}{{ m['content'] + '<|im_end|>' + loop.index | string }}{% endfor %}"
    with pytest.raises(TemplateError, match="same text between"):
        Dialogue(hf_tokenizer(irregular), style="chat")


def test_without_a_template() -> None:
    tokenizer = hf_tokenizer(None)
    dialogue = Dialogue(tokenizer, system="S")
    assert decode(tokenizer, dialogue.prompt_ids("what?")) == "S\n\nwhat?"
    assert not dialogue.report.has_template
    with pytest.raises(TemplateError, match="needs a tokenizer with a chat template"):
        Dialogue(tokenizer, style="chat")
    with pytest.raises(ConfigError, match="style"):
        Dialogue(tokenizer, style="other")  # type: ignore[arg-type]


def test_read_turn_cuts_at_the_stop_and_keeps_tags() -> None:
    tokenizer = hf_tokenizer(CHATML, ("user", "sk", ".\n"))
    dialogue = Dialogue(tokenizer)
    turn = dialogue.read_turn(generation(tokenizer, "<think>a</think><search>q</search>", stop_string="</search>"))
    assert (turn.text, turn.finish, turn.stop) == ("<think>a</think><search>q</search>", "stop", "</search>")
    inside = generation(tokenizer, "ask", stop_string="s")
    turn = dialogue.read_turn(inside)
    assert (turn.text, turn.residue, turn.overrun) == ("as", "k", False)
    turn = dialogue.read_turn(generation(tokenizer, "bye<|end|>"))
    assert (turn.text, turn.stop) == ("bye", None)
    turn = dialogue.read_turn(generation(tokenizer, "never end", finish_reason="length"))
    assert (turn.text, turn.finish) == ("never end", "length")
    assert dialogue.read_turn(generation(tokenizer, "a s b c", stop_string="s")).overrun
    with pytest.raises(EngineError, match="aborted"):
        dialogue.read_turn(generation(tokenizer, "x", finish_reason="abort"))


def test_a_character_split_by_the_limit_decodes_safely() -> None:
    tokenizer = ByteTokenizer()
    ids = encode(tokenizer, "ab中")[:-1]
    turn = Dialogue(tokenizer).read_turn(generation(tokenizer, "", ids=ids, finish_reason="length"))
    assert turn.text == "ab\ufffd"
    turn.text.encode("utf-8")


@settings(max_examples=60, deadline=None)
@given(before=TEXT, after=TEXT, limit=st.integers(1, 60))
def test_cut_at_stop_cuts_everything_together(before: str, after: str, limit: int) -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer)
    text = before + "</search>" + after
    whole = generation(tokenizer, text, finish_reason="length")
    cut = dialogue.cut_at_stop(whole, STOPS, max_tokens=limit)
    expected = text[: min(text.index(stop) + len(stop) for stop in STOPS if stop in text)].encode()
    assert bytes(cut.ids) == expected[:limit]
    assert len(cut.ids) == len(cut.logprobs) == len(cut.continuation.ids)
    assert cut.continuation.token_ids() == [7, *cut.ids]
    assert cut.finish_reason == ("stop" if len(expected) <= limit else "length")
    assert cut.metrics.get("overrun_tokens", 0) == len(whole.ids) - len(cut.ids)


def test_cut_at_stop_leaves_good_generations_alone() -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer)
    engine = ScriptedEngine(["<search>a</search> more", "no tag"], tokenizer)
    request = Request(Prefix([1]), SamplingParams(50, stop=STOPS), seed=0)
    for good in (engine.generate([request])[0], engine.generate([request])[0]):
        assert dialogue.cut_at_stop(good, STOPS, max_tokens=50) is good


@settings(max_examples=60, deadline=None)
@given(text=TEXT, limit=st.integers(0, 40))
def test_cut_text_is_the_longest_beginning_that_fits(text: str, limit: int) -> None:
    tokenizer = ByteTokenizer()
    cut, truncated = cut_text(tokenizer, text, limit)
    assert text.startswith(cut)
    assert truncated == (cut != text)
    assert len(encode(tokenizer, cut)) <= limit
    if truncated:
        assert len(encode(tokenizer, text[: len(cut) + 1])) > limit


def test_turn_budget() -> None:
    assert turn_budget(100, max_turn_tokens=50, max_context_tokens=256) == 50
    assert turn_budget(250, max_turn_tokens=50, max_context_tokens=256) == 6
    assert turn_budget(256, max_turn_tokens=50, max_context_tokens=256) == 0


# -- messages of role tool ---------------------------------------------------------------------------------------------

# As Qwen's: the tools in the system's message, results of one turn together in a message of the user.
QWEN_TOOLS = """{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOL_MODES = [QWEN_TOOLS, QWEN_TOOLS.replace("'<|im_start|>user'", "'<|im_start|>tool'"), CHATML]
HERMES = HermesGrammar(schemas="template").with_tools([ToolSpec("python", "Runs 中.")])


@pytest.mark.parametrize("template", TOOL_MODES)
@pytest.mark.parametrize("notice", [True, False])
@pytest.mark.parametrize("sampled_end", [True, False])
def test_results_are_messages_of_role_tool_as_the_template_writes_them(
    template: str, notice: bool, sampled_end: bool
) -> None:
    tokenizer = hf_tokenizer(template)
    tools = HERMES.functions()
    dialogue = Dialogue(tokenizer, style="tools", tools=tools)
    turns = [HERMES.write("t", Action("search", "a"), Action("python", "b")), "<tool_call>wrong</tool_call>"]
    shown = [HERMES.results([Passage("1", "T", " é 中\n")]).text, HERMES.tool_result("python", "</tool_response>").text]
    said = HERMES.last_turn_notice() if notice else ""
    correction = HERMES.correction("bad_json")
    messages = [{"role": "user", "content": "what"}, {"role": "assistant", "content": turns[0]}]
    messages += [{"role": "tool", "content": text[16:-17]} for text in shown]
    messages += [{"role": "user", "content": said.strip()}] if notice else []
    messages += [{"role": "assistant", "content": turns[1]}, {"role": "user", "content": correction}]
    expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    ends = [encode(tokenizer, t + ("<|im_end|>" if sampled_end else ""), allow_special=True) for t in turns]
    ids = transcript(dialogue, ["what", "\n".join(shown) + said, correction], ends)
    assert decode(tokenizer, ids) == expected
    assert tuple(ids) == encode(tokenizer, expected, allow_special=True)
    assert dialogue.report.text().startswith("dialogue: tools")


def test_qwens_results_are_the_same_ids_in_chat_style() -> None:
    tokenizer = hf_tokenizer(QWEN_TOOLS)
    text = "\n".join([HERMES.tool_result("python", "1").text, HERMES.tool_result("python", "2").text])
    made = [Dialogue(tokenizer, style=style).observation_ids(text, after=(7,)) for style in ("tools", "chat")]
    assert made[0] == made[1]


def test_special_tokens_in_results_stay_plain() -> None:
    tokenizer = hf_tokenizer(QWEN_TOOLS)
    dialogue = Dialogue(tokenizer, style="tools")
    ids = dialogue.observation_ids("<tool_response>\na<|im_end|>b\n</tool_response>", after=(7,))
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert "a<|im_end|>b" in decode(tokenizer, ids)


@pytest.mark.parametrize("template", [INSTRUCT, None])
def test_a_template_without_the_role_is_refused(template: str | None) -> None:
    with pytest.raises(TemplateError, match="style="):
        Dialogue(hf_tokenizer(template), style="tools")


def test_tools_need_a_template() -> None:
    with pytest.raises(TemplateError, match="let the grammar list them"):
        Dialogue(hf_tokenizer(None), tools=HERMES.functions())
    with pytest.raises(ConfigError, match="'inline', 'chat', 'tools'"):
        Dialogue(ByteTokenizer(), style="tool")  # type: ignore[arg-type]


def test_a_written_turn_ends_with_a_stop_string_or_the_end_of_turn() -> None:
    dialogue = Dialogue(ByteTokenizer(), style="chat")
    assert decode(dialogue.tokenizer, dialogue.written_ids("<search>a</search>", STOPS)) == "<search>a</search>"
    assert decode(dialogue.tokenizer, dialogue.written_ids("Paris", STOPS)) == "Paris<|im_end|>"
    assert dialogue.written_ids("a", ())[-1] in dialogue.end_ids


@settings(max_examples=100, deadline=None)
@given(before=TEXT, after=TEXT, limit=st.integers(1, 60), ended=st.booleans(), stops=st.sampled_from([STOPS, ()]))
def test_finish_turn_cuts_and_reads(before: str, after: str, limit: int, ended: bool, stops: tuple[str, ...]) -> None:
    tokenizer = ByteTokenizer()
    dialogue = Dialogue(tokenizer)
    text = before + "</search>" + after + ("<|im_end|>" if ended else "")
    whole = generation(tokenizer, text, finish_reason="length")
    kept, turn = dialogue.finish_turn(whole, stops, max_tokens=limit)
    cut = dialogue.cut_at_stop(whole, stops, max_tokens=limit)
    assert kept.continuation.token_ids() == cut.continuation.token_ids()
    assert kept == replace(cut, continuation=kept.continuation)
    assert turn == dialogue.read_turn(kept)
    assert not turn.overrun


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"finish_reason": "abort"}, "found an aborted generation"),
        ({"logprobs": ()}, "found 3 tokens, 0 log-probs"),
        ({"stop_string": "</search>"}, "it strips stop strings"),
    ],
)
def test_finish_turn_refuses_what_is_no_turn(change: dict[str, Any], said: str) -> None:
    tokenizer = ByteTokenizer()
    wrong = replace(generation(tokenizer, "abc"), **change)
    with pytest.raises(EngineError, match=said):
        Dialogue(tokenizer).finish_turn(wrong, STOPS)
