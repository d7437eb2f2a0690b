"""Prompt files: one placeholder, plain braces, any script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.envs import PromptTemplate, SearchQAEnv
from turntree.errors import ConfigError, DataError

CHINESE = "请先在 <think> 与 </think> 之间思考。需要查资料时，把查询写在 <search> 与 </search> 之间。\n问题：{question}"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "prompt.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_chinese_prompt_file_replaces_the_instructions(tmp_path: Path, make_env: Callable[..., SearchQAEnv]) -> None:
    path = write(tmp_path, f"\ufeff{CHINESE}\n\n")
    env = make_env(prompt=path)
    prompt, _ = env.reset(seed=0, options={"index": 1})
    assert prompt == CHINESE.replace("{question}", "《红楼梦》的作者是谁？👍")
    assert make_env(prompt=str(path)).core.fingerprint == env.core.fingerprint != make_env().core.fingerprint
    assert make_env(prompt=PromptTemplate("{question}")).core.fingerprint != env.core.fingerprint


def test_the_question_is_inserted_as_it_is_written(make_env: Callable[..., SearchQAEnv]) -> None:
    env = make_env(prompt=PromptTemplate("Q: {question} / {question}"), max_turns=1)
    prompt, _ = env.reset(seed=0, options={"index": 2})
    assert prompt.startswith("Q: Is Hamlet a tragedy / Is Hamlet a tragedy\n\nNo searches are left.")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ('{question} as {"query": {"a": 1}} {} {0}', 'why as {"query": {"a": 1}} {} {0}'),
        ("write {{name}} or {{question}}: {question}", "write {name} or {question}: why"),
    ],
)
def test_other_braces_are_text(text: str, asked: str) -> None:
    assert PromptTemplate(text).ask(" why ") == asked


@given(st.text(min_size=1).filter(str.strip))
def test_a_question_is_data(question: str) -> None:
    assert PromptTemplate("a {question} b").ask(question) == f"a {question.strip()} b"
    assert PromptTemplate("{question}").ask("{question} {{x}}") == "{question} {{x}}"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("Answer the question.", r"prompt\.txt: the prompt has no placeholder \{question\}"),
        ("{question} {context}", r"prompt\.txt: the prompt has the placeholder \{context\}"),
        ("{ question }", r"the placeholder \{ question \}, but only \{question\} is known"),
        (b"\xff\xfe{question}", r"cannot read the prompt file .*prompt\.txt.*UTF-8"),
        ("", r"no placeholder"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PromptTemplate.read(write(tmp_path, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.txt", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot read the prompt file {path}"):
            PromptTemplate.read(path)


def test_an_empty_question_is_an_error() -> None:
    with pytest.raises(DataError, match="empty"):
        PromptTemplate("{question}").ask(" ")
