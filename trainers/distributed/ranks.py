"""The processes of one run, and what they tell each other.

What is sent here are plain objects of this program (trees, rows, numbers), pickled by ``torch.distributed`` between
processes of one run, which trust each other as they trust the weights; nothing of it is read from or written to a file.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from turntree.errors import ConfigError, RankError, TurnTreeError

__all__ = ["ALONE", "STORE", "Ranks", "join", "world_size"]

STORE = "TURNTREE_RANK_STORE"
"""Environment variable: the file in which ranks that turntree started itself find each other."""

T = TypeVar("T")

_LOST = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ``size`` processes of a run; ``local_rank`` counts those of its machine.

    Every method that talks to the others is collective: all ranks call it, in the same order.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the run folder and talks to people."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in the order of the ranks, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def any(self, flag: bool) -> bool:
        """Whether any rank says so: what all must agree on, such as an end after Ctrl-C."""
        return any(self.gather(flag))

    def main(self, make: Callable[[], T]) -> T:
        """What ``make`` returns, called on the main rank only. Its ``TurnTreeError`` is raised on every rank."""
        if self.size == 1:
            return make()
        result: T | None = None
        failure: TurnTreeError | None = None
        if self.is_main:
            try:
                result = make()
            except TurnTreeError as error:
                failure = error
        result, failure = self.gather((result, failure))[0]
        if failure is not None:
            raise failure
        return cast("T", result)

    def agree(self, what: str, value: object) -> None:
        """Raise ``RankError`` unless every rank has the same value."""
        found = self.gather(value)
        if any(other != found[0] for other in found):
            raise RankError(
                f"the ranks disagree about {what}: {found}; they need the same code, data and options on every machine"
            )

    @contextmanager
    def naming_losses(self) -> Iterator[None]:
        """Inside, an error of a broken connection says that another rank is gone."""
        try:
            yield
        except TurnTreeError:
            raise
        except RuntimeError as error:
            if self.size == 1 or not _is_loss(error):
                raise
            reason = str(error).strip().partition("\n")[0][:200]
            raise RankError(
                f"rank {self.rank} of {self.size} stopped because another rank is gone or does not answer ({reason}); "
                "see what that rank said, then go on with resume=true"
            ) from error


ALONE = Ranks()
"""One process."""


def _is_loss(error: RuntimeError) -> bool:
    import torch.distributed as dist

    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in _LOST)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks the launcher of this process (torchrun, or turntree itself) started; 1 without one.

    Raises ``ConfigError`` where its variables are no numbers.
    """
    return _number(environment, "WORLD_SIZE", 1)


def join(*, device: str = "cpu", timeout_s: float = 1800.0) -> Ranks:
    """Become one of the ranks that the launcher's environment variables name; a process without a launcher is alone.

    ``device`` decides how they talk: gloo for CPU tensors, NCCL for CUDA tensors. A collective that takes longer than
    ``timeout_s`` is an error. A second call returns the same ranks. Raises ``RankError`` where they do not find each
    other.
    """
    import torch.distributed as dist

    local = _number(os.environ, "LOCAL_RANK", 0)
    if not dist.is_initialized():
        rank, size = _number(os.environ, "RANK", 0), world_size()
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        try:
            _initialise(backend, rank, size, timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise RankError(
                f"rank {rank} of {size} did not find the others ({error}); start all ranks with one torchrun, or with "
                "trainer.ranks on one machine"
            ) from error
        atexit.register(_leave)
    return Ranks(dist.get_rank(), dist.get_world_size(), local)


def _initialise(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    import torch.distributed as dist

    if size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    elif path := os.environ.get(STORE):
        file = dist.FileStore(path, size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=file, rank=rank, world_size=size, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r}: expected a number, as torchrun sets it") from None
