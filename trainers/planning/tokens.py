"""How many tokens a step of training generates, packs and would have as plain rows."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.trainers.config import RunConfig

__all__ = ["Play", "StepTokens", "play_of", "step_tokens"]


@dataclass(frozen=True, slots=True)
class Play:
    """A typical episode: turns, and tokens of prompt, turn and observation."""

    turns: float
    turn_tokens: float
    observation_tokens: float
    prompt_tokens: float

    def after(self, turns: float) -> float:
        """Tokens that ``turns`` last turns of an episode add: each but the last has an observation."""
        return turns * self.turn_tokens + max(0.0, turns - 1) * self.observation_tokens


def play_of(
    config: RunConfig,
    *,
    turns: float | None = None,
    turn_tokens: float | None = None,
    observation_tokens: float | None = None,
    prompt_tokens: float | None = None,
) -> Play:
    """What is not given follows from the limits: all turns, each and its observation half as long as they may be.

    Without a limit of observations one is as long as a turn; a prompt takes an eighth of the context.
    """
    limits = config.sampling
    turn = limits.max_turn_tokens / 2 if turn_tokens is None else turn_tokens
    longest = config.env.max_observation_tokens
    observation = (turn if longest is None else longest / 2) if observation_tokens is None else observation_tokens
    prompt = limits.max_context_tokens / 8 if prompt_tokens is None else prompt_tokens
    return Play(float(config.env.max_turns if turns is None else turns), turn, observation, prompt)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one step. ``unique``: each token of a tree once, what the network runs on; ``rows``: one row a leaf.

    ``longest``: of a trajectory with its prompt, at most the context. ``in_flight``: tokens whose keys and values an
    engine holds when all trees of a rollout are at their largest.
    """

    trajectories: int
    trees: int
    generated: float
    unique: float
    rows: float
    longest: float

    @property
    def saving(self) -> float:
        """Plain rows over packed tokens."""
        return self.rows / self.unique if self.unique else 1.0


def step_tokens(config: RunConfig, play: Play) -> StepTokens:
    """The tokens of a step, where expansions start evenly over the turns of a trajectory.

    So an expansion plays (turns + 1) / 2 new turns in the mean. Trees are taken as whole: budgets in tokens or calls
    and early answers make them smaller.
    """
    algorithm = config.algorithm
    longest = min(play.prompt_tokens + play.after(play.turns), float(config.sampling.max_context_tokens))
    full = max(0.0, longest - play.prompt_tokens)
    cut = full / play.after(play.turns) if play.after(play.turns) else 1.0
    new_turns = (play.turns + 1) / 2
    expansions = algorithm.rounds * algorithm.expansions
    leaves = algorithm.chains + expansions
    if algorithm.budget_leaves is not None:
        leaves = min(leaves, max(algorithm.chains, algorithm.budget_leaves // algorithm.trees))
        expansions = leaves - algorithm.chains
    generated = (algorithm.chains * play.turns + expansions * new_turns) * play.turn_tokens * cut
    kept = min(1.0, (algorithm.kept_leaves or leaves) / leaves)
    grown = (algorithm.chains * play.after(play.turns) + expansions * play.after(new_turns)) * cut * kept
    trees = config.trainer.prompts_per_step * algorithm.trees
    return StepTokens(
        trajectories=trees * leaves,
        trees=trees,
        generated=trees * generated,
        unique=trees * (play.prompt_tokens + grown),
        rows=trees * leaves * kept * longest,
        longest=longest,
    )
