"""What the grammars say, by language: prompts, frames of results, corrections, notices. Tags are the same in all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ATPO",
    "HERMES",
    "NOTHING_FOUND",
    "NO_OUTPUT",
    "SHARED",
    "TAGS",
    "AtpoWords",
    "HermesWords",
    "Language",
    "Shared",
    "TagWords",
    "fill",
]

Language = Literal["en", "zh"]
"""Languages of prompts, corrections and observations."""

_PLACE = re.compile(r"\{(\w+)\}")

NOTHING_FOUND = "No results were found for this query."
"""The observation of a search without results."""
NO_OUTPUT = "The call gave no output."
"""The observation of a call of another tool that returned an empty text."""


def fill(template: str, **values: object) -> str:
    """A template with values for its words in braces, in one pass: braces inside values stay as they are."""
    return _PLACE.sub(lambda match: str(values.get(match[1], match[0])), template)


@dataclass(frozen=True, slots=True)
class Shared:
    """``document``: one passage with its number ``{i}``, ``{title}`` and ``{text}``. ``schema``: of a JSON call."""

    nothing_found: str
    no_output: str
    document: str
    question: str
    schema: str


@dataclass(frozen=True, slots=True)
class TagWords:
    """``tools`` introduces the lines of further tools, ``other_tools`` names them in a correction."""

    prompt: str
    tools: str
    corrections: Mapping[str, str]
    general: str
    other_tools: str
    between: str
    notice: Mapping[bool, str]


@dataclass(frozen=True, slots=True)
class AtpoWords:
    """``tool``: one of ``tools``, with its ``{name}``, what it is ``{given}`` and what it is ``{about}``."""

    prompt: str
    tools: str
    tool: str
    corrections: Mapping[str, str]
    notice: str


@dataclass(frozen=True, slots=True)
class HermesWords:
    """By ``answer`` (text, tool): how to answer, how to finish, and the notice of the last turn."""

    prompt: str
    one_call: str
    several_calls: str
    task: str
    way: Mapping[str, str]
    thinking: str
    corrections: Mapping[str, str]
    general: str
    finish: Mapping[str, str]
    notice: Mapping[str, str]
    most: str
    known: str
    full_width_json: str
    search: tuple[str, str]
    answer: tuple[str, str]


SHARED: dict[Language, Shared] = {
    "en": Shared(
        nothing_found=NOTHING_FOUND,
        no_output=NO_OUTPUT,
        document="Doc {i}(Title: {title}) {text}",
        question="Question: {question}",
        schema="arguments as JSON of the schema {schema}",
    ),
    "zh": Shared(
        nothing_found="没有找到与该查询相关的结果。",
        no_output="这次调用没有输出。",
        document="文档{i}（标题：{title}）{text}",
        question="问题：{question}",
        schema="符合此模式的 JSON 参数 {schema}",
    ),
}
"""What all grammars say, by language."""

TAGS: dict[Language, TagWords] = {
    "en": TagWords(
        prompt=(
            "Find the answer to the question below. Whenever you have read something new, first think between <think> "
            "and </think>. If a fact is missing, look it up: write one query between <search> and </search>, and the "
            "passages that were found will be shown to you between <information> and </information>. You may search "
            "again as often as it helps. {tools}Once you know the answer, write it between <answer> and </answer>, as "
            "short as possible and without an explanation.\n{question}"
        ),
        tools=(
            "There are other tools too. Write one call between a tool's tags, and what it returned will be shown to "
            "you between <information> and </information>:{lines}\n"
        ),
        corrections={
            "empty_query": "The search query was empty. Write what to look for between <search> and </search>.",
            "empty_call": "The call was empty. Write what the tool is given between its tags.",
            "empty_answer": "The answer was empty. Write the final answer between <answer> and </answer>.",
            "inside_think": "Close the thought with </think> before you search or answer.",
            "missing_think": "Think between <think> and </think> before you search or answer.",
            "no_searches_left": "That search was not run.",
            "cut_at_length": "The last turn was too long and was cut off, so nothing of it was executed. Be brief.",
            "misspelt_tag": "Tags must be written exactly as <search>, </search>, <answer> and </answer>.",
            "full_width_tag": (
                "Tags must be written with half-width signs, as <search>, </search>, <answer> and </answer>, so "
                "nothing was executed."
            ),
        },
        general=(
            "The last turn held no action that could be executed. To search, write the query between <search> and "
            "</search>; to finish, write the answer between <answer> and </answer>."
        ),
        other_tools=" Other tools are called between their own tags: {names}.",
        between=", ",
        notice={
            False: "No searches are left. Give the final answer now between <answer> and </answer>.",
            True: "No calls are left. Give the final answer now between <answer> and </answer>.",
        },
    ),
    "zh": TagWords(
        prompt=(
            "请回答下面的问题。每次读到新内容后，先在 <think> 和 </think> 之间思考。如果还缺少事实，就去查找："
            "把一条查询写在 <search> 和 </search> 之间，找到的段落会显示在 <information> 和 </information> 之间。"
            "可以根据需要多次搜索。{tools}"
            "知道答案后，把答案写在 <answer> 和 </answer> 之间，尽量简短，不要解释。\n{question}"
        ),
        tools=(
            "此外还有其他工具。把一次调用写在该工具的标签之间，返回的结果会显示在 <information> 和 </information> "
            "之间：{lines}\n"
        ),
        corrections={
            "empty_query": "搜索的查询是空的。请把要查找的内容写在 <search> 和 </search> 之间。",
            "empty_call": "这次调用是空的。请把要交给工具的内容写在它的标签之间。",
            "empty_answer": "答案是空的。请把最终答案写在 <answer> 和 </answer> 之间。",
            "inside_think": "请先用 </think> 结束思考，再搜索或回答。",
            "missing_think": "搜索或回答之前，请先在 <think> 和 </think> 之间思考。",
            "no_searches_left": "这次搜索没有执行。",
            "cut_at_length": "上一轮太长，被截断了，因此没有执行其中的任何内容。请简短一些。",
            "misspelt_tag": "标签必须严格写成 <search>、</search>、<answer> 和 </answer>。",
            "full_width_tag": (
                "标签必须使用半角符号，写成 <search>、</search>、<answer> 和 </answer>，因此没有执行任何内容。"
            ),
        },
        general=(
            "上一轮没有可以执行的动作。要搜索，请把查询写在 <search> 和 </search> 之间；"
            "要结束，请把答案写在 <answer> 和 </answer> 之间。"
        ),
        other_tools="其他工具在各自的标签之间调用：{names}。",
        between="、",
        notice={
            False: "不能再搜索了。现在请在 <answer> 和 </answer> 之间给出最终答案。",
            True: "不能再调用了。现在请在 <answer> 和 </answer> 之间给出最终答案。",
        },
    ),
}
"""Texts of the tag grammar by language."""

ATPO: dict[Language, AtpoWords] = {
    "en": AtpoWords(
        prompt=(
            "Solve the question step by step. Think between <think> and </think>. When you need knowledge, write a "
            "search query between <search> and </search>.{tools} What a call returned follows between <result> and "
            "</result>; then think again. At the end write the final answer, as short as possible and inside a box, "
            "between <answer> and </answer>, such as <answer> \\boxed{Paris} </answer>.\n{question}"
        ),
        tools=" You have these tools too, called in the same way:{lines}",
        tool=" <{name}> {given} </{name}>: {about}.",
        corrections={
            "no_boxed": "The answer had no box. Write \\boxed{the answer} between <answer> and </answer>.",
            "empty_answer": "The answer was empty. Write \\boxed{the answer} between <answer> and </answer>.",
        },
        notice="No calls are left. Give the final answer now, as <answer> \\boxed{...} </answer>.",
    ),
    "zh": AtpoWords(
        prompt=(
            "请一步一步地解决问题。在 <think> 和 </think> 之间思考。"
            "需要知识时，把一条搜索查询写在 <search> 和 </search> 之间。{tools}"
            "调用返回的结果会出现在 <result> 和 </result> 之间，然后请再次思考。"
            "最后在 <answer> 和 </answer> 之间写出最终答案，尽量简短，并放在方框里，"
            "例如 <answer> \\boxed{巴黎} </answer>。\n{question}"
        ),
        tools="还可以用同样的方式调用这些工具：{lines}",
        tool=" <{name}> {given} </{name}>：{about}。",
        corrections={
            "no_boxed": "答案没有放在方框里。请在 <answer> 和 </answer> 之间写 \\boxed{答案}。",
            "empty_answer": "答案是空的。请在 <answer> 和 </answer> 之间写 \\boxed{答案}。",
        },
        notice="不能再调用了。现在请给出最终答案，写成 <answer> \\boxed{...} </answer>。",
    ),
}
"""Texts of AT2PO's grammar by language."""

