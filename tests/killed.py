"""Runs turntree commands in processes that kill themselves (SIGKILL) at a chosen moment; run as its own process.

``python tests/killed.py FOLDER`` reads jobs from stdin, one JSON object a line, and answers each with a line: how the
process ended (``done``, ``killed`` or ``failed``) and, where ``measure`` is set, how many calls each stage took, by
occasion. A job: ``command`` (train, evaluate or sft), ``overrides``, ``measure``, and ``kill``, null or ``{"stage",
"occasion", "call"}``: the process dies at that call (of Python or C) within that occasion of the stage. Everything
heavy is imported once; each job is a fork. ``FOLDER`` holds modules that the overrides name.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

STAGES = {
    "rollout": ("turntree.trainers.learner", "grow"),
    "update": ("turntree.trainers.stepper", "update"),
    "checkpoint": ("turntree.trainers.run_checkpoints", "save_checkpoint"),
    "best": ("turntree.trainers.run_checkpoints", "mark_best"),
    "validation": ("turntree.trainers.validation", "evaluate"),
    "store": ("turntree.trainers.store:TreeStore", "write"),
    "metrics": ("turntree.trainers.run_folder:MetricsLog", "write"),
    "export": ("turntree.trainers.learner", "save_model"),
}
"""What is watched; ``run`` is the whole command."""


class Watch:
    """Counts calls, by stage and occasion, and kills the process where it was told to."""

    def __init__(self, kill: dict[str, Any] | None) -> None:
        self.kill = kill
        self.calls = 0
        self.deadline: int | None = None
        self.counts: defaultdict[str, list[int]] = defaultdict(list)

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls == self.deadline:
                os.kill(os.getpid(), signal.SIGKILL)

    def stage(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*args: Any, **kwargs: Any) -> Any:
            start, occasion = self.calls, len(self.counts[name])
            self.counts[name].append(0)
            armed = self.kill is not None and (self.kill["stage"], self.kill["occasion"]) == (name, occasion)
            if armed and self.kill is not None:
                self.deadline = start + 1 + int(self.kill["call"])
            result = run(*args, **kwargs)
            if armed:  # this occasion took fewer calls than the measured one
                os.kill(os.getpid(), signal.SIGKILL)
            self.counts[name][occasion] = self.calls - start
            return result

        return watched


def work(job: dict[str, Any], answer: int) -> None:
    """In the fork: run the command and write what was counted."""
    from turntree.envs.loading import import_object
    from turntree.trainers.coldstart import cold_start
    from turntree.trainers.compose import compose
    from turntree.trainers.learner import train
    from turntree.trainers.scoring import score_sets

    watch = Watch(job["kill"])
    for name, (where, attribute) in STAGES.items():
        module, _, owner = where.partition(":")
        holder = import_object(where, what="stage") if owner else sys.modules[module]
        setattr(holder, attribute, watch.stage(name, getattr(holder, attribute)))
    config = compose(job["overrides"])

    def run() -> None:
        if job["command"] == "train":
            train(config)
        elif job["command"] == "sft":
            cold_start(config)
        else:
            from pathlib import Path

            score_sets(config, Path(config.out), keep_partial=True)

    sys.setprofile(watch)
    watch.stage("run", run)()
    sys.setprofile(None)
    os.write(answer, json.dumps(watch.counts).encode())


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job in a fork and say how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(2, 1)  # answers go to stdout, which is the parent's
        code = 1
        try:
            work(job, writing)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        counts = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    end = "killed" if killed else "done" if os.waitstatus_to_exitcode(status) == 0 else "failed"
    return {"end": end, "counts": json.loads(counts) if counts and job["measure"] else None}


def main() -> None:
    """Answer jobs until stdin ends."""
    sys.path.insert(0, sys.argv[1])
    import torch

    import turntree.trainers.coldstart
    import turntree.trainers.learner
    import turntree.trainers.scoring  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(attempt(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
