"""A run in Chinese from the world to the scores: what it writes, reads and scores is Chinese."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from turntree.agents.tokenizer import encode
from turntree.envs.grammar import AtpoGrammar, HermesGrammar, PlannerGrammar, TagGrammar
from turntree.envs.search_qa import SearchQACore
from turntree.envs.worlds import generate_world, load_world
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import ConfigError
from turntree.trainers.compose import compose
from turntree.trainers.quickstart import quickstart
from turntree.trainers.task import build_task

HAN = re.compile("[\u4e00-\u9fff]")


class Characters:
    """One token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chinese") / "world"
    return generate_world("quickstart", seed=1, entities=80, questions=20, language="zh").save(path)


@pytest.mark.slow
def test_a_quickstart_in_chinese_runs_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"train": (80, 64), "dev": (80, 8), "test": (80, 24)}
    monkeypatch.setattr("turntree.trainers.quickstart.SIZES", sizes)
    out = tmp_path / "run"
    small = ["sft.demonstrations=64", "sft.steps=30", "trainer.steps=1", "trainer.prompts_per_step=4"]
    config = compose(["experiment=quickstart", "env.language=zh", *small, f"out={out}"])
    summary = quickstart(config)
    assert summary["n_questions"] == 24
    assert load_world(out / "worlds" / "train").meta["config"]["language"] == "zh"
    document = json.loads((out / "evaluation-after" / "evaluation.json").read_text(encoding="utf-8"))
    assert "zh" in json.dumps(document)
    rows = (out / "evaluation-after" / "evaluation.jsonl").read_text(encoding="utf-8").splitlines()
    assert all(HAN.search(json.loads(row)["question"]) for row in rows)
    turns = [turn for row in rows for turn in json.loads(row)["trajectory"]]
    # Thirty steps teach no more than the tags; what is sampled is whole characters, not halves of them.
    assert "<search>" in json.dumps(turns)
    assert OmegaConf.load(out / "config.yaml").env.language == "zh"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("turntree.envs.grammar:TagGrammar", TagGrammar(language="zh")),
        ("turntree.envs.grammar:AtpoGrammar", AtpoGrammar(language="zh")),
        ("turntree.envs.grammar:HermesGrammar", HermesGrammar(language="zh")),
        ("turntree.envs.worlds.grammar:WorldGrammar", WorldGrammar(language="zh")),
    ],
)
def test_env_language_makes_every_grammar_speak_chinese(folder: Path, name: str, expected: object) -> None:
    config = compose(["env.language=zh", f"env.grammar={name}", f"env.questions={folder}"])
    core = build_task(config, Characters()).core
    assert isinstance(core, SearchQACore)
    assert core.grammar == expected
    assert core.normalizer == "zh"


def test_the_planner_speaks_the_language_of_the_env_unless_told_otherwise(folder: Path) -> None:
    given = ["agent=planner_summarizer", "env.language=zh", f"env.questions={folder}"]
    core = build_task(compose(given), Characters()).core
    assert isinstance(core, SearchQACore)
    assert core.grammar == PlannerGrammar(TagGrammar(), "zh")
    english = build_task(compose([*given, "agent.language=en"]), Characters()).core
    assert isinstance(english, SearchQACore)
    assert english.grammar == PlannerGrammar(TagGrammar(), "en")


def test_the_normaliser_follows_the_questions_and_can_be_chosen(folder: Path) -> None:
    chosen = build_task(compose(["env.normalizer=cmrc", f"env.questions={folder}"]), Characters()).core
    assert isinstance(chosen, SearchQACore)
    assert chosen.normalizer == "cmrc"
    with pytest.raises(ConfigError, match=r"env\.normalizer='ch'"):
        compose(["env.normalizer=ch"])
    with pytest.raises(ConfigError, match=r"env\.language='cn'"):
        compose(["env.language=cn"])


def test_english_prompts_of_chinese_questions_are_pointed_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="turntree.trainers.task"):
        build_task(compose([f"env.questions={folder}"]), Characters())
        assert "env.language=zh makes it Chinese" in caplog.text
        caplog.clear()
        build_task(compose(["env.language=zh", f"env.questions={folder}"]), Characters())
        assert not caplog.text


def test_a_grammar_without_chinese_is_refused_with_the_option(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        """A grammar of a user's own, no dataclass."""

        stop = ("</search>", "</answer>")
        fingerprint = "plain"

        def __getattr__(self, name: str) -> object:
            return getattr(TagGrammar(), name)

    monkeypatch.setattr("turntree.envs.grammar.PlainForTest", Plain, raising=False)
    config = compose(["env.language=zh", "env.grammar=turntree.envs.grammar:PlainForTest", f"env.questions={folder}"])
    with pytest.raises(ConfigError, match=r"env\.language=zh with env\.grammar.*Plain has no texts"):
        build_task(config, Characters())


def test_the_tiny_tokenizer_is_written_for_a_language(tmp_path: Path) -> None:
    from turntree.agents.models import load_tokenizer
    from turntree.trainers.quickstart import write_tiny_model

    tokenizer = load_tokenizer(write_tiny_model(tmp_path / "model", seed=0, language="zh"))
    assert len(encode(tokenizer, "请告诉我巴比达迪的导师是谁？")) == 10
