"""C19: Gymnasium's checker is content with Chinese, emoji and newlines."""

from __future__ import annotations

import warnings

import gymnasium
from gymnasium.utils.env_checker import check_env

from turntree.envs import Question
from turntree.search_backend import Passage


def test_c19_check_env_passes_without_a_warning() -> None:
    question = Question("1", "《红楼梦》的作者是谁？👍\n第二行", ("曹雪芹",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(
            "turntree/SearchQA-v0", questions=[question], corpus=[Passage("1", "红楼梦", "👍\n曹雪芹\u2028著")]
        )
        check_env(env.unwrapped)
        observation, _ = env.reset(seed=0)
        assert observation in env.observation_space
        observation, *_ = env.step("<search>红楼梦\n👍</search>")
    assert "曹雪芹" in observation
    assert observation in env.observation_space
    assert "" in env.action_space
    env.action_space.seed(1)
    assert all(env.action_space.sample() in env.action_space for _ in range(100))
