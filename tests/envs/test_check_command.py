"""``turntree check env``: which laws hold, which fail and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from turntree.cli import cli
from turntree.envs.check import FORK_LAWS
from turntree.errors import ConfigError

FAULTY = '''
import gymnasium

class Faulty(gymnasium.Env):
    """Rewards come from a list that all environments share."""

    action_space = observation_space = gymnasium.spaces.Discrete(5)
    heard = []

    def __init__(self, start=0):
        self.start = start

    def get_state(self):
        return 0

    def set_state(self, state):
        pass

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.heard.clear()
        return 0, {}

    def step(self, action):
        self.heard.append(action)
        return 0, float(self.start + len(self.heard)), False, False, {}

gymnasium.register("faulty/Faulty-v0", entry_point="faulty_env:Faulty")
'''


def test_an_environment_that_keeps_the_laws() -> None:
    done = CliRunner().invoke(cli, ["check", "env", "FrozenLake-v1", "--turns", "3"])
    assert done.exit_code == 0, done.output
    assert "Forkable[replay: FrozenLakeEnv has no state methods" in done.output
    for law in FORK_LAWS:
        assert f"  {law:12} {'skipped' if law == 'cost' else 'holds'} " in done.output


def test_an_environment_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faulty_env.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["check", "env", "faulty/Faulty-v0", "--import", "faulty_env", "--arg", "start=2", "--law", "restore"]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1, done.output
    assert "rewound to turn 0: reward of turn 1: expected 3.0, found 9.0" in done.output
    assert f"look for: {FORK_LAWS['restore'][1]}" in done.output
    document = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    assert (document["ok"], document["laws"][0]["status"]) == (False, "fails")
    assert CliRunner().invoke(cli, [*command, "--how", "replay"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Frozenlake-v1"], "did you mean 'FrozenLake-v1'"),
        (["FrozenLake-v1", "--import", "no_such_module"], "--import no_such_module: ModuleNotFoundError"),
        (["FrozenLake-v1", "--arg", "nope=1"], "nope"),
        (["FrozenLake-v1", "--law", "isolatio"], "did you mean 'isolation'"),
        (["FrozenLake-v1", "--how", "state"], "none of the method pairs"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, ["check", "env", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert message in str(done.exception)
