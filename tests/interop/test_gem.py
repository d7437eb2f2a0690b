"""A game that plays in place and draws from global generators becomes a value that forks."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs import TurnEnv
from turntree.envs.check import check_fork
from turntree.envs.interop.gem import GemTask
from turntree.envs.interop.verifiers import VerifiersTask
from turntree.errors import ConfigError


class Dice:
    """GEM's interface: roll until the sum reaches the target; everything is changed in place."""

    max_turns = 6
    moves = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(None if seed is None else seed % 2**32)  # noqa: NPY002
        self.target, self.rolls = random.randint(9, 20), [int(np.random.randint(1, 7))]  # noqa: NPY002
        return f"Reach {self.target}.", {"suffix": self.shown()}

    def shown(self) -> str:
        return f"Rolled {self.rolls}."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        Dice.moves += 1
        if action != "roll":
            return "Only rolling is allowed.", -1.0, False, False, {"suffix": self.shown()}
        self.rolls.append(random.randint(1, 6))
        done = sum(self.rolls) >= self.target
        last = len(self.rolls) > self.max_turns
        return self.shown(), float(done), done, last, {"suffix": "Roll again."}


ROLLS = st.lists(st.sampled_from(["roll", "cheat"]), max_size=5)


def dice(**options: Any) -> TurnEnv[Any]:
    return TurnEnv(GemTask(Dice, name="dice", **options), [{"seed": 7}, {}], action_examples=["roll", "cheat"])


def play(env: TurnEnv[Any], turns: list[str]) -> list[Any]:
    return [env.step(turn) for turn in turns if not env.done]


def test_laws_hold() -> None:
    laws = check_fork(dice(), actions=["roll", "roll", "cheat"], process=False)
    assert {"determinism", "restore", "isolation", "reseed", "json", "pickle"} <= set(laws)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), before=ROLLS, mine=ROLLS, theirs=ROLLS, kept=st.sampled_from([0, 1, 256]))
def test_branches_are_independent_whether_copies_are_kept_or_not(
    seed: int, before: list[str], mine: list[str], theirs: list[str], kept: int
) -> None:
    env = dice(kept_games=kept)
    env.reset(seed=seed)
    play(env, before)
    here = env.snapshot()
    expected = play(env, mine)
    env.restore(here)
    play(env, theirs)
    env.restore(here)
    assert play(env, mine) == expected
    fresh = dice()
    fresh.restore(fresh.decode_snapshot(json.loads(json.dumps(env.encode_snapshot(here)))))
    assert play(fresh, mine) == expected


def test_siblings_roll_other_dice_with_another_seed() -> None:
    env = dice()
    env.reset(seed=1)
    here, seen = env.snapshot(), set()
    for seed in range(12):
        env.restore(here, seed)
        seen.add(env.step("roll")[0])
    assert 2 < len(seen) <= 6


def test_global_generators_stay_as_they_were() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    env = dice()
    env.reset(seed=0)
    play(env, ["roll", "cheat", "roll"])
    after = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
    assert after == before


def test_a_step_from_a_kept_game_is_one_move() -> None:
    env, forgetful = dice(), dice(kept_games=0)
    costs = []
    for each in (env, forgetful):
        each.reset(seed=3)
        play(each, ["cheat"] * 4)
        Dice.moves = 0
        each.step("cheat")
        costs.append(Dice.moves)
    assert costs == [1, 5]


def test_rewards_and_ends_are_the_games() -> None:
    env = dice()
    observation, _ = env.reset(options={"task": {"seed": 7}})
    assert observation.startswith("Reach ")
    assert "Rolled [" in observation
    observation, reward, terminated, truncated, _ = env.step("cheat")
    assert ("Only rolling is allowed.\nRolled [" in observation, reward, terminated, truncated) == (
        True,
        -1,
        False,
        False,
    )
    steps = play(env, ["roll"] * 6)
    assert [step[2] or step[3] for step in steps][-1]


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match="needs a name"):
        GemTask(Dice)
    with pytest.raises(ConfigError, match="expected a task"):
        dice().reset(options={"task": {"sed": 1}})


def test_a_library_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install .gem-llm"):
        GemTask("game:Wordle-v0")
    with pytest.raises(ConfigError, match=r"pip install .verifiers"):
        VerifiersTask([])
