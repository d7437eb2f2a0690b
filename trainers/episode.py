"""One trajectory as a coroutine: it yields what it needs from outside and never waits by itself.

An episode yields a :class:`Request` (and is sent a :class:`Generation`, or :class:`Failed`) or a tuple of tool calls
(and is sent their outcomes). Whoever drives it answers many episodes at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from turntree.agents.dialogue import Dialogue, TurnText
from turntree.agents.engines.protocol import Generation, Prefix, Request, SamplingParams
from turntree.agents.scorer import Failed
from turntree.envs.core import Finish, Pending, Step, ToolCall, ToolFailure, ToolResult, TurnCore
from turntree.envs.task import FrozenDict
from turntree.errors import EngineError, TurnTreeError
from turntree.trainers.plan import Limits
from turntree.trainers.seeds import derive_seed
from turntree.trainers.tally import Tally
from turntree.trainers.tree import Node, Tree

__all__ = ["Ask", "Episode", "Setting", "as_failure", "failed_leaf"]

Ask: TypeAlias = Request | tuple[ToolCall, ...]
"""What an episode waits for: a generation or tool calls."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all episodes of a rollout share."""

    core: TurnCore[Any]
    dialogue: Dialogue
    sampling: SamplingParams
    limits: Limits
    run_seed: int


def failed_leaf(ordinal: int, failure: Failed) -> Node:
    """A leaf without a turn: something outside the episode went wrong before its first token."""
    return _fail(Node(ordinal=ordinal), failure)


def as_failure(error: TurnTreeError) -> Failed:
    """An error of ours as data; counted by its class."""
    return Failed(type(error).__name__, str(error))


