from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.errors import DataError
from turntree.search_backend import Passage, load_corpus
from turntree.search_backend.layouts import detect_layout, read_passages

A, B = Passage("0", "Alpha", "first text"), Passage("1", "Beta", 'second "text"')
ROWS = [{"id": p.id, "title": p.title, "text": p.text} for p in (A, B)]
DOCUMENTS: dict[str, tuple[Any, list[Passage]]] = {
    "list with idx": ([{"title": p.title, "text": p.text, "idx": i} for i, p in enumerate((A, B))], [A, B]),
    "list without ids": ([{"title": p.title, "text": p.text} for p in (A, B)], [A, B]),
    "list of texts": ([f"{p.title}\n{p.text}" for p in (A, B)], [A, B]),
    "title to text": ({p.title: p.text for p in (A, B)}, [Passage(p.title, p.title, p.text) for p in (A, B)]),
    "title to sentences": ({"T": ["One.", " Two."]}, [Passage("T", "T", "One. Two.")]),
    "id to fields": ({p.id: {"title": p.title, "text": p.text} for p in (A, B)}, [A, B]),
    "empty list": ([], []),
}


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_json_documents_are_read(tmp_path: Path, name: str, indent: int | None) -> None:
    value, expected = DOCUMENTS[name]
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert load_corpus(path) == expected


@given(st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=6), st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_any_text_survives_a_json_list(tmp_path_factory: pytest.TempPathFactory, rows: Any, indent: Any) -> None:
    path = tmp_path_factory.mktemp("list") / "corpus.json"
    kept = [(title.strip(), text.strip()) for title, text in rows if title.strip() or text.strip()]
    path.write_text(json.dumps([{"title": t, "text": x} for t, x in kept], indent=indent), encoding="utf-8")
    assert [(p.title, p.text) for p in load_corpus(path)] == kept


def test_a_document_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    rows = [{"title": f"t{i}", "text": "word " * 3000} for i in range(200)]
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    assert [p.title for p in load_corpus(path)] == [row["title"] for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"title": "a", "text": "b"}, {"title"', "line 1: expected a JSON value"),
        ('[{"title": "a", "text": "b"}', "line 1: expected the end of the JSON document"),
        ('[\n{"title": "a", "text": "b"},\n[1]]', "entry 2: expected a JSON object .* found a list"),
        ('[{"title": "a"}]', r"entry 1: expected .* found the keys \['title'\]"),
        ('{\n"a" "b"}', 'line 2: expected "title": text'),
        ('{"a": 7}', "entry 1: expected a string under 'text', found 7"),
        ('{"a": "x", "a": "y"}', r"entry 2: expected unique ids, found id 'a' again \(first on entry 1\)"),
    ],
)
def test_broken_documents_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_corpus(path)


TSV = {
    "dpr": ('id\ttext\ttitle\n1\t"He said ""hi"" there"\tGreeting\n', [Passage("1", "Greeting", 'He said "hi" there')]),
    "no header": ("7\tsome text\tA title\n", [Passage("7", "A title", "some text")]),
    "two columns": ("7\tsome text\n8\tmore\n", [Passage("7", "", "some text"), Passage("8", "", "more")]),
    "other order": ("title\tid\ttext\nT\t1\tx\n", [Passage("1", "T", "x")]),
    "stray quotes": ('1\t"Heroes" is a song\tT\n', [Passage("1", "T", '"Heroes" is a song')]),
    "open quote": ('1\t"Heroes and so on\tT\n', [Passage("1", "T", '"Heroes and so on')]),
}


@pytest.mark.parametrize("name", TSV)
@pytest.mark.parametrize("packed", [False, True])
def test_tab_separated_files_are_read(tmp_path: Path, name: str, packed: bool) -> None:
    text, expected = TSV[name]
    path = tmp_path / "psgs.tsv"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert load_corpus(path) == expected


def test_a_short_line_of_a_tsv_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "psgs.tsv"
    path.write_text("id\ttext\ttitle\n1\tx\ty\n2\tx\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 3: expected the tab-separated columns"):
        load_corpus(path)


def test_parquet_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert load_corpus(path) == [A, B]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="expected a parquet file"):
        load_corpus(path)


def layouts() -> dict[str, bytes]:
    lines = [json.dumps({"id": f"x{i}", "title": "t", "text": f"text {i}"}) for i in range(50)]
    tsv = "id\ttext\ttitle\n" + "".join(f"x{i}\ttext {i}\tt\n" for i in range(50))
    plain = "\n\n".join(lines).encode()
    return {
        "jsonl": plain,
        "gz": gzip.compress(plain),
        "tsv": tsv.encode(),
        "list": f"[{','.join(lines)}]".encode(),
    }


@pytest.mark.parametrize("name", ["jsonl", "gz", "tsv", "list"])
def test_reading_goes_on_from_any_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / "corpus"
    path.write_bytes(layouts()[name])
    rows = list(read_passages(path))
    assert len(rows) == 50
    for i in (0, 7, 48, 49):
        assert list(read_passages(path, rows[i][0])) == rows[i + 1 :]


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ('{"id": "1", "contents": "x"}', "jsonl"),
        ('{"id": "1", "contents": "x"', "jsonl"),
        ('{"T": "text"}\n{"U": "text"}', "jsonl"),
        ('{"T": "text"}', "json_dict"),
        ('{\n"T": "text"}', "json_dict"),
        ('{\n  "id": "1",\n  "text": "x"\n}', "jsonl"),  # a row on several lines, which is refused
        ("", "jsonl"),
        ("a\tb", "tsv"),
    ],
)
def test_layouts_are_told_from_content(tmp_path: Path, text: str, layout: str) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(text, encoding="utf-8")
    assert detect_layout(path) == layout
