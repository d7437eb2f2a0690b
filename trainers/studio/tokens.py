"""The sampled tokens of a turn with their numbers: text, log-prob, entropy, value, advantage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.errors import DataError
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.studio.data import Run

__all__ = ["TokenReader", "pieces", "token_view"]

_FOLDERS = ("model", "best-model", "initial-model")


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[int, str]]:
    """(number of tokens, text) whose texts joined are the turn; tokens that share a character come as one piece.

    ``decode`` sees a window only, since some tokenizers write a token differently at the start of a text.
    """
    start = read = 0
    for end in range(1, len(ids) + 1):
        known, new = decode(ids[start:read]), decode(ids[start:end])
        # An unfinished character ends in U+FFFD; a piece is shown once its bytes are complete.
        if end < len(ids) and (len(new) <= len(known) or new.endswith("\ufffd")):
            continue
        yield end - read, new[len(known) :]
        start, read = read, end


@dataclass(frozen=True, slots=True)
class TokenReader:
    """Decodes token ids with the run's tokenizer."""

    source: str
    decode: Callable[[Sequence[int]], str]

    @staticmethod
    def of(folder: RunFolder, configured: str = "", given: Path | None = None) -> TokenReader | None:
        """The tokenizer of a model at hand, else of one the run wrote, else of the configured one; None without any."""
        places = [given] if given is not None else []
        places += [folder.path / name for name in _FOLDERS]
        if configured:
            places.append(Path(configured))
        for place in places:
            if (place / "tokenizer.json").is_file():
                return TokenReader(str(place), _decoder(place / "tokenizer.json"))
        return None


def _decoder(file: Path) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare exceptions
        raise DataError(f"cannot read the tokenizer {file}: {error}") from error
    lock = threading.Lock()

    def decode(ids: Sequence[int]) -> str:
        with lock:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return decode


def token_view(run: Run, step: int, index: int, node: str, reader: TokenReader | None) -> dict[str, Any]:
    """Pieces of a node's turn and, aligned with its tokens, every stored number; empty columns were not stored.

    Without a tokenizer ``pieces`` is None and the ids speak for themselves. Raises ``DataError`` for an unknown node.
    """
    row = run.step(step).row(index)
    cell = find_node(row, node)
    ids = cell["turn_ids"]
    further = cell.get("tokens", {})
    return {
        "id": node,
        "ids": ids,
        "pieces": None if reader is None else [[count, text] for count, text in pieces(ids, reader.decode)],
        "tokenizer": "" if reader is None else reader.source,
        "columns": {
            "logprob": [_number(x) for x in cell["logprobs"]],
            "entropy": [_number(x) for x in cell["entropies"]],
            "value": [_number(x) for x in further.get("value", ())],
            "advantage": [_number(x) for x in further.get("advantage", ())],
        },
    }


def find_node(row: Mapping[str, Any], node: str) -> Mapping[str, Any]:
    """The stored node of a name such as ``0.1``. Raises ``DataError``."""
    for cell in row["nodes"]:
        if (".".join(map(str, cell["path"])) or "root") == node:
            found: Mapping[str, Any] = cell
            return found
    raise DataError(f"the tree has no node {node!r}; the picture names all of them")


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None
