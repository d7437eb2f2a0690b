"""A training loop of your own, over the functions that ``turntree train`` is made of.

Numbers are tiny so that it takes seconds; nothing is learned: python examples/custom_loop.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turntree.agents import Dialogue
from turntree.agents.engines import HFEngine, SamplingParams
from turntree.agents.scorer import Finished
from turntree.agents.tiny import build_tiny_model, build_tokenizer
from turntree.envs import SearchQACore
from turntree.envs.worlds import generate_world, lexicon
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.envs.worlds.world import World
from turntree.search_backend import BM25Backend
from turntree.trainers.credit import at2po
from turntree.trainers.expansion import entropy
from turntree.trainers.forward import score_packs
from turntree.trainers.losses import Denominators
from turntree.trainers.objectives import PolicyObjective
from turntree.trainers.packing import pack_groups, write_advantages
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow


def variety(finished: Sequence[Finished]) -> list[float]:
    """Different words a trajectory: a stand-in for a judge, since a model with random weights answers nothing."""
    return [float(len({word for turn in f.turns for word in turn.text.split()})) for f in finished]


def train(model: torch.nn.Module, engine: HFEngine, dialogue: Dialogue, world: World, *, steps: int) -> None:
    core = SearchQACore(BM25Backend.from_passages(world.passages), grammar=WorldGrammar())
    objective = PolicyObjective(model, ratio="turn", aggregation="seq-mean-token-mean")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        rollout = grow(
            [Prompt(f"{step}/{i}", question) for i, question in enumerate(world.questions[4 * step : 4 * step + 4])],
            core=core,
            engine=engine,
            dialogue=dialogue,
            plan=GrowthPlan(chains=2, rounds=1, expansions=2, rule=entropy),
            sampling=SamplingParams(max_tokens=12, stop=core.grammar.stop),
            limits=Limits(max_turn_tokens=12, max_context_tokens=400),
            run_seed=0,
            scorer=variety,
        ).drop_small_groups()
        packs = pack_groups(rollout.groups, max_pack_tokens=2048)
        score_packs(model, packs)  # old log-probs: the trainer's own, not the engine's
        write_advantages(packs, at2po(rollout.groups))
        denominators = Denominators.of(packs)  # of the whole mini-batch, whatever the packs are
        optimizer.zero_grad()
        for pack in packs:
            losses = objective(pack, denominators)
            torch.stack([value for key, value in losses.items() if key.startswith("loss_")]).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        engine.update_weights(step + 1)  # drops the caches of the old weights
        print(f"step {step + 1}: {rollout.stats.trajectories} trajectories, gradient norm {norm:.4f}")


def main() -> None:
    world = generate_world("quickstart", seed=0, questions=32)
    tokenizer = build_tokenizer(*lexicon())
    model = build_tiny_model(tokenizer, hidden=32, layers=1, heads=2)
    train(model, HFEngine(model, tokenizer), Dialogue(tokenizer), world, steps=2)


if __name__ == "__main__":
    main()
