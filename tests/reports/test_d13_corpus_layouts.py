"""Corpora come as {id, contents}, {id, title, text}, {docid, text}, gzipped, with a BOM, with a blank last line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from turntree.errors import DataError
from turntree.search_backend import Passage, load_corpus

LAYOUTS = {
    "contents": (b'{"id": "7", "contents": "\\"A title\\"\\nA text."}\n', Passage("7", "A title", "A text.")),
    "title_text": (b'{"id": 7, "title": "A title", "text": "A text."}\n', Passage("7", "A title", "A text.")),
    "docid": (b'{"docid": "7", "text": "A text."}\n', Passage("7", "", "A text.")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dressing", ["plain", "bom", "blank_end", "no_newline", "gz", "gz_without_suffix"])
def test_d13_layouts_are_read(tmp_path: Path, layout: str, dressing: str) -> None:
    data, passage = LAYOUTS[layout]
    data = {
        "plain": data,
        "bom": b"\xef\xbb\xbf" + data,
        "blank_end": data + b"\n  \n",
        "no_newline": data.strip(),
    }.get(dressing) or gzip.compress(data)
    path = tmp_path / ("corpus.jsonl.gz" if dressing == "gz" else "corpus.jsonl")
    path.write_bytes(data)
    assert load_corpus(path) == [passage]


def test_d13_others_are_refused_with_a_line_number(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(LAYOUTS["contents"][0] + b'\n{"id": "8", "body": "A text."}\n')
    with pytest.raises(DataError, match=r"line 3: expected .*contents.*, found the keys \['body', 'id'\]"):
        load_corpus(path)
