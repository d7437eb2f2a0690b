"""Launch scripts in the style of the peers: what is translated, what differs, and that nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import DataError, MissingExtraError
from turntree.trainers.compose import compose
from turntree.trainers.import_config import Entry, Imported, import_config
from turntree.trainers.import_config.importing import translate
from turntree.trainers.import_config.shell import read_script

pytest.importorskip("tree_sitter_bash")

SEARCH_R1 = r"""
export GPUS=0,1   # a comment with a=b
export ROOT='corpora/my set'
# export MODEL=old/one
export MODEL=lab/model-3b
RUN_NAME=mine-$MODEL
HF_TOKEN=abc123

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    data.train_files="$ROOT/train.parquet" \
    data.val_files=$ROOT/test.parquet \
    data.train_batch_size=512 data.val_batch_size=256 \
    data.max_prompt_length=4096 \
    data.max_response_length=500 \
    data.max_start_length=2048 \
    data.max_obs_length=400 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.25 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.actor.ppo_mini_batch_size=320 \
    actor_rollout_ref.rollout.n_agent=5 \
    actor_rollout_ref.rollout.temperature=0.9 \
    actor_rollout_ref.actor.state_masking=true \
    actor_rollout_ref.actor.brand_new=7 \
    +trainer.val_only=false \
    trainer.save_freq=100 \
    trainer.save_freq=50 \
    trainer.test_freq=-1 \
    trainer.total_training_steps=200 \
    trainer.default_local_dir=ckpt/$(date +%s) \
    max_turns=2 \
    retriever.url="http://127.0.0.1:8000/retrieve" \
    retriever.topk=5 \
    2>&1 | tee $RUN_NAME.log
"""

TREE_GRPO = r"""
gpus=8
batch=$[$gpus * 64]
mini=$((gpus * 8))
m=2
ARGS=(
    actor_rollout_ref.rollout.tree_search=true
    actor_rollout_ref.rollout.ts_m=$m actor_rollout_ref.rollout.ts_n=3
    "actor_rollout_ref.rollout.ts_l=2"
    actor_rollout_ref.rollout.ts_k=4
)
if [ -n "$WANDB_API_KEY" ]; then
  export MODE=online
fi
ray job submit --address=http://127.0.0.1:8265 --runtime-env=env.yaml -- \
    python3 -m verl.trainer.main_ppo_format_ts \
    data.train_batch_size=$batch \
    data.train_files=train.parquet \
    algorithm.adv_estimator=tree_2norm \
    actor_rollout_ref.model.path=${MODEL:-models/base} \
    actor_rollout_ref.actor.policy_loss=turn \
    actor_rollout_ref.actor.optim.lr=$lr \
    actor_rollout_ref.actor.ppo_mini_batch_size=$mini \
    "${ARGS[@]}" \
    actor_rollout_ref.rollout.expand_mode=depth \
    algorithm.use_kl_in_reward=false \
    trainer.logger="['swanlab', 'console']" \
    reward_model.structure_format_score=0.3 \
    reward_model.final_format_score=0.1 \
    max_turns=3 $@
"""

ATPO = r"""
HERE="$( cd "$( dirname "${BASH_SOURCE[0]}" )" &> /dev/null && pwd )"
P=2000; R=6000
FILES=["data/train.parquet"]
python3 -m verl.trainer.main_ppo \
    --config-path=$HERE/config \
    --config-name=dr.yaml \
    algorithm.adv_estimator=grpo \
    algorithm.kl_ctrl.kl_coef=0.0 \
    data.train_files=${FILES} \
    data.train_batch_size=64 \
    data.max_prompt_length=${P} data.max_response_length=${R} \
    actor_rollout_ref.model.path=models/qwen \
    actor_rollout_ref.actor.policy_loss=gspo_turn \
    actor_rollout_ref.actor.clip_ratio_low=3e-3 \
    actor_rollout_ref.actor.clip_ratio_high=4e-3 \
    actor_rollout_ref.actor.enable_entropy_balanced_clipping=${UNSET_FLAG} \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2*(P+R))) \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=20 \
    actor_rollout_ref.rollout.initial_rollouts=10 \
    actor_rollout_ref.rollout.expansion_mode=entropy \
    actor_rollout_ref.rollout.expansion_iterations=2 \
    actor_rollout_ref.rollout.beam_size=6 \
    actor_rollout_ref.rollout.samples_per_tree=22 \
    actor_rollout_ref.rollout.entropy_weight=0.2 \
    actor_rollout_ref.rollout.leaf_value_norm=True \
    actor_rollout_ref.rollout.node_value_mode=child_softmax \
    actor_rollout_ref.rollout.node_adv_mode=diff_parent \
    ++actor_rollout_ref.rollout.tools.tool_instances.search.params.api_key=sk-12345 \
    custom_reward_function.path=$HERE/reward/deep_research_em.py \
    custom_reward_function.name=compute_score \
    trainer.total_epochs=5
