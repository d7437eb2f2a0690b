"""Passage corpora in memory: read from any layout that people publish them in, written in wiki-18's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from turntree.errors import DataError
from turntree.search_backend.layouts import read_passages, unit
from turntree.search_backend.passage import Passage
from turntree.search_backend.rows import json_line, parse_contents, render_contents

__all__ = ["load_corpus", "parse_contents", "render_contents", "save_corpus"]


def load_corpus(path: str | Path) -> list[Passage]:
    """Read a corpus in file order.

    JSON Lines (``{"id", "contents": "\\"Title\\"\\ntext"}`` as wiki-18 and FlashRAG, ``{"id", "title", "text"}``; the
    id may be called ``_id`` or ``docid`` and may be an integer), HippoRAG's JSON lists and objects, tab-separated
    ``id text title`` as DPR's, parquet with such columns. The file may be gzipped (whatever its name).

    Raises :class:`DataError` with the file and line number for a corrupt line, a missing key or a duplicate id. For
    corpora that do not fit in memory see :class:`turntree.search_backend.store.CorpusStore`.
    """
    passages: list[Passage] = []
    seen: dict[str, int] = {}
    for place, passage in read_passages(Path(path)):
        first = seen.setdefault(passage.id, place.number)
        if first != place.number:
            where = unit(Path(path))
            raise DataError(
                f"{path}, {where} {place.number}: expected unique ids, found id {passage.id!r} again "
                f"(first on {where} {first}); make the ids unique"
            )
        passages.append(passage)
    return passages


def save_corpus(path: str | Path, passages: Sequence[Passage]) -> None:
    """Write passages in the wiki-18 layout, LF line ends, so that :func:`load_corpus` gives them back.

    Titles hold no line breaks; raises :class:`DataError` for one that does.
    """
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for passage in passages:
            row = {"id": passage.id, "contents": render_contents(passage.title, passage.text)}
            file.write(json_line(row))
