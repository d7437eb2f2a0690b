"""The TorchRL environment moves on, turn by turn, and branches from any tensordict that was kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.error import ResetNeeded
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs import GymWrapper, ParallelEnv, SerialEnv
from torchrl.envs.utils import check_env_specs

from turntree.envs import Question, SearchQAEnv
from turntree.envs.torchrl import SnapshotEnv
from turntree.errors import ConfigError, SnapshotError
from turntree.search_backend import Passage

QUESTIONS = [Question("a", "Who wrote Hamlet?", ("Shakespeare",)), Question("b", "谁写了《红楼梦》？👍", ("曹雪芹",))]
SEARCHES = ["<search>Hamlet</search>", "<search>红楼梦</search>", "no action 👍"]


class Library:
    fingerprint = "library"

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def search(self, queries: Any, *, k: int) -> list[list[Passage]]:
        self.batches.append(list(queries))
        return [[Passage("1", q, f"about {q} 👍")] for q in queries]


def make(max_turns: int = 4, library: Library | None = None) -> SearchQAEnv:
    return SearchQAEnv(QUESTIONS, search=library or Library(), max_turns=max_turns)


def texts(values: list[str]) -> Any:
    return NonTensorStack(*map(NonTensorData, values))  # pyright: ignore[reportAbstractUsage]


def script(*turns: Any) -> Callable[[TensorDictBase], TensorDictBase]:
    """A policy that plays these turns, one a call; a list is a turn for each environment of a batch."""
    rest = iter(turns)

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        turn = next(rest)
        tensordict["action"] = texts(turn) if isinstance(turn, list) else NonTensorData(turn)
        return tensordict

    return policy


def act(kept: TensorDictBase, turn: str) -> TensorDictBase:
    return kept.clone().update({"action": NonTensorData(turn)})


@pytest.mark.parametrize("num_envs", [None, 1, 3])
def test_specs_hold(num_envs: int | None) -> None:
    env = SnapshotEnv(make(), num_envs)
    check_env_specs(env, seed=1)
    check_env_specs(env, break_when_any_done="both")


def test_turns_advance_and_equal_those_of_the_plain_environment() -> None:
    env, plain = SnapshotEnv(make()), make()
    env.set_seed(5)
    plain.reset(seed=5)
    rollout = env.rollout(9, script(*SEARCHES, "<answer>x</answer>"))
    expected = [plain.step(turn) for turn in (*SEARCHES, "<answer>x</answer>")]
    assert list(rollout["next", "observation"]) == [step[0] for step in expected]
    assert [s.state.turns for s in rollout["snapshot"]] == [0, 1, 2, 3]
    assert [s.info["action"] for s in rollout["next", "snapshot"]] == ["search", "search", "invalid", "answer"]
    assert rollout["next", "terminated"].squeeze(-1).tolist() == [False, False, False, True]
    assert rollout["next", "snapshot"][-1].state == plain.snapshot().state


def test_the_same_tensordict_branches_into_what_the_plain_environment_gives() -> None:
    env, plain = SnapshotEnv(make()), make()
    kept = env.rollout(2, script(*SEARCHES[:2]))[..., -1]["next"]
    before = kept["snapshot"]
    turns = ("<answer>曹雪芹</answer>", "<answer>Shakespeare</answer>", SEARCHES[0], SEARCHES[2])
    for turn in (*turns, *reversed(turns)):
        found = env.step(act(kept, turn))["next"]
        plain.restore(before)
        observation, reward, terminated, truncated, _ = plain.step(turn)
        assert (found["observation"], found["snapshot"]) == (observation, plain.snapshot())
        assert (found["reward"].item(), found["terminated"].item()) == (reward, terminated)
        assert found["truncated"].item() == truncated
        assert kept["snapshot"] is before
        assert before.state.turns == 2
    rewards = {env.step(act(kept, turn))["next", "reward"].item() for turn in turns}
    assert rewards == {0.0, 1.0}
    rollout = env.rollout(5, script(SEARCHES[1], SEARCHES[0]), tensordict=kept.clone(), auto_reset=False)
    assert [s.state.turns for s in rollout["next", "snapshot"]] == [3, 4]
    assert rollout["next", "truncated"].squeeze(-1).tolist() == [False, True]
    assert kept["snapshot"] is before


def test_a_kept_tensordict_survives_another_environment_and_a_reset() -> None:
    env = SnapshotEnv(make())
    kept = env.rollout(1, script(SEARCHES[0]))[..., -1]["next"]
    expected = env.step(act(kept, SEARCHES[1]))["next"]
    env.reset()
    for other in (env, SnapshotEnv(make())):
        found = other.step(act(kept, SEARCHES[1]))["next"]
        assert (found["observation"], found["snapshot"]) == (expected["observation"], expected["snapshot"])


def test_new_episodes_do_not_depend_on_what_was_stepped_in_between() -> None:
    ids = []
    for steps in (0, 3):
        env = SnapshotEnv(make())
        env.set_seed(2)
        start = env.reset()
        for _ in range(steps):
            env.step(act(start, SEARCHES[0]))
        ids.append([env.reset()["snapshot"].state.task.id for _ in range(12)])
    assert ids[0] == ids[1]
    assert set(ids[0]) == {"a", "b"}


def test_reset_takes_options_and_ignores_the_snapshot_it_is_given() -> None:
    env = SnapshotEnv(make())
    start = env.reset(options={"index": 1})
    assert "红楼梦》？👍" in start["observation"]
    later = env.step(act(start, SEARCHES[0]))["next"]
    assert env.reset(later, options={"index": 0})["snapshot"].state.turns == 0
    with pytest.raises(ConfigError, match="did you mean 'index'"):
        env.reset(options={"indx": 1})


def test_a_batch_is_one_search_and_each_of_it_may_stand_anywhere() -> None:
    library = Library()
    env = SnapshotEnv(make(library=library), 3)
    env.set_seed(0)
    rollout = env.rollout(2, script(SEARCHES, [SEARCHES[0]] * 3))
    assert library.batches == [["Hamlet", "红楼梦"], ["Hamlet"]]
    places = [rollout["snapshot"][0][0], rollout["snapshot"][1][1], rollout["next", "snapshot"][2][1]]
    mixed = TensorDict({"snapshot": texts(places), "action": texts([SEARCHES[1]] * 3)}, batch_size=[3])
    assert [s.state.turns for s in env.step(mixed)["next", "snapshot"]] == [1, 2, 3]


def test_a_batch_goes_on_where_episodes_ended_or_waits_for_the_others() -> None:
    turns = [SEARCHES[0], "<answer>x</answer>"]
    for make_env in (lambda: SnapshotEnv(make(), 2), lambda: SerialEnv(2, lambda: SnapshotEnv(make()))):
        env = make_env()
        on = env.rollout(5, script(*[turns] * 5), break_when_any_done=False)
        assert on["next", "done"].squeeze(-1).tolist() == [[False] * 3 + [True, False], [True] * 5]
        assert [[s.state.turns for s in row] for row in on["snapshot"]] == [[0, 1, 2, 3, 0], [0] * 5]
        waiting = env.rollout(9, script(*[turns] * 9), break_when_any_done=False, break_when_all_done=True)
        assert waiting["next", "done"].squeeze(-1).tolist() == [[False] * 3 + [True], [True] * 4]
        assert [s.state.turns for s in waiting["next", "snapshot"][1]] == [1] * 4


def test_stepping_from_the_wrong_place_is_refused() -> None:
    env = SnapshotEnv(make())
    over = env.rollout(1, script("<answer>x</answer>"))[..., -1]["next"]
    with pytest.raises(ResetNeeded, match="over"):
        env.step(act(over, "x"))
    with pytest.raises(SnapshotError, match="fingerprint"):
        SnapshotEnv(make(max_turns=2)).step(act(over, "x"))
    with pytest.raises(SnapshotError, match="expected a Snapshot"):
        env.step(act(over, "x").update({"snapshot": NonTensorData("s")}))


def test_random_actions_are_turns_and_follow_the_seed() -> None:
    drawn = []
    for _ in range(2):
        env = SnapshotEnv(make(), 2)
        env.set_seed(3)
        drawn.append([list(env.rand_action()["action"]) for _ in range(8)])
    assert drawn[0] == drawn[1]
    assert len({text for pair in drawn[0] for text in pair}) > 3


def test_processes_advance_too() -> None:
    env = ParallelEnv(2, partial(SnapshotEnv, make()), use_buffers=False, mp_start_method="fork")
    try:
        rollout = env.rollout(3, script(*[[SEARCHES[1], SEARCHES[0]]] * 3))
        assert [[s.state.turns for s in row] for row in rollout["next", "snapshot"]] == [[1, 2, 3]] * 2
        assert "红楼梦 👍" in rollout["next", "observation"][0][0]
        kept = rollout[..., 0]["next"].clone()
        again = env.step(kept.update({"action": texts(["<answer>曹雪芹</answer>"] * 2)}))["next"]
        assert [s.state.turns for s in again["snapshot"]] == [2, 2]
    finally:
        env.close()


def test_gym_wrapper_plays_linear_episodes() -> None:
    env = GymWrapper(make())
    check_env_specs(env)
    rollout = env.rollout(9, script(*SEARCHES, "<answer>x</answer>"))
    assert rollout.shape == torch.Size([4])
    assert "红楼梦 👍" in rollout["next", "observation"][1]
    assert rollout["next", "done"].squeeze(-1).tolist() == [False, False, False, True]
