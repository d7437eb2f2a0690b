"""``turntree explain`` on stored trees."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from turntree.cli import cli
from turntree.envs.task import Question
from turntree.errors import ConfigError, DataError
from turntree.trainers.credit import at2po, explain, rloo
from turntree.trainers.report.explain import built_in_rules, explain_stored
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree

Explain = Callable[..., str]


def tree(uid: str, index: int, *rewards: float) -> Tree:
    root = Node(observation_ids=(1,))
    for ordinal, reward in enumerate(rewards):
        root.add_child(Node(ordinal=ordinal, turn_ids=(2,), logprobs=(-1.0,), entropy=1.0 + ordinal, reward=reward,
                            status="answered"))  # fmt: skip
    return Tree(root, uid, index, task=Question(id=uid, question=f"Who is {uid}?", golden_answers=("x",)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that trained with at2po(weights="softmax"): three prompts of two trees in step 2, one in step 1."""
    config = {"algorithm": {"credit": "turntree.trainers.credit:at2po", "credit_args": {"weights": "softmax"}}}
    folder = RunFolder.create(tmp_path / "run", config)
    store = TreeStore(folder.trees)
    store.write(1, [Group("early", [tree("early", 0, 0.0, 1.0)])])
    groups = [Group(uid, [tree(uid, 0, *rewards[:3]), tree(uid, 1, *rewards[3:])]) for uid, rewards in {
        "dull": (0.0, 0.0, 0.0, 0.0, 0.0), "lively": (0.0, 1.0, 0.5, 1.0), "small": (0.0, 1.0, 0.5),
    }.items()]  # fmt: skip
    store.write(2, groups)
    return folder.path


@pytest.fixture
def explained(run: Path) -> Explain:
    def call(path: Path = run, **options: object) -> str:
        defaults: dict[str, object] = {"credit": None, "arguments": {}, "step": None, "index": None}
        return explain_stored(path, **{**defaults, **options})  # type: ignore[arg-type]

    return call


def stored(run: Path, uid: str, step: int = 2) -> Group:
    return next(group for group in TreeStore(run / "trees").groups(step) if group.uid == uid)


def test_the_runs_own_rule_on_the_prompt_that_says_most(run: Path, explained: Explain) -> None:
    text = explained()
    heading, _, rest = text.partition("\n")
    assert heading == "step 2, prompt lively, 2 trees: Who is lively?"
    assert rest == explain(stored(run, "lively"), at2po, weights="softmax")
    assert rest != explain(stored(run, "lively"), at2po)
    assert "tree 1" in rest


def test_arguments_go_before_those_of_the_run(run: Path, explained: Explain) -> None:
    assert explain(stored(run, "lively"), at2po) in explained(arguments={"weights": "linear"})


def test_another_rule_takes_no_arguments_of_the_run(run: Path, explained: Explain) -> None:
    assert explain(stored(run, "lively"), rloo) in explained(credit="rloo")
    assert explain(stored(run, "lively"), at2po) in explained(credit="at2po")
    assert explain(stored(run, "lively"), at2po) in explained(credit="turntree.trainers.credit:at2po")


@pytest.mark.parametrize(("index", "uid"), [(0, "dull"), (1, "dull"), (2, "lively"), (5, "small")])
def test_prompt_is_counted_as_view_lists_trees(run: Path, explained: Explain, index: int, uid: str) -> None:
    assert explain(stored(run, uid), at2po, weights="softmax") in explained(index=index)


def test_step_and_file_name_the_same_trees(run: Path, explained: Explain) -> None:
    early = explained(step=1)
    assert "prompt early, 1 trees" in early
    assert explained(TreeStore(run / "trees").file(1)) == early


def test_a_file_outside_a_run_needs_a_rule(run: Path, explained: Explain, tmp_path: Path) -> None:
    alone = tmp_path / "copy.jsonl.zst"
    alone.write_bytes(TreeStore(run / "trees").file(1).read_bytes())
    with pytest.raises(ConfigError, match=r"lies in no run folder.*--credit"):
        explained(alone)
    assert "A(" in explained(alone, credit="grpo")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"credit": "at2pO"}, ConfigError, r"unknown --credit 'at2pO' \(did you mean 'at2po'\?\); valid: .*grpo"),
        ({"credit": "nowhere_at_all:rule"}, ConfigError, r"--credit=nowhere_at_all:rule: cannot import module"),
        ({"arguments": {"weigths": 1}}, ConfigError, r"argument of --credit=.*'weigths' \(did you mean 'weights'\?\)"),
        ({"arguments": {"weights": "cubic"}}, ConfigError, r"weights must be"),
        ({"credit": "grpo", "arguments": {"eps": "tiny"}}, ConfigError, r"--credit=grpo with {'eps': 'tiny'} failed: "),
        ({"index": 6}, DataError, r"step 2 holds trees 0 to 5, found --prompt 6; see `turntree view --list`"),
        ({"step": 7}, DataError, r"no trees of step 7 .* found 2 steps, 1 to 2"),
    ],
)
def test_what_cannot_be_explained(explained: Explain, options: dict[str, object], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        explained(**options)


def test_files_of_another_kind(run: Path, explained: Explain) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml is no file of a rollout store"):
        explained(run / "config.yaml")
    with pytest.raises(ConfigError, match="holds one step; leave --step=1 out"):
        explained(TreeStore(run / "trees").file(1), step=1)


def test_every_rule_of_turntree_has_a_name_and_an_explanation(explained: Explain) -> None:
    assert {"grpo", "rloo", "tree_grpo", "at2po"} <= built_in_rules().keys()
    assert not {"explain", "drop_small_groups", "normalise"} & built_in_rules().keys()
    for name in built_in_rules():
        assert f"\n{name}: group 'lively'" in explained(credit=name)


def test_the_command(run: Path, explained: Explain) -> None:
    result = CliRunner().invoke(cli, ["explain", str(run), "--step", "2", "--prompt", "5", "--arg", "eps=1e-3",
                                      "--arg", "weights=linear"])  # fmt: skip
    assert result.exit_code == 0
    assert result.output.rstrip() == explained(index=5, arguments={"eps": 1e-3, "weights": "linear"})
    wrong = CliRunner().invoke(cli, ["explain", str(run), "--arg", "eps"])
    assert isinstance(wrong.exception, ConfigError)
    assert "not of the form key=value" in str(wrong.exception)


def test_explaining_loads_no_torch(run: Path) -> None:
    code = (
        "import sys; from turntree.cli import cli; cli.main(sys.argv[1:], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, "explain", str(run)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Who is lively?" in done.stdout
