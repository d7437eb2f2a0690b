"""The arithmetic of ``turntree plan``: against models of transformers, tensors that are kept and trees that grew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.tokenizer import ByteTokenizer
from turntree.cli import cli
from turntree.errors import CapacityError, ConfigError, DataError
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.forward import packed_logprobs
from turntree.trainers.packing import column, pack_groups
from turntree.trainers.planning.machine import Machine, gpu_memory
from turntree.trainers.planning.memory import activation_bytes, trainer_items
from turntree.trainers.planning.models import KNOWN, ModelShape, model_shape
from turntree.trainers.planning.plan import plan_run
from turntree.trainers.planning.tokens import Play, play_of, step_tokens
from turntree.trainers.tree import Group, Node, Tree

GB = 10**9
H100 = Machine(2000 * GB, 128, 8, 80 * GB)


def config_of(shape: ModelShape) -> Any:
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    kind: Any = Qwen2Config if shape.biased else Qwen3Config if shape.normed else LlamaConfig
    return kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=4096,
    )


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-4B", "Llama-3.2-3B", "Qwen2.5-7B", "SmolLM2-135M"])
def test_weights_are_counted_as_transformers_has_them(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = KNOWN[name]
    config = config_of(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    config.save_pretrained(tmp_path)
    read = model_shape(str(tmp_path))
    assert read.parameters == shape.parameters
    assert read.kv_values() == shape.kv_values()


def test_models_have_names_and_folders(tmp_path: Path) -> None:
    assert model_shape("Qwen/Qwen3-4B-Instruct") is KNOWN["Qwen3-4B"]
    assert round(KNOWN["Qwen2.5-3B"].parameters / 1e9, 2) == 3.09
    with pytest.raises(ConfigError, match="Did you mean 'Qwen3-4B'"):
        model_shape("Qwen3-4")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(DataError, match=r"not the configuration of a decoder .*KeyError"):
        model_shape(str(tmp_path))


def chain(turns: int, *, turn: int = 40, observation: int = 60, prompt: int = 100, leaves: int = 3) -> Group:
    root = Node(observation_ids=(5,) * prompt)
    for ordinal in range(leaves):
        node = root
        for t in range(turns):
            last = t == turns - 1
            node = node.add_child(
                Node(
                    ordinal=ordinal if t == 0 else 0,
                    turn_ids=(7,) * turn,
                    logprobs=(-1.0,) * turn,
                    observation_ids=() if last else (9,) * observation,
                    status="answered" if last else "open",
                    reward=float(ordinal) if last else None,
                )
            )
    return Group("g", [Tree(root, "g")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [
        ModelShape("llama", 512, 288, 3, 9, 3, 32, 768, True),
        ModelShape("qwen2", 512, 256, 3, 8, 2, 32, 512, True, biased=True),
        ModelShape("qwen3", 512, 256, 3, 8, 2, 64, 512, True, normed=True),
    ],
    ids=lambda s: s.name,
)
def test_tensors_kept_for_the_backward_pass_are_those_that_are_counted(shape: ModelShape, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(shape)).to(dtype).eval()
    (pack,) = pack_groups([chain(4)], max_pack_tokens=100_000)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        packed_logprobs(model, pack)
    tokens, targets = len(column(pack, "tokens", "ids")), int(column(pack, "tokens", "loss_mask").sum())
    logits = targets * shape.vocab * dtype.itemsize  # what else the projection takes is gone by then
    measured = sum(size for size, _ in kept.values()) - logits
    counted = activation_bytes(shape, tokens, dtype.itemsize)
    assert counted == pytest.approx(measured, rel=0.08)


def test_moments_are_those_of_the_optimiser() -> None:
    from transformers import AutoModelForCausalLM

    shape = ModelShape("llama", 512, 64, 2, 4, 2, 16, 128, True)
    model = AutoModelForCausalLM.from_config(config_of(shape))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.numel() > 1)
    config = compose([])
    items = {i.name: i.size for i in trainer_items(config, shape, step_tokens(config, PLAY), ranks=1, gpu=False)}
    assert items["moments"] == held
    assert items["weights"] == items["gradients"] == sum(p.nbytes for p in model.parameters())


# Tokens ---------------------------------------------------------------------------------------------------------------

PLAY = Play(4, 30, 50, 100)


@pytest.mark.parametrize("algorithm", ["grpo", "tree_grpo", "at2po"])
def test_tokens_of_a_step_are_those_of_the_trees(algorithm: str) -> None:
    """Every turn searches until the last one, which is forced to answer: the planned shape, grown."""
    from turntree.envs.search_qa import Limits as Rules
    from turntree.envs.search_qa import SearchQACore
    from turntree.envs.task import Question
    from turntree.search_backend.bm25 import BM25Backend
    from turntree.search_backend.passage import Passage
    from turntree.trainers.build import growth_plan
    from turntree.trainers.metrics import tree_metrics
    from turntree.trainers.rollout import Limits, Prompt, grow

    config = compose([f"algorithm={algorithm}", "trainer.prompts_per_step=6", "env.max_turns=4"])
    core = SearchQACore(BM25Backend([Passage("0", "River", "The river of the north.")]), limits=Rules(max_turns=4))
    tokenizer = ByteTokenizer()
    rollout = grow(
        [Prompt(f"p{i}", Question(f"q{i}", "Where is the river?", ("north",))) for i in range(6)],
        core=core,
        engine=ScriptedEngine(lambda context, seed: "<search>river</search>", tokenizer),
        dialogue=Dialogue(tokenizer),
        plan=growth_plan(config.algorithm, vocab_size=300),
        sampling=SamplingParams(64, 1.0, stop=tuple(core.stop)),
        limits=Limits(max_turn_tokens=64, max_context_tokens=20_000),
    )
    trees = [tree for group in rollout.groups for tree in group.trees]
    turns = trees[0].leaves()[0].trajectory()
    observed = sum(len(node.observation_ids) for node in turns) / 3  # they differ: the last one says that it is
    play = Play(4, len(turns[0].turn_ids), observed, len(trees[0].root.observation_ids))
    tokens = step_tokens(config, play)
    found = tree_metrics(trees)
    assert tokens.trajectories == rollout.stats.trajectories
    assert tokens.trees == len(trees)
    assert tokens.rows == pytest.approx(found["tree/row_tokens"], rel=0.02)
    # Where expansions start is drawn; their mean is what is planned.
    tolerance = 0.02 if algorithm == "grpo" else 0.25
    assert tokens.generated == pytest.approx(rollout.stats.generated_tokens, rel=tolerance)
    assert tokens.unique == pytest.approx(found["tree/unique_tokens"], rel=tolerance)


def test_a_full_context_bounds_everything() -> None:
    config = compose(["algorithm=grpo", "sampling.max_context_tokens=500", "trainer.prompts_per_step=1"])
    tokens = step_tokens(config, Play(10, 100, 100, 100))
    assert tokens.longest == 500
    assert tokens.rows == tokens.trajectories * 500


def test_what_is_not_said_of_an_episode_follows_from_the_limits() -> None:
    config = compose(["sampling.max_turn_tokens=100", "env.max_observation_tokens=60", "env.max_turns=3"])
    assert play_of(config) == Play(3.0, 50.0, 30.0, 256.0)
    assert play_of(config, turns=2, turn_tokens=10).turn_tokens == 10


# Plans ----------------------------------------------------------------------------------------------------------------

PRESETS: dict[str, tuple[str, Machine, int | None]] = {
    "one_cpu": ("SmolLM2-135M", Machine(16 * GB, 4), None),
    "one_gpu": ("Qwen3-1.7B", Machine(200 * GB, 16, 1, 80 * GB), None),
    "at2po_8gpu": ("Qwen3-4B", H100, None),
    "tree_grpo_8gpu": ("Qwen2.5-3B", H100, None),
    "several_machines": ("Qwen3-8B", Machine(2000 * GB, 128, 8, 80 * GB, 2), None),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_the_machines_they_are_for(preset: str) -> None:
    model, machine, ranks = PRESETS[preset]
    config = compose([f"experiment={preset}"])
    plan = plan_run(config, model_shape(model), machine, play_of(config), ranks=ranks)
    assert plan.fits, plan.problems
    text = (Path(__file__).parents[3] / "configs" / "experiment" / f"{preset}.yaml").read_text(encoding="utf-8")
    assert f"turntree plan experiment={preset} --model {model}" in text


def test_the_papers_settings() -> None:
    c = compose(["experiment=at2po_8gpu"])
    a = c.algorithm
    assert (a.chains, a.rounds, a.expansions, c.trainer.prompts_per_step, c.trainer.steps) == (10, 2, 6, 64, 240)
    assert (c.env.max_searches, c.sampling.max_turn_tokens, c.trainer.learning_rate) == (6, 6192, 1e-6)
    t = compose(["experiment=tree_grpo_8gpu"])
    assert (t.trainer.prompts_per_step, t.trainer.prompts_per_update, t.env.max_searches) == (512, 64, 3)
    assert (t.algorithm.trees, t.algorithm.chains, t.algorithm.expansions) == (2, 1, 2)


def test_what_does_not_fit_gets_changes_that_do() -> None:
    config = compose(["algorithm=tree_grpo", "trainer.device=cuda", "trainer.max_pack_tokens=16384"])
    small = Machine(200 * GB, 16, 1, 24 * GB)
    shape = model_shape("Qwen2.5-0.5B")
    plan = plan_run(config, shape, small, play_of(config))
    assert not plan.fits
    assert "GPU of the training rank" in plan.problems[0]
    assert plan.changes
    again = compose(
        ["algorithm=tree_grpo", "trainer.device=cuda", "trainer.max_pack_tokens=16384", *words(plan.changes)]
    )
    assert plan_run(again, shape, small, play_of(again)).fits
    for left in range(len(plan.changes)):  # none of them is idle
        fewer = [c for i, c in enumerate(plan.changes) if i != left]
        less = compose(["algorithm=tree_grpo", "trainer.device=cuda", "trainer.max_pack_tokens=16384", *words(fewer)])
        assert not plan_run(less, shape, small, play_of(less)).fits


@pytest.mark.parametrize(
    ("gpus", "change"),
    [(4, "trainer.ranks=2"), (1, "cluster=local trainer.ranks=1 engine.gpu_memory_utilization=0.3")],
)
def test_a_smaller_machine_gets_fewer_ranks_and_workers(gpus: int, change: str) -> None:
    preset, shape, machine = "experiment=at2po_8gpu", model_shape("Qwen3-1.7B"), Machine(400 * GB, 16, gpus, 80 * GB)
    config = compose([preset])
    plan = plan_run(config, shape, machine, play_of(config))
    assert "8 GPUs are asked for (4 ranks, 4 workers)" in plan.problems[0]
    assert change in plan.changes
    again = compose([preset, *words(plan.changes)])
    assert plan_run(again, shape, machine, play_of(again)).fits
    under_torchrun = plan_run(config, shape, machine, play_of(config), ranks=4)
    assert under_torchrun.changes == ()  # how many there are is not turntree's to say


def test_where_nothing_helps_there_is_no_advice() -> None:
    config = compose(["experiment=at2po_8gpu"])
    plan = plan_run(config, model_shape("Qwen3-4B"), Machine(64 * GB, 16), play_of(config))
    assert not plan.fits
    assert (plan.changes, plan.smaller) == ((), "")
    command = ["plan", "experiment=at2po_8gpu", "--model", "Qwen3-4B", "--gpus", "0", "--memory", "64GB"]
    said = CliRunner().invoke(cli, command).output
    assert "no setting of one run makes it fit" in said
    assert "it fits with" not in said


def words(changes: tuple[str, ...] | list[str]) -> list[str]:
    return [word for change in changes for word in change.split()]


def test_what_nothing_makes_fit_gets_a_smaller_model() -> None:
    config = compose(["algorithm=tree_grpo", "trainer.device=cuda"])
    plan = plan_run(config, model_shape("Llama-3.1-70B"), Machine(64 * GB, 16, 1, 24 * GB), play_of(config))
    assert plan.smaller in KNOWN
    assert KNOWN[plan.smaller].parameters < 10e9


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=ray", "cluster.workers=9", "cluster.gpus_per_worker=1"], "9 GPUs are asked for"),
        (["sampling.max_context_tokens=65536"], "has 40960 positions"),
        (["trainer.max_pack_tokens=512", "sampling.max_turn_tokens=512"], "shorter than a trajectory"),
        (["cluster=ray", "cluster.workers=200"], "200 CPUs are asked for"),
        (["engine=vllm", "trainer.device=cuda", "engine.gpu_memory_utilization=0.1"], "leaves room for"),
    ],
)
def test_problems_besides_memory_are_named(overrides: list[str], message: str) -> None:
    config: RunConfig = compose(["model.dtype=bfloat16", *overrides])
    plan = plan_run(config, model_shape("Qwen3-4B"), H100, play_of(config))
    assert any(message in problem for problem in plan.problems), plan.problems


def test_an_engine_that_sleeps_and_the_update_take_turns() -> None:
    options = ["experiment=one_gpu", "engine.gpu_memory_utilization=0.5", "engine.sleep="]
    awake, asleep = (
        plan_run(
            compose([*options[:2], options[2] + flag]), model_shape("Qwen3-1.7B"), H100, play_of(compose(options[:2]))
        )
        for flag in ("false", "true")
    )
    gpu, turns = awake.places[0], asleep.places[0]
    sizes = {item.name: item.size for item in gpu.items}
    smaller = min(sizes["activations and logits"], sizes["vLLM (gpu_memory_utilization)"])
    assert sum(sizes.values()) - sum(item.size for item in turns.items) == pytest.approx(smaller)
    waiting = [item for place in asleep.places[1:] for item in place.items if "sleeps" in item.name]
    assert sum(item.size for item in waiting) == pytest.approx(2 * model_shape("Qwen3-1.7B").parameters)


def test_gpus_by_name_or_size() -> None:
    assert gpu_memory("H100") == gpu_memory("80") == 80 * GB
    with pytest.raises(ConfigError, match="Did you mean 'h100'"):
        gpu_memory("h10")
    with pytest.raises(ConfigError, match="without their memory"):
        Machine(GB, 1, gpus=2)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_says_what_fits_and_what_does_not() -> None:
    run = CliRunner()
    good = run.invoke(cli, ["plan", "experiment=at2po_8gpu", "--model", "Qwen3-4B", "--gpus", "8", "--gpu", "h100"])
    assert good.exit_code == 0, good.output
    assert "1408 trajectories in 64 trees" in good.output
    assert good.output.rstrip().endswith("it fits")
    bad = run.invoke(cli, ["plan", "trainer.device=cuda", "--model", "Qwen3-8B", "--gpu", "24"])
    assert isinstance(bad.exception, CapacityError)
    assert "does not fit: GPU of the training rank" in bad.output
    document = run.invoke(
        cli, ["plan", "experiment=at2po_8gpu", "--model", "Qwen3-4B", "--gpus", "8", "--gpu", "80", "--json"]
    )
    assert json.loads(document.output)["fits"] is True
    with pytest.raises(ConfigError, match="say which model"):
        run.invoke(cli, ["plan"], catch_exceptions=False)
