"""Any override, saved configuration or launch script gives a configuration, or an error that is the user's to read."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.fuzz.material import Tape, fuzz, json_like, text_of
from turntree.errors import ConfigError, TurnTreeError
from turntree.trainers.compose import _checked, compose, config_groups, read_config
from turntree.trainers.config import RunConfig, documented_options
from turntree.trainers.import_config import import_config

FOLDER = tempfile.TemporaryDirectory(prefix="turntree-fuzz-")
OPTIONS = tuple(key for key, _, _ in documented_options())
GROUPS = tuple(config_groups())
KEYS = (
    *OPTIONS, *GROUPS, "trainer.stepz", "algorithm.credit_args.kappa", "++trainer.steps",
    "~algorithm.credit_args.x", "+x",
    "hydra.run.dir", "hydra/launcher", "_target_", "trainer", "env.args._target_", "trainer.steps.x",
)  # fmt: skip
VALUES = (
    "", "1", "-1", "1e9", "true", "null", "none", "at2po", "nan", "inf", "[]", "[1,2]", "{}", "{a: 1}", "{a:",
    "'", '"', "\\", "'a",
    "${oc.env:HOME}", "${trainer.steps}", "${x", "${now:%Y}", "$(id)", "a=b", "a,b", "range(1,3)",
    "choice(a,b)", "glob(*)", "int(x)",
    "!!python/object/apply:os.system [id]", "~/x", "a b", "#", "1_000", "0x10", "[" * 300, "{a:" * 100,
    "'" * 20, "\\'" * 9,
)  # fmt: skip


def override_of(tape: Tape) -> str:
    op = tape.byte() % 16
    if op == 0:
        return text_of(tape.some(12), (*KEYS[:20], *VALUES, "="))
    value = tape.pick(VALUES) if op < 8 else text_of(tape.some(10), VALUES)
    return f"{KEYS[tape.number() % len(KEYS)]}={value}"


@fuzz("configs", size=32, share=30)
def test_any_override_is_checked(tape: Tape) -> None:
    override = override_of(tape)
    try:
        checked = _checked(override)
    except ConfigError:
        return
    key, _, _ = override.partition("=")
    assert key.lstrip("+~") in checked


@fuzz("configs", size=48, share=0.3, each=4, least=4)
def test_any_overrides_give_a_configuration_or_say_why_not(tape: Tape) -> None:
    overrides = [override_of(tape) for _ in range(1 + tape.byte() % 2)]
    try:
        config = compose(overrides)
    except TurnTreeError:
        return
    assert isinstance(config, RunConfig)
    assert read_config(asdict(config)) == config


@fuzz("configs", size=48, share=6)
def test_any_text_arrives_as_it_was_written(tape: Tape) -> None:
    """Paths and prompts of any script: nothing of them is taken for Hydra's own signs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    text = text_of(tape, VALUES, most=12)
    if (
        text[:1] in ("'", '"', "~")
        or "${" in text
        or text != text.strip()
        or text.lower() in ("", "null", "nan", "inf")
    ):
        return
    assert OverridesParser.create().parse_override(_checked(f"model.path={text}")).value() == text


@fuzz("configs", size=200, share=0.5, each=6, least=12)
def test_any_saved_configuration_is_read_or_refused(tape: Tape) -> None:
    keys = (*OPTIONS, *GROUPS, *(key.rpartition(".")[2] for key in OPTIONS))
    value = json_like(tape, keys=keys, texts=VALUES)
    saved = value if isinstance(value, dict) else {tape.pick(GROUPS): value}
    try:
        assert isinstance(read_config(saved), RunConfig)
    except TurnTreeError:
        return


SCRIPT = (
    "python3 -m verl.trainer.main_ppo ", "data.train_batch_size=512 ", "actor_rollout_ref.model.path=$MODEL ",
    "algorithm.adv_estimator=gae ",
    "export A=1\n", "A=(x y)\n", "${A[@]} ", "$((1 + 2 ** 3)) ", "$((9**9**9)) ", "$[", "`id` ", "$(id) ",
    "if x; then\n", "fi\n", "<<EOF\n",
    "EOF\n", "'", '"', "\\\n", "|", "&&", ";", "{", "}", "(", ")", "trainer.total_epochs=15 ",
    "+ray_init.num_cpus=1 ", "\n", "# x\n", "${A:-b}",
)  # fmt: skip


@fuzz("configs", size=64, share=2)
def test_any_launch_script_is_translated_or_refused(tape: Tape) -> None:
    path = Path(FOLDER.name, tape.pick(("run.sh", "run.yaml")))
    path.write_bytes(text_of(tape, SCRIPT).encode("utf-8", "replace"))
    try:
        found = import_config(path)
    except TurnTreeError:
        return
    assert found.lines()
    assert found.command()
    assert found.yaml()


@pytest.mark.parametrize(
    "expression", ["9**9**9", "(" * 500 + "1" + ")" * 500, "1/0", "-" * 2000 + "1", "2**64**64**64", "1" * 5000]
)
def test_arithmetic_of_scripts_ends(expression: str) -> None:
    path = Path(FOLDER.name, "arithmetic.sh")
    path.write_text(f"python -m x.main data.a=$(({expression})) actor_rollout_ref.b=1 data.c=2\n", encoding="utf-8")
    assert import_config(path).entries
