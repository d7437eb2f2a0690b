"""Rows as a parquet file with fixed column types, so that an empty list in the first row changes no type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from turntree.errors import MissingExtraError
from turntree.trainers.atomic import atomic_file

__all__ = ["write_verl_parquet"]

_BATCH = 256


def write_verl_parquet(path: Path, rows: Iterable[dict[str, Any]], *, tokens: bool) -> tuple[int, int]:
    """Write rows of :func:`verl_rows` (``tokens``) or :func:`prompt_rows`; returns rows, and texts that were changed.

    Parquet's texts are UTF-8: a lone surrogate in a text becomes U+FFFD and the text is counted; tokens are exact.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"writing {path} needs pyarrow: pip install 'turntree[parquet]'") from error
    schema = _schema(pyarrow, tokens=tokens)
    cleaner = _Cleaner()
    found = _batches(map(cleaner.clean, rows))
    first = next(found, None)
    if first is None:  # a file that is there stays as it is
        return 0, 0
    count = 0
    with atomic_file(path) as handle, pyarrow.parquet.ParquetWriter(handle, schema) as writer:
        for batch in chain((first,), found):
            count += len(batch)
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
    return count, cleaner.changed


def _schema(pa: Any, *, tokens: bool) -> Any:
    text, texts = pa.string(), pa.list_(pa.string())
    messages = pa.list_(pa.struct([("role", text), ("content", text)]))
    target = pa.struct([("target", texts)])
    extra = [("split", text), ("index", pa.int64()), ("id", text), ("question", text), ("answer", texts)]
    extra += [("uid", text), ("step", pa.int64()), ("tree", pa.int64())]
    columns = [
        ("data_source", text),
        ("prompt", messages),
        ("ability", text),
        ("reward_model", pa.struct([("style", text), ("ground_truth", target)])),
        ("extra_info", pa.struct(extra)),
    ]
    if tokens:
        ids, floats, mask = pa.list_(pa.int64()), pa.list_(pa.float64()), pa.list_(pa.int8())
        columns += [("messages", messages), ("prompts", ids), ("responses", ids), ("response_mask", mask)]
        columns += [("input_ids", ids), ("attention_mask", mask), ("position_ids", ids), ("loss_mask", mask)]
        columns += [("rollout_log_probs", floats), ("advantages", floats), ("reward", pa.float64())]
    return pa.schema(columns)


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch


class _Cleaner:
    """Replaces what UTF-8 cannot hold, and counts the texts."""

    def __init__(self) -> None:
        self.changed = 0

    def clean(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {key: self.clean(item) for key, item in value.items()}
        if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
            return [self.clean(item) for item in value]
        return value

    def _text(self, value: str) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.changed += 1
            return "".join("\N{REPLACEMENT CHARACTER}" if "\ud800" <= c <= "\udfff" else c for c in value)
        return value
