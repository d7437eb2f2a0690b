"""RLTR beside what it is compared with: no tools, end-to-end SFT, end-to-end RL; one call, one table.

Every arm of a seed is scored on the same questions, with the same limits and the same completeness checker. Both arms
of RL use the same algorithm for the same number of steps, prompts and trajectories, and both of SFT the same numbers of
demonstrations and steps. What differs is who answers, what is rewarded and what was demonstrated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from turntree.envs.grammar.planner import FINISH
from turntree.envs.worlds import PROFILES, generate_world
from turntree.envs.worlds.names import Split
from turntree.envs.worlds.speech import Language
from turntree.errors import CheckpointError, ConfigError
from turntree.trainers.atomic import write_json
from turntree.trainers.build import run_path
from turntree.trainers.checkpoint import check_fingerprint, config_fingerprint
from turntree.trainers.coldstart import cold_start
from turntree.trainers.config import AgentConfig, RunConfig
from turntree.trainers.doctor import resolve_engine
from turntree.trainers.learner import train
from turntree.trainers.quickstart import write_tiny_model
from turntree.trainers.remote import refuse_training
from turntree.trainers.report.arms import Arm, Comparison
from turntree.trainers.run_folder import RunFolder, read_metrics
from turntree.trainers.scoring import score

__all__ = ["COMPLETENESS", "Interrupted", "compare_arms"]

COMPLETENESS = "turntree.agents.completeness:CompletenessScorer"
"""Import path of the completeness scorer."""

Report = Callable[[str, int, int, str], None]
"""``report(stage, done, total, note)``: how far a stage has come."""

#: Options that change no result: they may differ when a comparison goes on.
_FREE = ("out", "resume", "rltr")
_FREE_OF_TRAINER = ("threads", "save_every", "keep_checkpoints", "store_sample", "store_max_mb", "check_packed")
_YEARS = range(1820, 2020)
"""What the dates of generated worlds are drawn from."""
_COUNTS = ("generated_tokens", "tool_calls", "trajectories", "updates")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C between two training steps: the comparison goes on from there with ``resume``."""


def compare_arms(config: RunConfig, report: Report = lambda *_: None) -> Comparison:
    """Run the arms of ``config.rltr`` for each seed in ``config.out`` and write the table there.

    Without ``env.questions`` a world is generated for each seed, without ``model.path`` the tiny decoder is written.
    With ``resume`` arms that are done are read back and the others go on.

    Raises ``ConfigError`` for options that do not fit, ``CheckpointError`` for a folder that holds another comparison,
    :class:`Interrupted` after Ctrl-C.
    """
    config, _ = resolve_engine(config, trains=True)
    refuse_training(config)
    _check(config)
    root = run_path(config, "rltr")
    RunFolder.create(root, config, resume=config.resume)
    arms: list[Arm] = []
    for seed in range(config.seed, config.seed + config.rltr.seeds):
        bed = _Bed(root / f"seed-{seed}", replace(config, seed=seed, resume=True), f"seed {seed}: ", report)
        bed.prepare()
        arms += [bed.arm(name) for name in config.rltr.chosen]
    found = Comparison(tuple(arms), _budget(config))
    found.save(root)
    return found


def _check(config: RunConfig) -> None:
    if config.env.questions and not config.model.path:
        raise ConfigError("turntree rltr on questions of your own needs model.path, a Hugging Face folder")
    if config.env.questions and not (config.env.test_questions or config.env.dev_questions):
        raise ConfigError("turntree rltr scores every arm on env.test_questions; name a file")
    if config.reward.finisher:
        raise ConfigError("turntree rltr: the arms say who answers; name the summariser in agent.summarizer")


def _budget(config: RunConfig) -> dict[str, Any]:
    """What every arm was given, for the table."""
    trainer, algorithm = config.trainer, config.algorithm
    leaves = algorithm.trees * (algorithm.kept_leaves or algorithm.chains + algorithm.rounds * algorithm.expansions)
    return {
        "algorithm": algorithm.name,
        "rl_steps": trainer.steps,
        "prompts_per_step": trainer.prompts_per_step,
        "trajectories_per_prompt": algorithm.budget_leaves or leaves,
        "max_generated_tokens": trainer.max_generated_tokens,
        "sft_steps": config.sft.steps if config.rltr.cold_start else 0,
        "sft_batch_size": config.sft.batch_size,
        "sft_demonstrations": config.sft.demonstrations,
        "max_turns": config.env.max_turns,
        "max_searches": config.env.max_searches,
        "max_turn_tokens": config.sampling.max_turn_tokens,
    }