@dataclass(frozen=True, slots=True)
class Episode:
    """Episodes of one tree. Counts what they use in ``tally``; turns become nodes of ``tree`` as they end."""

    setting: Setting
    tree: Tree
    tally: Tally

    def play(self, parent: Node, ordinal: int, origin: Node | None) -> Generator[Ask, Any, Node]:
        """Grow a trajectory from ``parent`` to a leaf, which is returned; its first turn is child ``ordinal``.

        ``origin`` carries why (picked, score, reason); None where nothing was picked. The environment resumes
        ``parent``'s state with the random stream of the new path, so that siblings are independent.
        """
        path = (*parent.path, ordinal)
        try:
            state = self.setting.core.reseed(parent.state, self._seed(path, "env"))
        except TurnTreeError as error:
            return self._attach(parent, failed_leaf(ordinal, as_failure(error)))
        while True:
            node = yield from self._turn(parent, ordinal, state)
            if origin is not None:
                node.picked, node.score, node.reason = origin.picked, origin.score, origin.reason
            self._attach(parent, node)
            if node.is_leaf:
                return node
            # The next turn is scheduled at once, before anything else can branch from this node: it is child 0.
            parent, ordinal, state, origin = node, 0, node.state, None

    def _attach(self, parent: Node, node: Node) -> Node:
        parent.add_child(node)
        self.tally.trajectories += node.is_leaf
        return node

    def _seed(self, path: tuple[int, ...], use: str) -> int:
        return derive_seed(self.setting.run_seed, self.tree.prompt_uid, self.tree.index, path, use)

    def _room(self, prefix: Prefix) -> int:
        return self.setting.limits.room(len(prefix), len(self.tree.root.observation_ids))

    def _turn(self, parent: Node, ordinal: int, state: Any) -> Generator[Ask, Any, Node]:
        """Sample one turn, let the environment answer it, and make both a node (not yet attached)."""
        node: Node | None = None
        try:
            prefix = _prefix(parent)
            room = self._room(prefix)
            if room < 1:  # only a prompt that fills the context by itself gets here
                return self._full(_unspoken(parent, ordinal, state))
            sampled = yield from self._sample(self._request(prefix, (*parent.path, ordinal), room))
            if isinstance(sampled, Failed):
                return _fail(_unspoken(parent, ordinal, state), sampled)
            generation, turn = sampled
            node = _node(generation, ordinal, turn.text, branchable=parent.branchable)
            step = yield from self._answer(node, state, turn.finish)
            return self._close(node, step, generation.continuation)
        except TurnTreeError as error:
            return _fail(node or _unspoken(parent, ordinal, state), as_failure(error))

    def _request(self, prefix: Prefix, path: tuple[int, ...], room: int) -> Request:
        params, most = self.setting.sampling, min(self.setting.limits.max_turn_tokens, room)
        if params.max_tokens != most:
            params = replace(params, max_tokens=most)
        return Request(prefix, params, self._seed(path, "turn"), (self.tree.prompt_uid, self.tree.index, *path))

    def _sample(self, request: Request) -> Generator[Ask, Any, tuple[Generation, TurnText] | Failed]:
        """A finished turn. Aborted ones are discarded and asked for again, with the same seed."""
        tries = self.setting.limits.engine_retries + 1
        for _ in range(tries):
            reply: Generation | Failed = yield request
            if isinstance(reply, Failed):
                return reply
            self.tally.generated_tokens += len(reply.ids)
            self.tally.discarded_tokens += len(reply.ids)
            if reply.finish_reason == "abort":
                self.tally.aborted += 1
                continue
            dialogue, params = self.setting.dialogue, request.params
            kept, turn = dialogue.finish_turn(reply, params.stop, max_tokens=params.max_tokens)
            self.tally.turns += 1
            self.tally.discarded_tokens -= len(kept.ids)
            return kept, turn
        return Failed("abort", f"the engine aborted {tries} times in a row")

    def _answer(self, node: Node, state: Any, finish: Finish) -> Generator[Ask, Any, Step[Any] | Failed]:
        core = self.setting.core
        outcome = core.act(state, node.text, finish=finish)
        if isinstance(outcome, Step):
            return outcome
        if any(tool.effects == "external" for c in outcome.calls if (tool := core.tools.get(c.tool)) is not None):
            node.branchable = False
        results = yield from self._results(outcome)
        return results if isinstance(results, Failed) else core.resolve(state, outcome, results)

    def _results(self, pending: Pending[Any]) -> Generator[Ask, Any, list[ToolResult] | Failed]:
        """The results of a turn's calls, or the first failure (retries lie behind it)."""
        outcomes: Sequence[ToolResult | ToolFailure] = (yield pending.calls) if pending.calls else ()
        results = [o for o in outcomes if isinstance(o, ToolResult)]
        self.tally.tool_calls += len(results)
        for call, outcome in zip(pending.calls, outcomes, strict=True):
            if isinstance(outcome, ToolResult):
                self.tally.by_tool[call.tool] += 1
        failure = next((o for o in outcomes if isinstance(o, ToolFailure)), None)
        return results if failure is None else Failed(failure.kind, failure.message)

    def _close(self, node: Node, step: Step[Any] | Failed, continuation: Prefix) -> Node:
        """Write the environment's answer into ``node`` and append the observation, if another turn can follow."""
        if isinstance(step, Failed):
            return _fail(node, step)
        node.state, node.observation, node.info = step.state, step.observation, step.info
        node.action = str(step.info.get("action", ""))
        node.step_reward = step.reward
        if step.done:
            node.status = "answered" if step.terminated else "truncated"
            return node
        ids = tuple(self.setting.dialogue.observation_ids(step.observation, after=node.turn_ids))
        if len(ids) > self._room(continuation):
            return self._full(node, left_out=len(ids))
        node.observation_ids = ids
        node.prefix = continuation.extend(ids)
        return node if self._room(node.prefix) else self._full(node)

    def _full(self, node: Node, *, left_out: int = 0) -> Node:
        """End the episode at ``node``: no room for another token. Scored like any other truncated one."""
        step = self.setting.core.truncate(node.state, "context")
        extra = {"observation_tokens_left_out": left_out} if left_out else {}
        node.state, node.status = step.state, "truncated"
        node.step_reward += step.reward
        node.info = FrozenDict({**node.info, "stop_reason": "context", **step.info, **extra})
        return node


def _prefix(node: Node) -> Prefix:
    if node.prefix is None:
        raise EngineError(f"node {node.path} has no context to continue from; its tree is finished or it is a leaf")
    return node.prefix


def _node(generation: Generation, ordinal: int, text: str, *, branchable: bool) -> Node:
    nll = [-logprob for logprob in generation.logprobs]
    return Node(
        ordinal=ordinal,
        turn_ids=generation.ids,
        logprobs=generation.logprobs,
        entropies=generation.entropies,
        entropy=math.fsum(nll) / len(nll) if nll else 0.0,
        text=text,
        branchable=branchable,
        version=generation.version,
    )


def _unspoken(parent: Node, ordinal: int, state: Any) -> Node:
    """A child without a turn."""
    return Node(ordinal=ordinal, state=state, branchable=parent.branchable)


def _fail(node: Node, failure: Failed) -> Node:
    node.status, node.branchable, node.prefix = "failed", False, None
    node.info = FrozenDict({**node.info, "error": failure.kind, "message": failure.message})
    return node
