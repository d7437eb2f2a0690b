from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.errors import DataError
from turntree.search_backend import Passage, load_corpus, save_corpus
from turntree.search_backend.corpus import parse_contents, render_contents


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(**fields: object) -> str:
    return json.dumps(fields, ensure_ascii=False)


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Evan Morris"\nHe was a lobbyist.', "Evan Morris", "He was a lobbyist."),
        ("Absalon\ndragged forth", "Absalon", "dragged forth"),
        ('"The ""Heroes"" Tour"\ntext', 'The "Heroes" Tour', "text"),
        ('"Say ""Hi"""\ntext', 'Say "Hi"', "text"),
        ('""\n郭麐，字群伯', "", "郭麐，字群伯"),
        ('"Weird Al" Yankovic\ntext', '"Weird Al" Yankovic', "text"),
        ('"Title only"', "Title only", ""),
        ("A text without a title.", "", "A text without a title."),
        ('"T"\nfirst\nsecond ""quoted""', "T", 'first\nsecond ""quoted""'),
        ('"T"\r\ntext', "T", "text"),
    ],
)
def test_contents_split_into_title_and_text(contents: str, title: str, text: str) -> None:
    assert parse_contents(contents) == (title, text)


@given(st.text(), st.text())
def test_rendered_contents_parse_back(title: str, text: str) -> None:
    title = " ".join(title.split())
    assert parse_contents(render_contents(title, text)) == (title, text.strip())


def test_saved_corpus_loads_back(tmp_path: Path) -> None:
    passages = [Passage("a", 'The "X"', "one\ntwo"), Passage("b", "", "没有标题"), Passage("c", "Only a title", "")]
    save_corpus(tmp_path / "c.jsonl", passages)
    assert load_corpus(tmp_path / "c.jsonl") == passages
    assert b"\r" not in (tmp_path / "c.jsonl").read_bytes()


def test_a_title_beside_contents_without_one_is_kept(tmp_path: Path) -> None:
    rows = row(id="1", title="Oslo", contents="A city."), row(id="2", title="other", contents='"Rome"\nA city.')
    assert load_corpus(write(tmp_path / "c.jsonl", *rows)) == [
        Passage("1", "Oslo", "A city."),
        Passage("2", "Rome", "A city."),
    ]


def test_a_title_with_a_line_break_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="title on one line"):
        save_corpus(tmp_path / "c.jsonl", [Passage("a", "two\nlines", "text")])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "1", "contents": "x"', "line 2: expected one JSON object"),
        ('["id"]', "line 2: expected a JSON object .* found a list"),
        (row(id="1"), r"line 2: expected .* found the keys \['id'\]"),
        (row(contents="x"), r"line 2: expected .* found the keys \['contents'\]"),
        (row(id=True, contents="x"), "line 2: expected a non-empty string or integer id, found True"),
        (row(id="", contents="x"), "line 2: expected a non-empty string or integer id"),
        (row(id="1", contents=7), "line 2: expected a string under 'contents', found 7"),
        (row(id="1", title=["a"], text="x"), "line 2: expected a string under 'title'"),
        (row(id="1", title="", text=" "), "line 2: expected a title or a text"),
        (row(id="0", contents="again"), r"line 2: expected unique ids, found id '0' again \(first on line 1\)"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", row(id="0", contents="fine"), line)
    with pytest.raises(DataError, match=message) as caught:
        load_corpus(path)
    assert str(path) in str(caught.value)


def test_other_encodings_and_broken_archives_are_data_errors(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"id": "1", "contents": "caf\xe9"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="line 1: expected UTF-8"):
        load_corpus(path)
    whole = gzip.compress("".join(row(id=str(i), contents=f"text {i}") + "\n" for i in range(999)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="expected a complete gzip file"):
        load_corpus(path)
    with pytest.raises(DataError, match="expected a readable corpus"):
        load_corpus(tmp_path / "absent.jsonl")


def test_published_files_load(shared_data: Path) -> None:
    passages = load_corpus(shared_data / "real" / "flashrag_sample" / "sample_data.jsonl")
    assert len(passages) == 1000
    assert passages[0].title == "Evan Morris"
    assert not any(p.title.startswith('"') and p.title.endswith('"') for p in passages)
    assert len(load_corpus(shared_data / "real" / "search_r1_example" / "corpus.jsonl")) == 10
