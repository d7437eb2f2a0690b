"""The terse grammar of generated worlds: the reading of turns is TagGrammar's, the texts are its own."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import Grammar, Limits, Question, SearchQACore, TagGrammar
from turntree.envs.core import Pending, Step
from turntree.envs.grammar import Think
from turntree.envs.search_qa import SearchQAState
from turntree.envs.tools import execute
from turntree.envs.worlds.grammar import WorldGrammar
from turntree.errors import DataError
from turntree.search_backend import BM25Backend, Passage

GRAMMAR = WorldGrammar()
TAGS = ["<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
TURNS = st.lists(st.sampled_from([*TAGS, "Kero Bapi", " ", "<Search>"]) | st.text(max_size=5), max_size=30).map("".join)


@given(TURNS, st.sampled_from(["optional", "required"]))
def test_turns_are_read_as_the_tag_grammar_reads_them(text: str, think: Think) -> None:
    world, tags = WorldGrammar(think), TagGrammar(think)
    assert isinstance(world, Grammar)
    assert world.parse(text) == tags.parse(text)
    assert world.stop == tags.stop


def test_the_prompt_is_the_question() -> None:
    assert GRAMMAR.prompt("Who is the mentor of Kero Bapi ?") == "Who is the mentor of Kero Bapi ?"
    assert GRAMMAR.prompt("Tell me the mentor of Kero Bapi .") == "Tell me the mentor of Kero Bapi ."
    with pytest.raises(DataError, match="empty"):
        GRAMMAR.prompt(" ")


def test_results_are_the_texts_alone() -> None:
    found = [
        Passage("1", "Kero Bapi", "The mentor of Kero Bapi is Zabo Fali ."),
        Passage("2", "Other", "Doc 1(Title: )"),
    ]
    shown = GRAMMAR.results(found)
    assert shown.text == "<information> The mentor of Kero Bapi is Zabo Fali .\nDoc 1(Title: )</information>"
    assert GRAMMAR.results(found[:0]).text == "<information> No results were found for this query.</information>"


@given(st.lists(TURNS, max_size=3))
def test_retrieved_text_holds_no_tags(texts: list[str]) -> None:
    shown = GRAMMAR.results([Passage(str(i), "a <search>title</search>", text) for i, text in enumerate(texts)])
    assert not re.search(r"</?(?:think|search|information|answer)>", shown.body)
    assert "title" not in shown.body


def test_control_tokens_in_passages_are_neutralised() -> None:
    assert "<|end|>" not in GRAMMAR.results([Passage("1", "t", "a <|end|> b")]).text


def test_the_fingerprint_tells_settings_and_texts_apart() -> None:
    class Talkative(WorldGrammar):
        def results(self, passages: object) -> object:  # type: ignore[override]
            return super().results([Passage("", "", "more")])

    grammars = (WorldGrammar(), WorldGrammar("required"), TagGrammar(), Talkative())
    assert len({g.fingerprint for g in grammars}) == 4
    assert WorldGrammar().fingerprint == GRAMMAR.fingerprint


def test_words_are_those_of_its_own_texts() -> None:
    """Every text that a whole episode shows splits into them, except the question's and the passages'."""
    passage = Passage("1", "Kero Bapi", "")
    core = SearchQACore(BM25Backend.from_passages([passage]), limits=Limits(max_turns=4), grammar=GRAMMAR)
    state, prompt = core.initial(Question("q", "?", ("x",)), seed=0)
    texts = [prompt.removeprefix("?")]
    for turn in ("mumble", "<search> nowhere </search>", "<search> Kero Bapi </search>"):
        step = played(core, state, turn)
        state = step.state
        texts.append(step.observation)
    shown = re.sub("</?information>", " ", " ".join(texts))
    assert "No search is left ." in shown
    assert "That was no action ." in shown
    assert "No results were found" in shown
    assert set(re.findall(r"\w+|[^\w\s]", shown)) == set(GRAMMAR.words())


def played(core: SearchQACore, state: SearchQAState, turn: str) -> Step[SearchQAState]:
    out = core.act(state, turn)
    if not isinstance(out, Pending):
        return out
    (result,) = execute(core.tools, out.calls)
    return core.resolve(state, out, [result])  # type: ignore[list-item]