"""

VERL = """
data:
  train_files: [a.parquet, b.parquet]
  train_batch_size: 32
  max_prompt_length: 1024
  max_response_length: 2048
algorithm:
  adv_estimator: grpo
  norm_adv_by_std_in_grpo: false
  use_kl_in_reward: true
  kl_ctrl: {type: fixed, kl_coef: 0.01}
  filter_groups: {enable: true, metric: acc, max_num_gen_batches: 4}
actor_rollout_ref:
  model: {path: "~/models/qwen"}
  actor:
    ppo_mini_batch_size: ${data.train_batch_size}
    policy_loss: {loss_mode: gspo}
    clip_ratio: 0.2
    loss_agg_mode: seq-mean-token-sum
    optim: {lr: 1e-6, lr_warmup_steps: 10}
  rollout:
    name: sglang
    n: 8
    top_p: 0.9
    response_length: ${oc.select:data.max_response_length,512}
    multi_turn: {enable: true, max_assistant_turns: 5, format: hermes}
reward_model:
  overlong_buffer: {enable: true, len: 512, penalty_factor: 0.5}
trainer: {total_training_steps: 100, device: cpu}
"""


def translated(tmp_path: Path, text: str, name: str = "train.sh") -> Imported:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return import_config(path)


def options(found: Imported) -> dict[str, str]:
    return dict(o.split("=", 1) for o in found.overrides)


def entry(found: Imported, key: str) -> Entry:
    return next(e for e in found.entries if e.key == key)


def test_search_r1(tmp_path: Path) -> None:
    found = translated(tmp_path, SEARCH_R1)
    assert (found.flavour, found.program, found.problem) == ("search_r1", "verl.trainer.main_ppo", "")
    made = options(found)
    assert {
        "algorithm": "grpo",
        "algorithm.chains": "5",
        "algorithm.kl_coef": "0.002",
        "algorithm.kl_in": "loss",
        "algorithm.kl_estimator": "k2",
        "algorithm.dual_clip": "null",  # that code has none
        "algorithm.entropy_coef": "0.001",  # its own default
        "trainer.prompts_per_step": "512",
        "trainer.prompts_per_update": "64",  # 320 trajectories
        "trainer.warmup_steps": str(50 * 8),  # 50 steps of 8 updates
        "trainer.steps": "200",
        "trainer.learning_rate": "2e-06",
        "trainer.save_every": "50",
        "trainer.eval_every": "0",
        "sampling.max_turn_tokens": "500",
        "sampling.max_context_tokens": "4596",
        "sampling.temperature": "0.9",
        "env.max_turns": "3",
        "env.max_observation_tokens": "400",
        "env.questions": "'corpora/my set/train.parquet'",
        "env.dev_questions": "'corpora/my set/test.parquet'",
        "model.path": "lab/model-3b",
        "search.backend": "http",
        "search.args.url": "http://127.0.0.1:8000/retrieve",
        "search.top_k": "5",
        "reward": "em",
    }.items() <= made.items()
    assert "out" not in made
    assert entry(found, "trainer.default_local_dir").status == "unresolved"
    assert "the output of $(date +%s)" in entry(found, "trainer.default_local_dir").note
    assert entry(found, "actor_rollout_ref.actor.brand_new").status == "unknown"
    assert entry(found, "actor_rollout_ref.actor.ppo_mini_batch_size").status == "differs"
    assert [e.status for e in found.entries if e.key == "trainer.save_freq"] == ["replaced", "same"]
    assert entry(found, "actor_rollout_ref.rollout.top_p").status == "default"
    config = compose(found.overrides)
    assert config.env.questions == "corpora/my set/train.parquet"


def test_tree_grpo(tmp_path: Path) -> None:
    found = translated(tmp_path, TREE_GRPO)
    assert (found.flavour, found.program, found.problem) == ("tree_grpo", "verl.trainer.main_ppo_format_ts", "")
    assert {
        "algorithm": "tree_grpo",
        "algorithm.trees": "2",
        "algorithm.expansions": "3",
        "algorithm.rounds": "2",
        "algorithm.kept_leaves": "4",
        "algorithm.credit_args.estimator": "2norm",
        "algorithm.ratio": "turn",
        "algorithm.ratio_gradient": "true",
        "algorithm.dual_clip": "3.0",
        "algorithm.kl_coef": "0.0",
        "trainer.prompts_per_step": "512",
        "trainer.prompts_per_update": "64",
        "model.path": "models/base",
        "reward": "tree_grpo",
        "reward.args.structure": "0.3",
        "reward.args.retrieval": "0",
    }.items() <= options(found).items()
    assert entry(found, "actor_rollout_ref.actor.optim.lr").note.startswith("$lr is not set in the script")
    assert entry(found, "actor_rollout_ref.rollout.expand_mode").status == "none"
    assert entry(found, "actor_rollout_ref.rollout.ts_l").line == 9
    whys = {note.text: note.why for note in found.notes}
    assert whys["MODE=online"] in (
        "inside a condition or a loop: read as if it ran once",
        "a variable that no setting uses",
    )
    assert "$@" in whys


def test_atpo(tmp_path: Path) -> None:
    found = translated(tmp_path, ATPO)
    assert (found.flavour, found.problem) == ("atpo", "")
    assert {
        "algorithm": "at2po",
        "algorithm.chains": "10",
        "algorithm.rounds": "2",
        "algorithm.expansions": "6",
        "algorithm.kept_leaves": "20",
        "algorithm.credit_args.weights": "softmax",
        "algorithm.credit_args.advantage": "diff_parent",
        "algorithm.ratio": "turn",
        "algorithm.turn_ratio": "geometric",
        "algorithm.clip_low": "0.003",
        "algorithm.clip_high": "0.004",
        "algorithm.dual_clip": "null",
        "algorithm.aggregation": "seq-mean-token-mean",
        "algorithm.kl_coef": "0.0",
        "trainer.prompts_per_update": "8",
        "trainer.max_pack_tokens": "16000",
        "sampling.max_context_tokens": "8000",
        "env.max_searches": "6",
        "env.grammar": "turntree.envs.grammar:AtpoGrammar",
        "env.questions": "data/train.parquet",
        "reward": "atpo",
    }.items() <= options(found).items()
    assert "trainer.steps" not in options(found)
    assert "set trainer.steps to epochs x questions / 64" in entry(found, "trainer.total_epochs").note
    assert entry(found, "actor_rollout_ref.actor.enable_entropy_balanced_clipping").status == "unresolved"


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    for text in (ATPO, SEARCH_R1):
        found = translated(tmp_path, text)
        shown = "\n".join((*found.lines(), found.command(), found.yaml(), repr(found)))
        assert "sk-12345" not in shown
        assert "abc123" not in shown


def test_verl_yaml(tmp_path: Path) -> None:
    found = translated(tmp_path, VERL, "verl.yaml")
    assert (found.flavour, found.problem) == ("verl", "")
    assert {
        "algorithm.credit": "turntree.trainers.credit:dr_grpo",
        "algorithm.chains": "8",
        "algorithm.ratio": "sequence",
        "algorithm.aggregation": "seq-mean-token-mean",  # that loss never takes another one
        "algorithm.kl_coef": "0.01",
        "algorithm.kl_in": "reward",
        "algorithm.kl_estimator": "k1",
        "algorithm.dynamic_sampling": "4",
        "algorithm.overlong_tokens": "2048",
        "algorithm.overlong_buffer": "512",
        "algorithm.overlong_factor": "0.5",
        "trainer.prompts_per_update": "32",
        "trainer.warmup_steps": "10",
        "trainer.device": "cpu",
        "env.max_turns": "5",
        "env.questions": "a.parquet",
        "engine": "vllm",
    }.items() <= options(found).items()
    assert entry(found, "actor_rollout_ref.rollout.top_p").status == "none"
    assert "join several" in entry(found, "data.train_files").note
    assert "far wider" in entry(found, "actor_rollout_ref.actor.clip_ratio").note
    assert options(found)["model.path"] == str(Path.home() / "models/qwen")
    assert entry(found, "data.train_batch_size").line == 4


def test_a_base_gives_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "dr.yaml").write_text("actor_rollout_ref: {actor: {clip_ratio_c: 5, grad_clip: 0.5}}")
    (tmp_path / "t.sh").write_text(
        "python -m verl.trainer.main_ppo data.train_batch_size=8 algorithm.adv_estimator=rloo"
    )
    found = import_config(tmp_path / "t.sh", base=[tmp_path / "dr.yaml"])
    assert options(found)["algorithm.dual_clip"] == "5"
    assert options(found)["trainer.max_grad_norm"] == "0.5"
    assert entry(found, "actor_rollout_ref.actor.grad_clip").status == "default"


def test_options_that_do_not_go_together_are_said(tmp_path: Path) -> None:
    found = translated(tmp_path, TREE_GRPO.replace("ts_l=2", "ts_l=0").replace("ts_k=4", "ts_k=1"))
    assert "compares the leaves of a tree" in found.problem
    assert found.lines()[-1].startswith("these options do not go together")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "echo hello", "expected a command with settings"),
        ("a.sh", "python -m other.tool model.size=3 model.width=4", "only verl and what was made from it"),
        ("a.yaml", "- 1\n- 2", "expected a mapping of sections"),
        ("a.yaml", "a: [1", "expected a YAML configuration"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        translated(tmp_path, text, name)
    with pytest.raises(DataError, match="found none; check the path"):
        import_config(tmp_path / "absent.sh")


def test_without_the_parser_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(MissingExtraError, match=r"turntree\[scripts\]"):
        translated(tmp_path, SEARCH_R1)


# Laws -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [SEARCH_R1, TREE_GRPO, ATPO])
def test_no_setting_is_dropped(tmp_path: Path, text: str) -> None:
    found = translated(tmp_path, text)
    body = re.sub(r"(?m)^\s*#.*$", "", text)
    keys = re.findall(r"(?:^|[\s\"(])\+{0,2}((?:[a-z_]+\.)+[a-z_]+|max_turns)=", body)
    assert len(keys) > 15
    assert sorted(keys) == sorted(e.key for e in found.entries if e.line and not e.key.startswith("config-"))


words = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
keys = st.builds("{}.{}".format, st.sampled_from(["data", "algorithm", "actor_rollout_ref.actor", "trainer"]), words)
values = st.text(st.characters(codec="utf-8", exclude_characters="\x00'\r"), max_size=10)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(keys, values, min_size=2, max_size=8), st.booleans())
def test_any_setting_is_accounted_for_once(
    tmp_path_factory: pytest.TempPathFactory, given_settings: dict[str, str], through_variable: bool
) -> None:
    lines = ["algorithm.adv_estimator=grpo data.train_batch_size=4"]
    before = []
    for i, (key, value) in enumerate(given_settings.items()):
        if through_variable:
            before.append(f"V{i}='{value}'")
            lines.append(f'"{key}=$V{i}"')
        else:
            lines.append(f"'{key}={value}'")
    script = "\n".join((*before, "python -m verl.trainer.main_ppo " + " \\\n ".join(lines), ""))
    path = tmp_path_factory.mktemp("s") / "t.sh"
    path.write_text(script, encoding="utf-8", newline="\n")
    _, _, entries = translate(read_script(path))
    for key, value in given_settings.items():
        (said,) = [e for e in entries if e.key == key]
        assert said.value == value


@pytest.mark.parametrize(
    ("machines", "devices", "expected", "missing"),
    [
        (1, 1, {"trainer.activation_checkpointing": "full"}, {"trainer.strategy", "trainer.ranks"}),
        (1, 8, {"trainer.strategy": "deepspeed", "trainer.ranks": "8"}, set()),
        (2, 8, {"trainer.strategy": "deepspeed"}, {"trainer.ranks"}),
    ],
)
def test_devices_become_ranks(
    tmp_path: Path, machines: int, devices: int, expected: dict[str, str], missing: set[str]
) -> None:
    (tmp_path / "t.sh").write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "actor_rollout_ref.rollout.n=4 "
        "actor_rollout_ref.model.enable_gradient_checkpointing=True "
        f"trainer.nnodes={machines} trainer.n_gpus_per_node={devices}"
    )
    found = import_config(tmp_path / "t.sh")
    made = options(found)
    assert expected.items() <= made.items()
    assert not missing & made.keys()
    assert found.problem == ""
    if machines > 1:
        assert "torchrun" in entry(found, "trainer.n_gpus_per_node").note
