"""Any bytes are a file: readers give every row of it, or say which line is wrong; never fewer rows without a word."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.material import Tape, fuzz, json_like, seconds, text_of
from turntree.envs.datasets import corpus_from_contexts, load_questions, save_questions
from turntree.envs.datasets.reading import read_questions
from turntree.envs.task import FrozenDict, Question
from turntree.errors import DataError, TurnTreeError
from turntree.search_backend.corpus import load_corpus, save_corpus
from turntree.search_backend.passage import Passage
from turntree.trainers.evaluation.rows import parse_row
from turntree.trainers.import_config.yaml_file import read_yaml
from turntree.trainers.labelled import read_labelled

FOLDER = tempfile.TemporaryDirectory(prefix="turntree-fuzz-")
KEYS = (
    "id", "_id", "question", "query", "golden_answers", "answers", "answer", "aliases", "text", "title",
    "contents", "idx",
    "docid", "metadata", "context", "contexts", "paragraphs", "paragraph_text", "sentences", "content",
    "supporting_facts",
    "sent_id", "question_decomposition", "evidences", "fact", "relation", "entity", "data", "qas", "target", "value",
    "prompt", "role", "reward_model", "ground_truth", "extra_info", "index", "split", "is_impossible", "answerable",
    "wiki_links", "reasoning_types", "paragraph_support_idx", "support_paragraph", "is_supporting", "Answer", "steps",
)  # fmt: skip
TEXTS = (
    "user", "Paris", "2hop__1", "['a', 'b']", '["a"]', "array(['a'])", "[", "yes", "#1 >> x", '{"a": 1}',
    "https://en.wikipedia.org/wiki/Paris", "Answer the given question. Question: who?",
)  # fmt: skip
HEADS = (
    b"", b"{", b"[", b"[[", b"{}", b"[]", b"PAR1", b"\x1f\x8b", b"\x1f\x8b\x08\x00", b"\xef\xbb\xbf",
    b"\xff\xfe", b"question,answers\n",
    b"question\tanswers\n", b"id\ttext\ttitle\n", b'{"question": "q", "answers": ["a"]}\n',
    b'{"id": "1", "contents": "c"}\n', b'{"data": [',
    b"[" * 3000, b'{"a":' * 2000, b"1" * 5000, b'"', b"\n", b"\r\n", b"\x00", b"\t", b'["q", "a"]',
    b'{"T": "text"}', b'[{"idx": 0, "text": "x"}]',
)  # fmt: skip


def written(data: bytes) -> Path:
    path = Path(FOLDER.name, "file")
    path.write_bytes(data)
    return path


def bytes_of(tape: Tape) -> bytes:
    """Bytes with a beginning that some reader takes for its own."""
    parts = [tape.pick(HEADS) for _ in range(tape.byte() % 3)]
    return b"".join(parts) + tape.data[tape.at :]


READERS: tuple[Callable[[Path], Any], ...] = (load_questions, load_corpus, corpus_from_contexts, read_labelled)


@fuzz("loaders", share=6)
def test_any_bytes_are_read_or_refused(tape: Tape) -> None:
    path = written(bytes_of(tape))
    for reader in READERS:
        try:
            reader(path)
        except TurnTreeError:
            continue


@fuzz("loaders", size=400, each=4, share=8)
def test_any_rows_are_read_or_refused(tape: Tape) -> None:
    rows = [json_like(tape, keys=KEYS, texts=TEXTS) for _ in range(1 + tape.byte() % 3)]
    form = tape.byte() % 3
    try:
        lines = [json.dumps(row, ensure_ascii=bool(tape.byte() % 2)) for row in rows]
    except ValueError:  # an integer that Python does not print
        return
    text = "\n".join(lines) if form == 0 else f"[{','.join(lines)}]" if form == 1 else lines[0]
    path = written(text.encode("utf-8", "replace"))
    for reader in READERS:
        try:
            reader(path)
        except TurnTreeError:
            continue


# Nothing is lost ------------------------------------------------------------------------------------------------------


def questions(tape: Tape) -> list[Question]:
    found = []
    for number in range(1 + tape.byte() % 3):
        asked = text_of(tape.some(10)) + "?"
        golds = tuple(dict.fromkeys(text_of(tape.some(5)) + "a" for _ in range(1 + tape.byte() % 2)))
        extra = {"note": text_of(tape.some(5)), "n": tape.byte()}
        found.append(Question(f"q{number}", asked, golds, FrozenDict(extra)))
    return found


@fuzz("loaders", size=96, share=6)
def test_saved_questions_come_back(tape: Tape) -> None:
    kept = questions(tape)
    path = Path(FOLDER.name, "questions.jsonl")
    save_questions(path, kept)
    assert load_questions(path) == kept


@fuzz("loaders", size=96, share=6)
def test_saved_passages_come_back(tape: Tape) -> None:
    kept = []
    for number in range(1 + tape.byte() % 3):
        title, text = (" ".join(text_of(tape.some(10)).split()).strip('"') for _ in range(2))
        kept.append(Passage(f"{number}", title.strip(), text.strip() or "x"))
    path = Path(FOLDER.name, "corpus.jsonl")
    save_corpus(path, kept)
    assert load_corpus(path) == kept


@fuzz("loaders", size=96, share=6)
def test_every_container_holds_the_same_questions(tape: Tape) -> None:
    kept = [Question(q.id, _utf8(q.question), (_utf8(q.golden_answers[0]),)) for q in questions(tape)]
    kept = [q for q in kept if "\x00" not in q.question + q.golden_answers[0]]
    plain = [{"id": q.id, "question": q.question, "answer": q.golden_answers[0]} for q in kept]
    if not kept or any(row["answer"].strip().startswith(("[", "array(")) for row in plain):
        return
    lines = "".join(json.dumps(row, ensure_ascii=bool(tape.byte() % 2)) + "\n" for row in plain)
    table = io.StringIO()
    writer: Any = csv.DictWriter(table, ("id", "question", "answer"), delimiter=tape.pick(",\t"), quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(plain)
    text = tape.pick(
        (lines, json.dumps(plain), json.dumps(plain, indent=1), json.dumps({"data": plain}), table.getvalue())
    )
    data = text.encode()
    packed = tape.pick((data, gzip.compress(data, 1, mtime=0), b"\xef\xbb\xbf" + data))
    found = load_questions(written(packed))
    assert [(q.id, q.question, q.golden_answers) for q in found] == [(q.id, q.question, q.golden_answers) for q in kept]


@fuzz("loaders", size=96, share=0.5)
def test_parquet_holds_the_same_questions_and_passages(tape: Tape) -> None:
    import pyarrow
    import pyarrow.parquet

    kept = questions(tape)
    rows = [
        {"id": q.id, "question": _utf8(q.question), "golden_answers": [*map(_utf8, q.golden_answers)]} for q in kept
    ]
    path = Path(FOLDER.name, "file.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert [(q.id, q.question) for q in load_questions(path)] == [(row["id"], row["question"]) for row in rows]
    data = bytearray(path.read_bytes())
    for _ in range(1 + tape.byte() % 4):
        data[tape.number() % len(data)] = tape.byte()
    try:
        found = load_questions(written(bytes(data)))
    except TurnTreeError:
        return
    assert len(found) == len(rows)


@fuzz("loaders", size=96, share=6)
def test_a_file_that_is_cut_off_is_refused(tape: Tape) -> None:
    """Of one document every beginning is refused; of lines every one that ends inside a line."""
    rows = [{"id": f"{i}", "question": text_of(tape.some(6)) + "?", "answers": ["a"], "text": "x"} for i in range(2)]
    document, lines = json.dumps(rows), "".join(json.dumps(row) + "\n" for row in rows)
    at = 1 + tape.number() % (len(document) - 1)
    for reader in (load_questions, load_corpus):
        with pytest.raises(DataError):
            reader(written(document[:at].encode()))
        if tape.byte() % 8 == 7:
            with pytest.raises(DataError):
                reader(written(gzip.compress(document.encode(), 1, mtime=0)[: -1 - tape.byte() % 20]))
        part = lines[: 1 + tape.number() % (len(lines) - 1)]
        try:
            found = reader(written(part.encode()))
        except DataError:
            continue
        assert len(found) == part.count("\n") + (not part.endswith("\n"))


@fuzz("loaders", size=64, share=3)
def test_what_follows_a_document_is_not_dropped(tape: Tape) -> None:
    rows = [{"id": "1", "question": "q?", "answers": ["a"], "text": "x"}]
    after = text_of(tape)
    data = (json.dumps(rows, indent=1) + after).encode("utf-8", "replace")
    for reader in (load_questions, load_corpus):
        try:
            assert len(reader(written(data))) == 1
        except DataError:
            continue
        assert not after.strip()


@fuzz("loaders", size=96, share=3)
def test_skipped_rows_are_counted(tape: Tape) -> None:
    rows: list[dict[str, Any]] = [
        {"id": f"{i}", "question": tape.pick(("q?", " ", "who?")), "answers": tape.pick((["a"], [], ["", " "], [1]))}
        for i in range(1 + tape.byte() % 6)
    ]
    path = written("".join(json.dumps(row) + "\n" for row in rows).encode())
    try:
        found = read_questions(path, unanswerable="skip")
    except DataError:
        assert not any(row["question"].strip() and "".join(map(str, row["answers"])).strip() for row in rows)
        return
    assert len(found.questions) + found.skipped == len(rows)


# Other readers --------------------------------------------------------------------------------------------------------


@fuzz("loaders", size=200, each=6, share=4)
def test_rows_of_evaluations_and_labels_are_read_or_refused(tape: Tape) -> None:
    keys = (
        "question",
        "turns",
        "calls",
        "tool",
        "argument",
        "answer",
        "label",
        "result",
        "retrieved",
        "id",
        "golden_answers",
    )
    value = json_like(tape, keys=keys, texts=TEXTS)
    if not isinstance(value, dict):
        value = {"question": {"id": "1", "question": "q", "golden_answers": ["a"]}, "turns": [value], "label": 1}
    try:
        line = json.dumps(value)
    except ValueError:
        return
    for read in (lambda: read_labelled(written(line.encode())), lambda: parse_row(line, where="here")):
        try:
            assert read()
        except TurnTreeError:
            continue


@fuzz("loaders", size=96, share=2)
def test_yaml_of_other_projects_is_read_or_refused(tape: Tape) -> None:
    pieces = ("a:", " b: ", "\n", "  ", "- ", "&x ", "*x", "<<: *x", "{", "}", "[", "]",
    "!!python/object:os.system ", "? ", "|", ">", "${a}", "${oc.env:HOME}", "data.x=1")  # fmt: skip
    text = text_of(tape, pieces)
    path = Path(FOLDER.name, "file.yaml")
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        read_yaml(path)
    except TurnTreeError:
        return


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


# Size -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("entry", ['"t\\nx"', '{"idx": 0, "text": "x"}', '{"title": "a", "text": "b"}'])
def test_documents_of_many_entries_take_linear_time(entry: str) -> None:
    def reading(count: int) -> Callable[[], None]:
        path = Path(FOLDER.name, f"{count}.json")
        path.write_text("[" + ", ".join([entry.replace(": 0", f": {i}") for i in range(count)]) + "]", encoding="utf-8")

        def read() -> None:
            load_corpus(path)

        return read

    bound = 9 * max(seconds(reading(20_000)), 0.02)
    assert seconds(reading(80_000), enough=bound) < bound


@pytest.mark.parametrize("count", [3, 60])
def test_aliases_of_yaml_do_not_multiply(count: int) -> None:
    """Nine copies of nine copies of ...: a file of a few lines must not take hours."""
    lines = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, count))]
    lines += ["m0: &m0 {x: 1}", *(f"m{i}: &m{i} {{a: *m{i - 1}, b: *m{i - 1}, c: *m{i - 1}}}" for i in range(1, count))]
    path = Path(FOLDER.name, "laughs.yaml")
    path.write_text("\n".join(lines), encoding="utf-8")
    if count < 10:
        read_yaml(path)
    else:
        with pytest.raises(DataError, match="alias"):
            read_yaml(path)


@pytest.mark.parametrize("text", ["a: &a {b: *a}", "[" * 5000, "a: " + "{b: " * 3000])
def test_yaml_without_an_end_is_refused(text: str) -> None:
    path = Path(FOLDER.name, "endless.yaml")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError):
        read_yaml(path)
