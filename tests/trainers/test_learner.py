"""The training loop as a whole: resuming, stopping, skipped updates, budgets, refusals."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict

import turntree.trainers.forward
from turntree.envs.datasets import load_questions
from turntree.errors import CheckpointError, ConfigError, DataError
from turntree.trainers.checkpoint import best_checkpoint, latest_checkpoint, load_checkpoint
from turntree.trainers.config import RunConfig
from turntree.trainers.credit import grpo
from turntree.trainers.learner import PolicyStepper, TrainResult, train
from turntree.trainers.metrics import TIMING
from turntree.trainers.objectives import PolicyObjective
from turntree.trainers.packing import pack_groups, table, write_advantages
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group

MakeConfig = Callable[..., RunConfig]
MakeGroups = Callable[..., list[Group]]

FULL = (
    "trainer.epochs=2",
    "trainer.prompts_per_update=2",
    "trainer.max_pack_tokens=300",
    "trainer.warmup_steps=6",
    "trainer.eval_every=2",
    "trainer.eval_questions=5",
    "algorithm.kl_coef=0.05",
)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def equal_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rows(run: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock."""
    return [{k: v for k, v in row.items() if not k.startswith(TIMING)} for row in read_metrics(run / "metrics.jsonl")]


def state(run: Path) -> tuple[int, bytes]:
    """Step and optimizer moments of the newest checkpoint."""
    found = latest_checkpoint(run / "checkpoints")
    assert found is not None
    return load_checkpoint(found).step, (found / "state.safetensors").read_bytes()


def trees(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "trees").iterdir()}


def evaluations(run: Path) -> dict[str, str]:
    return {str(f.relative_to(run)): f.read_text() for f in sorted((run / "validation").rglob("*.json*"))}


def uids(run: Path) -> list[list[str]]:
    store = TreeStore(run / "trees")
    return [sorted({stored.tree.prompt_uid for stored in store.read(step)}) for step in store.steps()]


