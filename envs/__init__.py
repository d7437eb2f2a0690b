"""The tasks: state, turn grammar, rewards, data sets, worlds. Never imports torch.

Importing this package registers the environments with Gymnasium.
"""

from __future__ import annotations

import gymnasium

from turntree.envs.actions import ActionTags, PlainText
from turntree.envs.agent_task import AgentTask, TaskCore
from turntree.envs.core import Action, Pending, Step, TextTool, Tool, ToolCall, ToolFailure, ToolResult, TurnCore
from turntree.envs.forkable import Forkable, ForkSnapshot
from turntree.envs.functions import FunctionTool, tool
from turntree.envs.grammar import AtpoGrammar, Grammar, HermesGrammar, ParsedTurn, TagGrammar, TurnRecord
from turntree.envs.metrics import exact_match, f1_score, sub_exact_match
from turntree.envs.prompt import PromptTemplate
from turntree.envs.rewards import Outcome, Reward
from turntree.envs.search_qa import Limits, SearchQACore, SearchQAEnv, SearchQAState
from turntree.envs.snapshot import History, RandomStream, Snapshot
from turntree.envs.spaces import UnicodeText
from turntree.envs.task import FrozenDict, Question
from turntree.envs.tools import SearchTool, execute
from turntree.envs.turn_env import TurnEnv
from turntree.envs.vector import TurnVectorEnv, vectorized

__all__ = [
    "Action",
    "ActionTags",
    "AgentTask",
    "AtpoGrammar",
    "ForkSnapshot",
    "Forkable",
    "FrozenDict",
    "FunctionTool",
    "Grammar",
    "HermesGrammar",
    "History",
    "Limits",
    "Outcome",
    "ParsedTurn",
    "Pending",
    "PlainText",
    "PromptTemplate",
    "Question",
    "RandomStream",
    "Reward",
    "SearchQACore",
    "SearchQAEnv",
    "SearchQAState",
    "SearchTool",
    "Snapshot",
    "Step",
    "TagGrammar",
    "TaskCore",
    "TextTool",
    "Tool",
    "ToolCall",
    "ToolFailure",
    "ToolResult",
    "TurnCore",
    "TurnEnv",
    "TurnRecord",
    "TurnVectorEnv",
    "UnicodeText",
    "exact_match",
    "execute",
    "f1_score",
    "register_envs",
    "sub_exact_match",
    "tool",
    "vectorized",
]


def register_envs() -> None:
    """Register every environment under ``turntree/``; calling it again changes nothing.

    No time limit: the environments truncate by themselves, since a wrapper's counter does not survive a restore.
    """
    if "turntree/SearchQA-v0" not in gymnasium.registry:
        gymnasium.register(
            id="turntree/SearchQA-v0",
            entry_point="turntree.envs.search_qa:SearchQAEnv",
            vector_entry_point="turntree.envs.vector:make_search_qa",
            max_episode_steps=None,
        )
    if "turntree/SearchCodeQA-v0" not in gymnasium.registry:
        gymnasium.register(
            id="turntree/SearchCodeQA-v0",
            entry_point="turntree.envs.search_code_qa:SearchCodeQAEnv",
            vector_entry_point="turntree.envs.search_code_qa:make_search_code_qa",
            max_episode_steps=None,
        )


register_envs()
