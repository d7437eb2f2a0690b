"""Turns as they are paid for: a teacher that is killed in the middle of a trajectory is not asked for its turns again.

Each answer of the engine is one line of ``turns.jsonl``, with all that was used so far. Those of trajectories that are
finished go when the file is opened or closed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turntree.agents.engines.endpoint import Usage
from turntree.agents.engines.protocol import Engine, Generation, Request
from turntree.errors import CheckpointError, EngineError
from turntree.trainers.append import AppendFile, json_line
from turntree.trainers.atomic import atomic_file, written

__all__ = ["RecordedEngine", "TurnLog"]

_FILE = "turns.jsonl"


def _usage(row: dict[str, Any], path: Path) -> Usage:
    try:
        return Usage(**row["usage"])
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: a line does not say what was used ({error})") from error


class TurnLog:
    """The answers of unfinished trajectories, and the usage. ``finished`` are the uids whose turns are not needed."""

    def __init__(self, folder: Path, *, finished: Iterable[str] = ()) -> None:
        self._path = folder / _FILE
        self.usage = Usage()
        self._known: dict[str, dict[str, dict[str, Any]]] = {}
        self._file = AppendFile(self._path)
        done = set(finished)
        for _, _, row in self._file.lines():
            self.usage = _usage(row, self._path)
            if row.get("uid", None) is not None and row["uid"] not in done:
                self._known.setdefault(row["uid"], {})[row["turn"]] = row
        self._compact()

    def find(self, request: Request) -> Generation | None:
        """What was answered to the same request before."""
        row = self._known.get(_uid(request), {}).get(_name(request))
        if row is None:
            return None
        ids = tuple(row["ids"])
        after = request.prefix.extend(ids)
        if row["length"] is not None:  # of a server that counts by its own tokens
            after.length = row["length"]
        return Generation(
            ids=ids,
            logprobs=(math.nan,) * len(ids),
            finish_reason=row["finish"],
            version=row["version"],
            continuation=after,
            stop_string=row["stop"],
        )

    def write(self, request: Request, generation: Generation, usage: Usage) -> None:
        """Keep an answer. An aborted one is only paid for."""
        if generation.finish_reason == "abort":
            self.note(usage)
            return
        length = generation.continuation.length
        uid, name = _uid(request), _name(request)
        row = {
            "uid": uid,
            "turn": name,
            "ids": list(generation.ids),
            "finish": generation.finish_reason,
            "stop": generation.stop_string,
            "length": None if length == len(request.prefix) + len(generation.ids) else length,
            "version": generation.version,
            "usage": asdict(usage),
        }
        self._file.append(row)
        self.usage = usage
        self._known.setdefault(uid, {})[name] = row

    def note(self, usage: Usage) -> None:
        """Keep what was used for nothing."""
        if usage != self.usage:
            self._file.append({"usage": asdict(usage)})
            self.usage = usage

    def forget(self, uid: str) -> None:
        """The trajectory is finished and written elsewhere."""
        self._known.pop(uid, None)

    def close(self) -> None:
        """Leave the usage and the turns of trajectories that are not finished."""
        self._compact()
        self._file.close()

    def _compact(self) -> None:
        rows = [row for turns in self._known.values() for row in turns.values()]
        with written(self._path), atomic_file(self._path) as file:
            for row in rows:
                file.write(json_line(row))
            file.write(json_line({"usage": asdict(self.usage)}))
        self._file.close()
        self._file = AppendFile(self._path)


def _uid(request: Request) -> str:
    return str(request.key[0])


def _name(request: Request) -> str:
    """Equal for requests that the engine answers alike: the same place, seed and context."""
    parts = json.dumps([list(request.key), request.seed, request.params.max_tokens, request.prefix.token_ids()])
    return hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()


class RecordedEngine:
    """An engine whose answers are written down, and given again instead of being asked for again.

    ``usage`` counts all answers since the folder was begun; the endpoint's own count where the engine has one. What was
    in flight when a process was killed is in no count of ours.
    """

    def __init__(self, engine: Engine, log: TurnLog) -> None:
        self.engine = engine
        self.log = log

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.engine.version

    @property
    def usage(self) -> Usage:
        """Requests, tokens and cost so far."""
        return self.log.usage

    def update_weights(self, version: int) -> None:
        """As the engine does."""
        self.engine.update_weights(version)

    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """One generation a request, in the same order. Raises the first error after all have ended."""
        outcomes = dict(self.as_completed(requests))
        found = [outcomes[i] for i in range(len(requests))]
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return [outcome for outcome in found if isinstance(outcome, Generation)]

    def as_completed(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation | Exception]]:
        """(index of the request, its generation or its error), known ones first."""
        fresh: list[int] = []
        for place, request in enumerate(requests):
            known = self.log.find(request)
            if known is None:
                fresh.append(place)
            else:
                yield place, known
        asked = [requests[place] for place in fresh]
        for index, outcome in self._answers(asked):
            if isinstance(outcome, Generation):
                self.log.write(asked[index], outcome, self._used(asked[index], outcome))
            else:
                self.log.note(self._used(asked[index], None))
            yield fresh[index], outcome

    def _answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Generation | Exception]]:
        if not requests:
            return iter(())
        arriving: Any = getattr(self.engine, "as_completed", None)
        if arriving is not None:
            return iter(arriving(requests))
        found = self.engine.generate(requests)
        if len(found) != len(requests):
            raise EngineError(f"{type(self.engine).__name__} answered {len(found)} of {len(requests)} requests")
        return iter(enumerate(found))

    def _used(self, request: Request, generation: Generation | None) -> Usage:
        """All that was used by now."""
        measured: Any = getattr(self.engine, "usage", None)
        if isinstance(measured, Usage):
            return measured
        if generation is None:
            return self.log.usage
        return self.log.usage + Usage(
            requests=1, prompt_tokens=len(request.prefix), completion_tokens=len(generation.ids)
        )
