# mypy: ignore-errors
# pyright: reportMissingImports=false
# What this imports is installed where it runs, not here.
"""Run in an environment that has skyrl-gym: its registry makes our environment and plays an episode."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import skyrl_gym

from turntree.envs import SearchQAEnv

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "interop"))


def main() -> None:
    skyrl_gym.register("turntree_search_qa", entry_point="skyrl_environment:SearchQATextEnv")
    make = {"id": "turntree_search_qa", "env_config": {"max_turns": 3, "reward": "em"}}
    env, other = (skyrl_gym.make(**make, extras={"index": index}) for index in (3, 4))
    plain = SearchQAEnv(max_turns=3, reward="em")
    prompt, _ = plain.reset(options={"index": 3})
    messages, _ = env.init([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "replaced"}])
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
    assert env.max_turns == 3
    gold = plain.tasks[3].golden_answers[0]
    other.init([])
    for turn in ("<search> who </search>", f"<answer> {gold} </answer>"):
        observation, reward, terminated, truncated, info = plain.step(turn)
        other.step("<search> something else </search>")
        out = env.step(turn)
        assert out["observations"] == ([{"role": "user", "content": observation}] if not terminated else [])
        assert (out["reward"], out["done"], out["metadata"]) == (reward, terminated or truncated, info)
    assert (out["reward"], out["done"]) == (1.0, True)
    own = {"id": "own", "question": "Why?", "golden_answers": ["so"]}
    messages, _ = skyrl_gym.make(**make, extras={"task": own}).init([])
    assert "Question: Why?" in messages[0]["content"]
    print("skyrl-gym", version("skyrl-gym"), "ok")


if __name__ == "__main__":
    main()