@pytest.fixture(scope="module")
def straight(bed: Any, make_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps with everything switched on, never stopped."""
    out = tmp_path_factory.mktemp("straight") / "run"
    train(make_config(*FULL, f"env.dev_questions={bed.world}", "trainer.steps=4", f"out={out}"))
    return out


def assert_equal_runs(a: Path, b: Path) -> None:
    assert uids(a) == uids(b)
    assert rows(a) == rows(b)
    assert trees(a) == trees(b)
    assert evaluations(a) == evaluations(b)
    assert state(a) == state(b)
    assert equal_weights(weights(a), weights(b))


def test_train_is_a_public_name_that_takes_overrides(bed: Any, tmp_path: Path) -> None:
    result = turntree.trainers.train([*bed.args, "trainer.steps=1", f"out={tmp_path / 'run'}"])
    assert isinstance(result, turntree.trainers.TrainResult)
    assert (result.folder, result.progress.step) == (tmp_path / "run", 1)
    with pytest.raises(AttributeError, match="trian"):
        getattr(turntree.trainers, "trian")  # noqa: B009


# Resume ---------------------------------------------------------------------------------------------------------------


def test_resume_is_never_stopped(bed: Any, make_config: MakeConfig, straight: Path, tmp_path: Path) -> None:
    options = (*FULL, f"env.dev_questions={bed.world}", f"out={tmp_path / 'run'}")
    first = train(make_config(*options, "trainer.steps=2"))
    assert (first.progress.step, first.interrupted) == (2, False)
    second = train(make_config(*options, "trainer.steps=4", "resume=true"))
    assert second.progress.step == 4
    assert_equal_runs(straight, tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").load_config()["trainer"]["steps"] == 4


def test_the_straight_run_had_something_to_lose(straight: Path, bed: Any) -> None:
    """Several packs, moving weights, a reference that is left behind, mixed rewards, searches."""
    last = rows(straight)[-1]
    assert last["actor/kl_loss"] > 1e-4
    assert last["tree/ratio_mean_token"] != 1.0
    assert last["tree/mixed_groups"] > 0
    assert last["total/tool_calls"] > 0
    assert last["total/updates"] == 4 * 2 * 2
    assert last["total/skipped_updates"] == 0
    assert not equal_weights(weights(straight), load_file(bed.model / "model.safetensors"))
    assert rows(straight)[0]["actor/lr"] < 1e-3 == last["actor/lr"]


def test_resuming_twice_shows_the_same_prompts(make_config: MakeConfig, straight: Path, tmp_path: Path) -> None:
    options = ("trainer.eval_every=0", f"out={tmp_path / 'run'}", "resume=true")
    for steps in (1, 3, 4):
        train(make_config(*options, f"trainer.steps={steps}"))
    assert uids(tmp_path / "run") == uids(straight)


def test_resume_of_a_finished_run_changes_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(f"out={tmp_path / 'run'}")
    train(config)
    before = (rows(tmp_path / "run"), trees(tmp_path / "run"), state(tmp_path / "run"))
    again = train(dataclasses.replace(config, resume=True))
    assert (again.progress.step, again.interrupted) == (2, False)
    assert (rows(tmp_path / "run"), trees(tmp_path / "run"), state(tmp_path / "run")) == before


def test_what_came_after_the_checkpoint_is_dropped(bed: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    """Killed after the metrics of a step and before its checkpoint: the step is done again, once."""
    run = tmp_path / "run"
    options = (f"out={run}", f"env.dev_questions={bed.world}", "trainer.eval_questions=2", "trainer.eval_every=1")
    train(make_config(*options, "trainer.steps=3", "trainer.keep_checkpoints=3", "trainer.save_every=1"))
    whole = (rows(run), trees(run), evaluations(run))
    for checkpoint in sorted((run / "checkpoints").glob("step-*"))[1:]:
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    stray = run / "validation" / "step-000009"
    stray.mkdir()
    train(make_config(*options, "trainer.steps=3", "resume=true"))
    assert (rows(run), trees(run), evaluations(run)) == whole
    assert not stray.exists()


def test_same_seed_same_run_and_another_seed_another(make_config: MakeConfig, tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        train(make_config(f"out={tmp_path / name}", f"seed={seed}"))
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert equal_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1", "seed"),
        ("trainer.learning_rate=1e-4", "trainer.learning_rate"),
        ("algorithm.clip_low=0.1", "algorithm.clip_low"),
        ("env.max_turns=3", "env.max_turns"),
        ("sampling.temperature=0.7", "sampling.temperature"),
    ],
)
def test_resume_with_another_configuration_is_refused(
    make_config: MakeConfig, straight: Path, override: str, key: str
) -> None:
    before = state(straight), (straight / "config.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=key) as caught:
        train(make_config(*FULL, "trainer.eval_every=0", override, f"out={straight}", "resume=true"))
    assert str(caught.value).count(" there, ") == 1, "only the key that differs is named"
    assert (state(straight), (straight / "config.yaml").read_bytes()) == before


def test_a_run_folder_in_use_is_refused(make_config: MakeConfig, straight: Path) -> None:
    with pytest.raises(CheckpointError, match="resume=true"):
        train(make_config(f"out={straight}"))


# Stopping -------------------------------------------------------------------------------------------------------------


def interrupted_run(config: RunConfig, *, at: int, times: int = 1) -> TrainResult:
    """Train, and press Ctrl-C ``times`` times while step ``at`` ends."""

    def press(step: int, metrics: dict[str, float]) -> None:
        if step == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return train(config, on_step=press)


def test_ctrl_c_saves_the_step_that_was_finished(bed: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = (f"out={run}", f"env.dev_questions={bed.world}", "trainer.eval_questions=3", "trainer.steps=3")
    handler = signal.getsignal(signal.SIGINT)
    result = interrupted_run(make_config(*options), at=1)
    assert (result.progress.step, result.interrupted) == (1, True)
    assert "not finished: step 1 of" in (result.folder / "report.html").read_text(encoding="utf-8")
    assert state(run)[0] == 1
    assert result.evaluation is None, "Ctrl-C must not start a validation"
    assert signal.getsignal(signal.SIGINT) == handler
    finished = train(make_config(*options, "resume=true"))
    assert (finished.progress.step, finished.interrupted) == (3, False)
    straight = tmp_path / "straight"
    train(make_config(*options, f"out={straight}"))
    assert_equal_runs(straight, run)


def test_the_second_ctrl_c_stops_at_once(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(f"out={tmp_path / 'run'}", "trainer.steps=3", "trainer.save_every=1")
    with pytest.raises(KeyboardInterrupt):
        interrupted_run(config, at=2, times=2)
    assert state(tmp_path / "run")[0] == 2
    assert not (tmp_path / "run" / "model").exists()
    assert train(dataclasses.replace(config, resume=True)).progress.step == 3


def test_ctrl_c_in_the_last_step_is_no_interruption(make_config: MakeConfig, tmp_path: Path) -> None:
    result = interrupted_run(make_config(f"out={tmp_path / 'run'}"), at=2)
    assert (result.progress.step, result.interrupted) == (2, False)


def test_max_generated_tokens_stops_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(f"out={tmp_path / 'run'}", "trainer.steps=50", "trainer.max_generated_tokens=150")
    result = train(config)
    tokens = [row["total/generated_tokens"] for row in rows(tmp_path / "run")]
    assert tokens[-1] >= 150
    assert all(before < 150 for before in tokens[:-1])
    assert (result.progress.step, result.interrupted) == (len(tokens), False)
    assert state(tmp_path / "run")[0] == len(tokens)
    assert train(dataclasses.replace(config, resume=True)).progress.step == len(tokens)


# Updates --------------------------------------------------------------------------------------------------------------


def stepper_with(tiny_llama: Any, **options: Any) -> PolicyStepper:
    model = copy.deepcopy(tiny_llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return PolicyStepper(PolicyObjective(model), optimizer, **{"max_grad_norm": 1.0, "warmup_steps": 0, **options})


def batch_of(groups: list[Group]) -> TensorDict:
    packs = pack_groups(groups, max_pack_tokens=100)
    write_advantages(packs, grpo(groups))
    batch = TensorDict({}, batch_size=[])
    batch.set_non_tensor("packs", packs)
    return batch


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_update(
    tiny_llama: Any, random_groups: MakeGroups, poison: float
) -> None:
    stepper, batch = stepper_with(tiny_llama), batch_of(random_groups(3))
    trainer: Any = None
    stepper.step(trainer, batch)
    before = copy.deepcopy((stepper.objective.state_dict(), stepper.optimizer.state_dict()["state"]))
    bad = batch_of(random_groups(4))
    advantages = table(bad.get_non_tensor("packs")[0], "occurrences").get("advantage")
    advantages[0] = poison
    out = stepper.step(trainer, bad)
    assert not math.isfinite(float(out["grad_norm"]))
    assert (stepper.updates, stepper.skipped) == (2, 1)
    after = (stepper.objective.state_dict(), stepper.optimizer.state_dict()["state"])
    assert all(torch.equal(after[0][name], before[0][name]) for name in before[0])
    for number, moments in before[1].items():
        assert all(torch.equal(after[1][number][name], moments[name]) for name in moments)
    stepper.step(trainer, batch)
    assert (stepper.updates, stepper.skipped) == (3, 1)
    assert any(not torch.equal(stepper.objective.state_dict()[name], before[0][name]) for name in before[0])


def test_warm_up_is_linear_and_reports_are_means(tiny_llama: Any, random_groups: MakeGroups) -> None:
    stepper, trainer = stepper_with(tiny_llama, warmup_steps=4), cast("Any", None)
    rates, norms = [], []
    for seed in range(6):
        norms.append(float(stepper.step(trainer, batch_of(random_groups(seed)))["grad_norm"]))
        rates.append(stepper.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert stepper.take_metrics()["grad_norm"] == pytest.approx(np.mean(norms))
    assert stepper.take_metrics() == {}


def test_max_grad_norm_of_zero_does_not_clip(tiny_llama: Any, random_groups: MakeGroups) -> None:
    clipped, free = (stepper_with(tiny_llama, max_grad_norm=norm) for norm in (1e-9, 0.0))
    before = copy.deepcopy(free.objective.state_dict())
    for stepper in (clipped, free):
        stepper.optimizer.param_groups[0]["eps"] = 1.0  # steps proportional to the gradient
        stepper.step(cast("Any", None), batch_of(random_groups(3)))

    def moved(stepper: PolicyStepper) -> float:
        pairs = [(stepper.objective.state_dict()[name], before[name]) for name in before]
        return max(float((a - b).abs().max()) for a, b in pairs)

    assert moved(free) > 100 * moved(clipped)


def test_groups_that_all_fail_make_no_update(make_config: MakeConfig, bed: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("env.grammar=users_rules:OnlySearch", "search.backend=users_rules:Down", "env.tool_retries=0")
    result = train(make_config(*options, f"out={run}"))
    assert result.progress.step == 2
    assert result.progress.updates == 0
    last = rows(run)[-1]
    assert last["budget/dropped_groups"] == 4
    assert last["budget/failed"] == last["budget/trajectories"] == last["budget/error/RetrievalError/count"]
    assert last["critic/rewards/mean"] is None
    assert equal_weights(weights(run), load_file(bed.model / "model.safetensors"))
    stored = list(TreeStore(run / "trees").read(2))
    assert len(stored) == 8, "trees that taught nothing are still there to look at"
    assert not stored[0].advantages


def test_the_model_is_checked_on_the_first_batch(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = turntree.trainers.forward.packed_logprobs

    def off_by_a_bit(*args: Any, **kwargs: Any) -> Any:
        output = real(*args, **kwargs)
        return dataclasses.replace(output, logp=output.logp + 0.01)

    monkeypatch.setattr(turntree.trainers.forward, "packed_logprobs", off_by_a_bit)
    with pytest.raises(ConfigError, match="packed log-probs of LlamaForCausalLM differ"):
        train(make_config(f"out={tmp_path / 'a'}"))
    assert train(make_config(f"out={tmp_path / 'b'}", "trainer.check_packed=false")).progress.step == 2


# What a run records ---------------------------------------------------------------------------------------------------


def test_budget_is_what_was_made(make_config: MakeConfig, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "queries.log"
    train(
        make_config(
            f"out={run}",
            "search.backend=users_rules:Counting",
            f"search.args.log={log}",
            "algorithm.kept_leaves=2",
            "trainer.steps=3",
        )
    )
    metrics = rows(run)
    nodes = [n for stored in TreeStore(run / "trees").read() for n in stored.tree.nodes()]
    discarded = sum(row["budget/discarded_tokens"] for row in metrics)
    assert metrics[-1]["total/generated_tokens"] == sum(len(n.turn_ids) for n in nodes) + discarded
    assert metrics[-1]["total/tool_calls"] == sum("retrieved" in n.info for n in nodes) > 0
    assert metrics[-1]["total/trajectories"] == sum(n.is_leaf for n in nodes) == 3 * 4 * 6
    assert sum(row["budget/tool_attempts"] for row in metrics) == len(log.read_text().splitlines())
    assert sum(row["budget/pruned"] for row in metrics) == sum(n.pruned for n in nodes) == 3 * 4 * 2


def test_validation_samples_as_configured_and_disturbs_nothing(
    bed: Any, make_config: MakeConfig, tmp_path: Path
) -> None:
    dev = f"env.dev_questions={bed.world}"
    train(make_config(f"out={tmp_path / 'watched'}", dev, "trainer.eval_every=1", "trainer.eval_questions=7"))
    train(make_config(f"out={tmp_path / 'alone'}"))
    assert equal_weights(weights(tmp_path / "watched"), weights(tmp_path / "alone"))
    assert trees(tmp_path / "watched") == trees(tmp_path / "alone")
    folders = sorted((tmp_path / "watched" / "validation").iterdir())
    assert [folder.name for folder in folders] == ["step-000000", "step-000001", "step-000002"]
    for folder in folders:
        summary = json.loads((folder / "evaluation.json").read_text())
        assert summary["sampling"]["temperature"] == 0.0
        assert summary["sampling"]["max_tokens"] == 12
        assert summary["n"] == len((folder / "evaluation.jsonl").read_text().splitlines()) == 7
    assert [row["validation/n"] for row in rows(tmp_path / "watched")] == [7, 7]


def test_the_best_checkpoint_is_kept(bed: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = (f"env.dev_questions={bed.world}", "trainer.eval_every=1", "trainer.eval_questions=4")
    result = train(
        make_config(*options, f"out={run}", "trainer.steps=4", "trainer.save_every=50", "trainer.keep_checkpoints=1")
    )
    ems = [row["validation/em"] for row in rows(run)]
    assert result.progress.best_score == max(ems)
    assert result.progress.best_step == 1 + ems.index(max(ems))
    best = best_checkpoint(run / "checkpoints")
    assert best is not None
    assert load_checkpoint(best).step == result.progress.best_step
    exported = load_file(run / "best-model" / "model.safetensors")
    kept = load_file(best / "model.safetensors")
    assert all(torch.equal(exported[name], kept[name]) for name in exported)
    assert result.progress.best_step == 4 or any(
        not torch.equal(exported[name], value) for name, value in load_file(run / "model" / "model.safetensors").items()
    )


def test_a_scorer_replaces_the_reward(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(f"out={tmp_path / 'run'}", "reward.scorer=users_rules:constant", "trainer.steps=1"))
    (row,) = rows(tmp_path / "run")
    assert row["critic/rewards/mean"] == 0.25
    assert row["tree/mixed_groups"] == 0
    assert row["actor/pg_loss"] == 0


def test_a_finisher_writes_the_answers(make_config: MakeConfig, bed: Any, tmp_path: Path) -> None:
    """In training and in validation, also where the episode was truncated."""
    options = ("reward.finisher=users_rules:first_gold", f"env.dev_questions={bed.world}", "trainer.steps=1")
    train(make_config(*options, "trainer.eval_questions=6", f"out={tmp_path / 'run'}"))
    nodes = [leaf for stored in TreeStore(tmp_path / "run" / "trees").read(1) for leaf in stored.tree.leaves()]
    tasks = {q.id: q.golden_answers[0] for q in load_questions(bed.world / "questions.jsonl")}
    assert nodes
    assert all(leaf.info["answer"] in tasks.values() for leaf in nodes)
    where = tmp_path / "run" / "validation" / "step-000001"
    results = [json.loads(line) for line in (where / "evaluation.jsonl").read_text().splitlines()]
    assert [row["prediction"] for row in results] == [tasks[row["id"]] for row in results]
    assert {row["em"] for row in results} == {1.0}
    summary = json.loads((where / "evaluation.json").read_text())
    assert summary["finisher"] == "users_rules:first_gold"
    assert summary["normalizer"] == "squad"
    assert {"model", "questions", "max_turns", "max_context_tokens", "grammar", "env", "sampling"} <= summary.keys()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.credit_args.estimatr=intra", "algorithm.credit_args.*estimatr"),
        ("algorithm.credit=users_rules:no_such", "algorithm.credit.*no_such"),
        ("algorithm.expansion_args.alpha=1", "algorithm.expansion_args.*alpha"),
        ("env.grammar_args.colour=red", "env.grammar.*colour"),
        ("search.args.k2=1", "search.args.*k2"),
        ("reward.scorer=nowhere:f", "reward.scorer.*nowhere"),
        ("algorithm.credit_args.estimator=zzz", r"algorithm\.credit_args\.estimator=zzz.*sum, inter, intra"),
        (
            "algorithm.expansion=turntree.trainers.expansion:entropy algorithm.expansion_args.alpha=x",
            r"algorithm\.expansion_args\.alpha=x.*TypeError",
        ),
        ("reward.finisher=math:sqrt", r"reward\.finisher=math:sqrt"),
        ("trainer.eval_every=1", "env.dev_questions"),
        ("env.questions=''", "env.questions"),
    ],
)
def test_a_run_that_is_refused_leaves_no_folder(
    make_config: MakeConfig, tmp_path: Path, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        train(make_config(*override.split(), f"out={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_a_question_file_without_questions_is_refused(make_config: MakeConfig, bed: Any, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text("\n\n")
    options = (f"env.questions={tmp_path}", f"search.corpus={bed.world / 'corpus.jsonl'}")
    with pytest.raises(DataError, match=r"env\.questions.*at least one question"):
        train(make_config(*options, f"out={tmp_path / 'run'}"))