_CALL = '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'

HERMES: dict[Language, HermesWords] = {
    "en": HermesWords(
        prompt=(
            "These tools can be called:\n<tools>\n{listed}\n</tools>\n\nA call is a JSON object with the name and the "
            f"arguments of a tool:\n{_CALL}\n{{most}} in one turn; what they return is shown to you between "
            "<tool_response> and </tool_response>.\n\n{asked}"
        ),
        one_call="One call may be made",
        several_calls="Up to {n} calls may follow each other",
        task=(
            "Answer the question below. {thinking}Look up what you do not know, as often as it helps. Once you know "
            "the answer, {way}; make it as short as possible, without an explanation."
        ),
        way={"text": "reply with it alone, without a call", "tool": "call the tool answer"},
        thinking="Think between <think> and </think> first. ",
        corrections={
            "bad_json": "The call could not be read, so nothing was executed.",
            "bad_call": 'A call must be a JSON object with "name" and "arguments"; nothing was executed.',
            "unknown_tool": "There is no such tool; nothing was executed.",
            "bad_arguments": "The arguments do not fit the tool's schema; nothing was executed.",
            "empty_query": "The search query was empty.",
            "empty_call": "The call was empty: write what the tool is given.",
            "empty_answer": "The answer was empty.",
            "too_many_calls": "There were too many calls in one turn; none was executed.",
            "repeated_call": "A tool that remembers can be called once in a turn; nothing was executed.",
            "answer_not_alone": "Answer in a turn of its own; nothing was executed.",
            "unclosed_call": "The call was not closed by </tool_call>; nothing was executed.",
            "unopened_call": "Nothing opened the call that </tool_call> closes; nothing was executed.",
            "nested_tags": "A call must not hold other tags; nothing was executed.",
            "misspelt_tag": "Tags must be written exactly as <tool_call> and </tool_call>.",
            "full_width_tag": (
                "Tags must be written with half-width signs, as <tool_call> and </tool_call>; nothing was executed."
            ),
            "fabricated_result": "Results come from the tools alone; write a call and wait.",
            "inside_think": "Close the thought with </think> before you call a tool.",
            "unclosed_think": "The thought was not closed by </think>.",
            "missing_think": "Think between <think> and </think> first.",
            "action_in_thought": "Calls inside a thought are not executed; write them after </think>.",
            "no_searches_left": "That search was not run.",
            "cut_at_length": "The last turn was too long and was cut off, so nothing of it was executed. Be brief.",
        },
        general=(
            f"The last turn held no call that could be executed. To call a tool write\n{_CALL}\nTo finish, {{finish}}."
        ),
        finish={"text": "reply with the answer alone", "tool": "call the tool answer"},
        notice={
            "text": "No calls are left. Reply with the final answer alone now.",
            "tool": "No calls are left. Call the tool answer now.",
        },
        most="At most {n} may be made.",
        known="Known: {names}.",
        full_width_json='JSON needs half-width signs: " : , { }',
        search=("Finds passages of text.", "what to look for"),
        answer=("Ends the task with the final answer.", "the answer alone, short"),
    ),
    "zh": HermesWords(
        prompt=(
            "可以调用以下工具：\n<tools>\n{listed}\n</tools>\n\n一次调用是一个 JSON 对象，包含工具的名称和参数：\n"
            f"{_CALL}\n{{most}}；返回的结果会显示在 <tool_response> 和 </tool_response> 之间。\n\n{{asked}}"
        ),
        one_call="每一轮可以调用一次",
        several_calls="每一轮最多可以连续调用 {n} 次",
        task=(
            "请回答下面的问题。{thinking}不知道的内容请去查找，可以多次查找。知道答案后，{way}；答案要尽量简短，不要解释。"
        ),
        way={"text": "只回复答案，不再调用工具", "tool": "请调用工具 answer"},
        thinking="先在 <think> 和 </think> 之间思考。",
        corrections={
            "bad_json": "无法读取这次调用，因此没有执行任何内容。",
            "bad_call": '一次调用必须是带有 "name" 和 "arguments" 的 JSON 对象；没有执行任何内容。',
            "unknown_tool": "没有这个工具；没有执行任何内容。",
            "bad_arguments": "参数不符合该工具的模式；没有执行任何内容。",
            "empty_query": "搜索的查询是空的。",
            "empty_call": "这次调用是空的：请写出要交给工具的内容。",
            "empty_answer": "答案是空的。",
            "too_many_calls": "一轮中的调用太多；一个也没有执行。",
            "repeated_call": "有记忆的工具在一轮中只能调用一次；没有执行任何内容。",
            "answer_not_alone": "请在单独的一轮中回答；没有执行任何内容。",
            "unclosed_call": "这次调用没有用 </tool_call> 结束；没有执行任何内容。",
            "unopened_call": "</tool_call> 所结束的调用没有开头；没有执行任何内容。",
            "nested_tags": "调用中不能有其他标签；没有执行任何内容。",
            "misspelt_tag": "标签必须严格写成 <tool_call> 和 </tool_call>。",
            "full_width_tag": "标签必须使用半角符号，写成 <tool_call> 和 </tool_call>；没有执行任何内容。",
            "fabricated_result": "结果只能来自工具；请写一次调用并等待。",
            "inside_think": "请先用 </think> 结束思考，再调用工具。",
            "unclosed_think": "思考没有用 </think> 结束。",
            "missing_think": "请先在 <think> 和 </think> 之间思考。",
            "action_in_thought": "思考中的调用不会执行；请写在 </think> 之后。",
            "no_searches_left": "这次搜索没有执行。",
            "cut_at_length": "上一轮太长，被截断了，因此没有执行其中的任何内容。请简短一些。",
        },
        general=f"上一轮没有可以执行的调用。要调用工具，请写\n{_CALL}\n要结束，{{finish}}。",
        finish={"text": "请只回复答案", "tool": "请调用工具 answer"},
        notice={
            "text": "不能再调用了。现在请只回复最终答案。",
            "tool": "不能再调用了。现在请调用工具 answer。",
        },
        most="最多可以调用 {n} 次。",
        known="可用的工具：{names}。",
        full_width_json='JSON 需要半角符号：" : , { }',
        search=("查找文本段落。", "要查找的内容"),
        answer=("给出最终答案并结束任务。", "只写答案，尽量简短"),
    ),
}
"""Texts of the Hermes grammar by language."""
