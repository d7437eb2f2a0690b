"""Turn grammars: how a question is asked, a turn is read, an observation is written and an episode is judged.

| name | class | calls and answers | results |
|---|---|---|---|
| ``tags`` | :class:`TagGrammar` | ``<search>q</search>``, ``<answer>a</answer>`` | ``<information>`` |
| ``atpo`` | :class:`AtpoGrammar` | ``<search>q</search>``, ``<answer> \\boxed{a} </answer>`` | ``<result>`` |
| ``hermes`` | :class:`HermesGrammar` | ``<tool_call>`` with JSON; a turn without a call answers | ``<tool_response>`` |

Prompts, frames of results and corrections are English or Chinese (``language``); tags are the same in both.

:class:`PlannerGrammar` gives any of them the ending of a planner, which calls tools and never answers.

The tables of ``turntree.envs.grammar.atpo`` and ``turntree.envs.grammar.hermes`` say how their turns are read. This one
is that of :class:`TagGrammar`, the convention of Search-R1 and Tree-GRPO. Tags are exact: lower case, no spaces, no
attributes. With tools their tags are calls as ``<search>`` is one (``<lookup>...</lookup>``), and the reason codes are
named after them.

| turn | reading |
|---|---|
| ``<search>q</search>`` or ``<answer>a</answer>`` | that action, its text stripped |
| several closed actions | the first one; what follows is never executed (note ``overrun``) |
| ``<answer>x <answer>y</answer></answer>`` (nested) | the innermost: ``y`` |
| an action inside ``<think>...</think>`` | a thought, skipped |
| text before a ``</think>`` that was never opened | a thought, skipped (some chat templates open it in the prompt) |
| an action inside a ``<think>`` that is never closed | it counts; with ``think="required"``: ``inside_think`` |
| no closed thought before the action | fine; with ``think="required"``: ``missing_think`` |
| ``<search> </search>``, ``<answer></answer>`` | ``empty_query``, ``empty_answer``; of another tool ``empty_call`` |
| another tag between the opening and the closing one | ``nested_tags`` |
| ``<search>q`` or ``<answer>a``, never closed | ``unclosed_search``, ``unclosed_answer`` |
| ``q</search>`` or ``a</answer>``, never opened | ``unopened_search``, ``unopened_answer`` |
| closed actions inside finished thoughts only | ``action_in_thought`` |
| ``<Search>``, ``< search >``, ``<search/>`` | ``misspelt_tag`` |
| no closed action, and ``＜search＞``, ``〈search〉``, ``《search》`` or ``<ｓｅａｒｃｈ>`` | ``full_width_tag`` |
| a call in another dialect (``<tool_call>{...}``) | ``no_action``, flagged ``other_dialect`` |
| other text, no text | ``no_action``, ``empty_turn`` |
"""

from turntree.envs.grammar.atpo import AtpoGrammar
from turntree.envs.grammar.base import (
    NO_OUTPUT,
    NOTHING_FOUND,
    Grammar,
    Language,
    Observation,
    ParsedTurn,
    Think,
    ToolGrammar,
    TurnRecord,
    Validity,
    complete_turn,
    reading_tools,
    speaking,
)
from turntree.envs.grammar.hermes import HermesGrammar
from turntree.envs.grammar.planner import PlannerGrammar
from turntree.envs.grammar.tag import TagGrammar
from turntree.envs.tags import is_other_dialect

__all__ = [
    "GRAMMARS",
    "NOTHING_FOUND",
    "NO_OUTPUT",
    "AtpoGrammar",
    "Grammar",
    "HermesGrammar",
    "Language",
    "Observation",
    "ParsedTurn",
    "PlannerGrammar",
    "TagGrammar",
    "Think",
    "ToolGrammar",
    "TurnRecord",
    "Validity",
    "complete_turn",
    "is_other_dialect",
    "reading_tools",
    "speaking",
]

GRAMMARS = {"tags": TagGrammar, "atpo": AtpoGrammar, "hermes": HermesGrammar}
"""Grammars by name; others are given by import path."""
