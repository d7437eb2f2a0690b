"""The quickstart's parts fit each other: texts and vocabulary, lengths and limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from turntree.agents.models import load_model
from turntree.agents.teacher import Demonstration, Teacher, trajectories
from turntree.agents.tiny import TAGS
from turntree.agents.tokenizer import decode, encode
from turntree.envs.search_qa import Limits, SearchQACore
from turntree.envs.worlds import World, generate_world, lexicon, name_words
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.search_backend import BM25Backend
from turntree.trainers.compose import compose
from turntree.trainers.config import RunConfig
from turntree.trainers.quickstart import quickstart, write_tiny_model

KNOWN = {*lexicon()[0], *name_words(), *WorldGrammar().words(), *TAGS}


@pytest.fixture(scope="module")
def preset() -> RunConfig:
    return compose(["experiment=quickstart"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    _, tokenizer = load_model(write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0))
    return tokenizer


@pytest.fixture(scope="module", params=["train", "test"])
def world(request: pytest.FixtureRequest) -> World:
    return generate_world("quickstart", seed=6, split=request.param, questions=300)


def played(world: World, preset: RunConfig, teacher: Teacher, *, max_turns: int) -> list[Demonstration]:
    limits = Limits(max_turns=max_turns, top_k=preset.search.top_k)
    core = SearchQACore(BM25Backend.from_passages(world.passages), limits=limits, grammar=WorldGrammar())
    return trajectories(core, world.questions, teacher=teacher, seed=0)


@pytest.fixture(scope="module")
def demonstrations(world: World, preset: RunConfig) -> list[Demonstration]:
    """Careful and careless ones, with and without a notice that no search is left."""
    careless = Teacher(preset.sft.laziness, preset.sft.error)
    return [
        *played(world, preset, Teacher(), max_turns=preset.env.max_turns),
        *played(world, preset, careless, max_turns=preset.env.max_turns),
        *played(world, preset, careless, max_turns=2),
    ]


def texts(shown: Demonstration) -> Sequence[str]:
    return [shown.prompt, *(text for turn in shown.turns for text in (turn.text, turn.observation))]


def test_no_text_of_an_episode_needs_a_byte_token(tokenizer: Any, demonstrations: list[Demonstration]) -> None:
    """Each word, each name's word, each sign and each tag is one token."""
    grammar = WorldGrammar()
    own = [grammar.results(()).text, grammar.correction("no_action"), grammar.last_turn_notice()]
    shown = {text for demonstration in demonstrations for text in texts(demonstration)}
    assert any("No search is left ." in text for text in shown)
    for text in [*own, *shown]:
        assert pieces(tokenizer, text) <= KNOWN, text


def pieces(tokenizer: Any, text: str) -> set[str]:
    """What the tokens stand for, spaces around and alone left out."""
    return {decode(tokenizer, [i]).strip() for i in encode(tokenizer, text)} - {""}


def test_other_words_need_bytes(tokenizer: Any) -> None:
    """The test above would pass on anything if every piece were known."""
    assert pieces(tokenizer, "Who is Zorro ?") - KNOWN >= {"Z", "o"}
    assert pieces(tokenizer, "Who is Ba di ?") - KNOWN == {"Ba", "di"}


def test_demonstrations_fit_the_limits_of_the_preset(
    tokenizer: Any, demonstrations: list[Demonstration], preset: RunConfig
) -> None:
    longest_turn = max(len(encode(tokenizer, turn.text)) for d in demonstrations for turn in d.turns)
    longest = max(sum(len(encode(tokenizer, text)) for text in texts(d)) for d in demonstrations)
    assert longest_turn <= preset.sampling.max_turn_tokens
    assert longest + preset.sampling.max_turn_tokens <= preset.sampling.max_context_tokens


def test_auto_is_resolved_once_for_all_stages(
    openai_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that cannot be trained on is not asked for the evaluations either: it has another model."""

    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    monkeypatch.setattr("turntree.trainers.quickstart.SIZES", dict.fromkeys(("train", "dev", "test"), (80, 320)))
    out = tmp_path / "run"
    config = compose(["experiment=quickstart", "engine=auto", f"engine.base_url={openai_server.url}", f"out={out}"])
    with pytest.raises(Enough):
        quickstart(config, report=stop)
    assert OmegaConf.load(out / "config.yaml").engine.name == "hf"