@dataclass(frozen=True, slots=True)
class _Bed:
    """All arms of one seed; each stage has a folder below ``root``."""

    root: Path
    config: RunConfig
    prefix: str
    report: Report

    # -- what the arms share ------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Write the worlds and the first model, where none were given."""
        options = self.config.rltr
        sizes: dict[Split, tuple[int, int]] = {
            "train": (options.entities, options.train_questions),
            "dev": (180, max(1, options.test_questions // 2)),
            "test": (180, options.test_questions),
        }
        for split, (entities, questions) in sizes.items():
            folder = self.root / "worlds" / split
            if not self.config.env.questions and not (folder / "meta.json").is_file():
                seed = self.config.seed
                world = generate_world(
                    options.profile,
                    seed=seed,
                    split=split,
                    entities=entities,
                    questions=questions,
                    language=self._language,
                )
                world.save(folder)
        if not self.config.model.path and not (self.root / "initial-model" / "config.json").is_file():
            head_dim = 32 if self.config.engine.name.startswith("vllm") else None  # of vLLM on CPU
            write_tiny_model(
                self.root / "initial-model",
                seed=self.config.seed,
                head_dim=head_dim,
                style=PROFILES[options.profile].style,
                language=self._language,
                tokens=_tokens(options.profile),
            )

    @property
    def _language(self) -> Language:
        return cast("Language", self.config.env.language)

    def _base(self, model: Path | None, out: str) -> RunConfig:
        config = replace(self.config, out=str(self.root / out))
        path = str(model or self.config.model.path or self.root / "initial-model")
        config = replace(config, model=replace(config.model, path=path))
        if config.env.questions:
            return config
        train, dev, test = (str(self.root / "worlds" / split) for split in ("train", "dev", "test"))
        return replace(config, env=replace(config.env, questions=train, dev_questions=dev, test_questions=test))

    def _react(self, model: Path | None, out: str) -> RunConfig:
        """One model calls and answers; the environment rewards the answer."""
        config = self._base(model, out)
        return replace(config, agent=AgentConfig(), reward=replace(config.reward, scorer="", scorer_args={}))

    def _planner(self, model: Path | None, out: str) -> RunConfig:
        """A planner whose calls are rewarded, and a summariser."""
        config = self._base(model, out)
        reward, cold = config.reward, config.coldstart
        if not reward.scorer:
            reward = replace(reward, scorer=COMPLETENESS)
        if cold.criterion == "reward":  # the environment's is for answers, which a planner does not give
            judged = reward.scorer_args if reward.scorer == COMPLETENESS else {}
            cold = replace(cold, criterion="completeness", criterion_args=judged)
        agent = replace(config.agent, name="planner_summarizer")
        return replace(config, agent=agent, reward=reward, coldstart=cold)

    # -- arms ---------------------------------------------------------------------------------------------------------

    def arm(self, name: str) -> Arm:
        """Train and score one arm, or read it back."""
        split = name in ("planner_sft", "rltr")
        configure = self._planner if split else self._react
        done = self.root / f"arm-{name}.json"
        asked = _plain(configure(None, name))
        if done.is_file():
            return _read(done, asked)
        model, budget = self._model(name, configure)
        scored = configure(model, f"evaluation-{name}")
        if name == "direct":
            scored = replace(scored, env=replace(scored.env, max_turns=1))
        stage = f"{self.prefix}evaluate {name}"
        folder = Path(scored.out)
        score(_with_completeness(scored), folder, report=lambda n, of: self.report(stage, n, of, ""))
        arm = Arm.of(name, self.config.seed, folder, budget)
        write_json(done, {"config": asked, "arm": asdict(arm)})
        return arm

    def _model(
        self, name: str, configure: Callable[[Path | None, str], RunConfig]
    ) -> tuple[Path | None, dict[str, Any]]:
        if name == "direct":
            return None, {}
        if name in ("sft", "planner_sft"):
            return self._sft(configure(None, name))
        before = "planner_sft" if name == "rltr" else "sft"
        start = self._sft(configure(None, before)) if self.config.rltr.cold_start else (None, {})
        model, budget = self._rl(configure(start[0], name))
        return model, {**start[1], **budget}

    def _sft(self, config: RunConfig) -> tuple[Path, dict[str, Any]]:
        folder = Path(config.out)
        stage = f"{self.prefix}{folder.name}"
        if not (folder / "summary.json").is_file():
            cold_start(config, on_step=lambda n, loss: self.report(stage, n, config.sft.steps, f"loss {loss:.3f}"))
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        return folder / "model", {f"sft_{key}": summary[key] for key in ("steps", "demonstrations")}

    def _rl(self, config: RunConfig) -> tuple[Path, dict[str, Any]]:
        stage = f"{self.prefix}{Path(config.out).name}"

        def show(step: int, metrics: Mapping[str, float]) -> None:
            self.report(stage, step, config.trainer.steps, f"reward {metrics['critic/rewards/mean']:.3f}")

        result = train(config, on_step=show)
        if result.interrupted:
            raise Interrupted(f"{stage}: stopped after step {result.progress.step}")
        last = read_metrics(result.folder / "metrics.jsonl")[-1]
        counts = {key: last[f"total/{key}"] for key in _COUNTS}
        chosen = "model" if result.progress.best_step is None else "best-model"
        return result.folder / chosen, {"rl_steps": result.progress.step, **counts}


def _tokens(profile: str) -> tuple[str, ...]:
    """Tags of both agents, and years: copying one token is learnt in minutes, copying four digits is not."""
    tags = tuple(tag for name in (FINISH, "python") for tag in (f"<{name}>", f"</{name}>"))
    return (*tags, *map(str, _YEARS)) if profile == "code" else tags


def _with_completeness(config: RunConfig) -> RunConfig:
    """Evaluation measures completeness, of illegal formats too, with the checker of the comparison."""
    reward = config.reward
    given = reward.scorer_args if reward.scorer in ("", COMPLETENESS) else {}
    arguments = {**given, "judge_illegal": True}
    return replace(config, reward=replace(reward, scorer=COMPLETENESS, scorer_args=arguments, in_evaluation=True))


def _plain(config: RunConfig) -> dict[str, Any]:
    plain = asdict(config)
    for name in _FREE_OF_TRAINER:
        plain["trainer"].pop(name, None)
    return config_fingerprint(plain, [key for key in plain if key not in _FREE])


def _read(path: Path, asked: Mapping[str, Any]) -> Arm:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        arm = Arm(**saved["arm"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); delete it, and the arm is scored again") from None
    check_fingerprint(saved["config"], asked, source=path)
    return arm
