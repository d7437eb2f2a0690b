"""Tests of the tests, for the rooms on which every result rests. Run by ``make mutants`` and ``make coverage``.

A room is a few modules and the tests that are about them.

``mutants``: are faults that are put into the code on purpose found? The mutants (an operator, a constant, an argument,
a condition changed) come from mutmut, which compiles all mutants of a function next to it and forks a worker a mutant:
torch and the tests are imported once, where tools that edit files import them for each of thousands of mutants. mutmut
follows no links and knows only ``src``; so the package is laid out for it, without links, in ``build/mutants``. It
leaves alone what stands outside of functions, decorated functions (properties among them), types and docstrings.
``killed`` are mutants for which a test failed; those that ran out of time are told apart and count neither way. What
was killed is not tried again while its function is the same; ``--fresh`` forgets it.

``coverage``: which branches do a room's own tests take? The rest of the suite, which runs through the rooms too, does
not count.

Exit code 0: every room reaches ``--least`` percent; 1: one does not; 2: nothing was measured, as a test fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from turntree.trainers.stats import Interval, share_interval

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "build" / "mutants"
MUTMUT = Path(sys.executable).with_name("mutmut")
SPINNER = tuple("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Real data is looked for beside the checkout, not beside the copy of it.
    "TURNTREE_SHARED": os.environ.get("TURNTREE_SHARED", str(ROOT.parent / "shared")),
}


@dataclass(frozen=True, slots=True)
class Room:
    """``modules``: files of ``turntree`` to change; ``tests``: what should notice, below ``tests/``. Both are globs."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "credit": Room(("trainers/credit/*.py",), ("trainers/test_credit*.py",)),
    "objectives": Room(
        ("trainers/objectives.py", "trainers/surrogate.py", "trainers/losses/*.py"),
        ("trainers/test_objectives.py", "trainers/test_losses*.py", "trainers/test_theory.py"),
    ),
    "packing": Room(
        ("trainers/packing.py", "trainers/pairs.py"), ("trainers/test_packing.py", "trainers/test_pairs.py")
    ),
    "grammar": Room(("envs/grammar/*.py", "envs/tags.py"), ("envs/test_grammar*.py", "envs/test_planner_grammar.py")),
    "metrics": Room(
        ("envs/metrics.py", "envs/numerals.py", "trainers/metrics.py"),
        ("envs/test_metrics.py", "envs/test_numerals.py", "trainers/test_metrics.py"),
    ),
}

# Hypothesis draws the same examples for each mutant, and stops at the first that fails instead of looking for the
# smallest: a failing test is all that is asked for. How slow a loaded machine is says nothing about a mutant.
PLUGIN = """
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "mutants",
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("mutants")
"""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A mutant that no test noticed, or that no test reached."""

    name: str
    status: str
    diff: str


@dataclass(frozen=True, slots=True)
class Mutants:
    """What became of a room's mutants. ``interval``: Wilson's 95 % interval of the share, of a sample."""

    room: str
    modules: tuple[str, ...]
    tests: tuple[str, ...]
    mutants: int
    tried: int
    seed: int | None
    statuses: dict[str, int]
    share: float
    interval: Interval | None
    survivors: tuple[Survivor, ...]

    def __str__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in sorted(self.statuses.items()))
        sure = f" [{100 * self.interval.low:.1f}, {100 * self.interval.high:.1f}]" if self.interval else ""
        total = (
            f"{self.room}: {self.mutants} mutants, {self.tried} tried: {counts}; killed {100 * self.share:.1f} %{sure}"
        )
        return "\n".join([*(f"\n# {s.status}: {s.name}\n{s.diff}" for s in self.survivors), f"\n{total}"])


@dataclass(frozen=True, slots=True)
class Coverage:
    """Branches (ways out of a condition or loop) and statements of a room's modules, and those its tests took.

    ``missing``: of each module the branches not taken, as ``line->line``; a negative line is the function's end.
    """

    room: str
    statements: int
    covered_statements: int
    branches: int
    covered_branches: int
    missing: dict[str, list[str]]

    @property
    def share(self) -> float:
        """Share of the branches taken."""
        return self.covered_branches / self.branches

    def __str__(self) -> str:
        taken = f"{self.covered_branches} of {self.branches} branches, {100 * self.share:.1f} %"
        lines = f"{self.covered_statements} of {self.statements} statements"
        missing = [f"  {module}: {', '.join(arcs)}" for module, arcs in self.missing.items()]
        return "\n".join([f"{self.room}: {taken}; {lines}", *missing])


def lay_out(room: Room, bench: Path, *, seconds: float) -> tuple[Path, ...]:
    """A checkout without links for mutmut in ``bench``; returns the room's modules in it, relative to it.

    Files keep their times, by which mutmut knows what has changed.
    """
    ignore = shutil.ignore_patterns("__pycache__", "node_modules")
    for folder in ("src/turntree", "tests"):
        shutil.rmtree(bench / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, bench / folder, symlinks=False, ignore=ignore)
    shutil.copy2(ROOT / "conftest.py", bench)
    (bench / "mutants_profile.py").write_text(PLUGIN, encoding="utf-8")
    package = bench / "src" / "turntree"
    modules = tuple(sorted(p.relative_to(bench) for pattern in room.modules for p in package.glob(pattern)))
    settings: dict[str, object] = {
        "source_paths": ["src"],
        "only_mutate": [str(module) for module in modules],
        "also_copy": ["conftest.py", "mutants_profile.py"],
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": find_tests(room),
        # Workers come from a process in which no test has run: what a test left in a cache would hide a mutant.
        "process_isolation": "forkserver",
        # A mutant may take ten times the time of its tests, and this much more.
        "timeout_multiplier": 10.0,
        "timeout_constant": seconds / 10,
        "use_git_change_detection": False,
        "track_dependencies": False,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    own = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (bench / "pyproject.toml").write_text("\n".join([own, "[tool.mutmut]", *lines, ""]), encoding="utf-8")
    return modules


def find_tests(room: Room) -> list[str]:
    """The room's test files, relative to the checkout."""
    found = sorted({p.relative_to(ROOT) for pattern in room.tests for p in (ROOT / "tests").glob(pattern)})
    return [str(path) for path in found]


def make_mutants(modules: Sequence[Path], bench: Path) -> dict[str, str]:
    """Write all mutants of these files, as mutmut does when it runs; what is known of each from runs before."""
    from mutmut.__main__ import create_mutants
    from mutmut.configuration import reset_config
    from mutmut.utils.file_utils import copy_src_dir

    with contextlib.chdir(bench), contextlib.redirect_stdout(io.StringIO()):
        reset_config()  # of the room before
        copy_src_dir()
        create_mutants(1)
    return read_statuses(modules, bench)


def read_statuses(modules: Sequence[Path], bench: Path) -> dict[str, str]:
    """What became of each mutant, in mutmut's words."""
    from mutmut.stats import status_by_exit_code

    found: dict[str, str] = {}
    for module in modules:
        meta = bench / "mutants" / f"{module}.meta"
        if meta.exists():  # there is something to mutate
            codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
            found |= {name: status_by_exit_code[code] for name, code in codes.items()}
    return found


def diffs_of(names: Sequence[str], bench: Path) -> dict[str, str]:
    """What each mutant changes."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    with contextlib.chdir(bench):
        return {name: get_diff_for_mutant(name) for name in names}


def run_mutmut(bench: Path, names: Sequence[str], *, jobs: int) -> None:
    """Try these mutants. Exits with 2 when mutmut fails, as it does when a test fails without any mutant."""
    env = (
        os.environ
        | ENVIRONMENT
        | {
            "PYTHONHASHSEED": "0",
            # Loading each plugin again would be most of a worker's work.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_PLUGINS": "mutants_profile,_hypothesis_pytestplugin",
            "PYTHONPATH": str(bench / "mutants"),
        }
    )
    command = [str(MUTMUT), "run", "--max-children", str(jobs), *names]
    done = subprocess.run(command, cwd=bench, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if not line.startswith(SPINNER)]
        print(*said[-100:], done.stderr[-6000:], f"mutmut failed with exit code {done.returncode}.", sep="\n")
        sys.exit(2)


def measure(name: str, args: argparse.Namespace) -> Mutants:
    """Try a room's mutants, all or a sample."""
    room, bench = ROOMS[name], BENCH / name
    if args.fresh:
        shutil.rmtree(bench, ignore_errors=True)
    modules = lay_out(room, bench, seconds=args.seconds)
    before = make_mutants(modules, bench)
    known = sorted(before)
    # A shuffled list, so that a larger sample holds the smaller one.
    chosen = random.Random(args.seed).sample(known, len(known))[: args.sample]
    if to_try := [mutant for mutant in chosen if before[mutant] != "killed"]:
        run_mutmut(bench, to_try, jobs=args.jobs)
    after = read_statuses(modules, bench)
    counts = Counter(after[mutant] for mutant in chosen)
    judged = len(chosen) - counts["timeout"]
    bad = sorted(mutant for mutant in chosen if after[mutant] not in ("killed", "timeout"))
    diffs = diffs_of(bad, bench)
    sampled = len(chosen) < len(known)
    return Mutants(
        room=name,
        modules=tuple(str(module.relative_to("src/turntree")) for module in modules),
        tests=tuple(find_tests(room)),
        mutants=len(known),
        tried=len(chosen),
        seed=args.seed if sampled else None,
        statuses=dict(counts),
        share=counts["killed"] / judged,
        interval=share_interval([1] * counts["killed"] + [0] * (judged - counts["killed"])) if sampled else None,
        survivors=tuple(Survivor(mutant, after[mutant], diffs[mutant]) for mutant in bad),
    )


def cover(name: str) -> Coverage:
    """Run a room's tests and count the branches of its modules that they take."""
    room = ROOMS[name]
    modules = {str(p.relative_to(ROOT)) for pattern in room.modules for p in ROOT.glob(pattern)}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "coverage.json"
        command = ["-q", "-p", "no:cacheprovider", "--cov", "--cov-branch", f"--cov-report=json:{found}"]
        env = os.environ | ENVIRONMENT | {"COVERAGE_FILE": str(Path(folder) / "data")}
        run = [sys.executable, "-m", "pytest", *command, *find_tests(room)]
        done = subprocess.run(run, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            print(done.stdout[-6000:])
            sys.exit(2)
        files = json.loads(found.read_text(encoding="utf-8"))["files"]
    totals = [files[module]["summary"] for module in sorted(modules)]
    missing = {m: [f"{a}->{b}" for a, b in files[m]["missing_branches"]] for m in sorted(modules)}
    return Coverage(
        room=name,
        statements=sum(t["num_statements"] for t in totals),
        covered_statements=sum(t["covered_lines"] for t in totals),
        branches=sum(t["num_branches"] for t in totals),
        covered_branches=sum(t["covered_branches"] for t in totals),
        missing={module: arcs for module, arcs in missing.items() if arcs},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    what = parser.add_subparsers(dest="what", required=True)
    mutants = what.add_parser("mutants", formatter_class=parser.formatter_class, help="faults put in on purpose")
    mutants.add_argument("--sample", type=int, metavar="N", help="mutants a room, drawn with --seed; all without it")
    mutants.add_argument("--seed", type=int, default=0, help="of the sample")
    mutants.add_argument(
        "--seconds", type=float, default=10.0, help="a mutant may take, beside 10 times its tests' own"
    )
    mutants.add_argument("--jobs", type=int, default=1, help="mutants tried at once")
    mutants.add_argument("--fresh", action="store_true", help="try again what was killed in an earlier run, too")
    mutants.set_defaults(least=85.0)
    coverage = what.add_parser("coverage", formatter_class=parser.formatter_class, help="branches taken")
    coverage.set_defaults(least=90.0)
    for command in (mutants, coverage):
        command.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all without one")
        command.add_argument("--least", type=float, help="percent that every room must reach")
        command.add_argument("--json", type=Path, metavar="PATH", help="write what was found to this file")
    args = parser.parse_args()
    if unknown := [name for name in args.rooms if name not in ROOMS]:
        parser.error(f"expected rooms of {', '.join(ROOMS)}, found {', '.join(unknown)}")
    return args


def main() -> None:
    args = parse()
    reports: list[Mutants | Coverage] = []
    for name in args.rooms or ROOMS:
        report = measure(name, args) if args.what == "mutants" else cover(name)
        reports.append(report)
        print(report, flush=True)
        if args.json is not None:  # after each room: a run may take hours
            args.json.write_text(json.dumps([asdict(r) for r in reports], indent=2) + "\n", encoding="utf-8")
    sys.exit(any(100 * report.share < args.least for report in reports))


if __name__ == "__main__":
    main()
