"""Commands of search indexes: build one, look at it, ask it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from turntree.commands.console import Stopped, argument, say, say_json, stage_bars
from turntree.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from turntree.search_backend.survey import Estimate, Survey

__all__ = ["run_index_build", "run_index_info", "run_index_search"]

_ASK_FROM = 120  # seconds


def run_index_build(
    corpus: Path,
    out: Path,
    *,
    kind: str,
    encoder: str | None,
    settings: Sequence[str],
    memory_limit: str | None,
    yes: bool,
    force: bool,
    replace: bool,
    dry_run: bool,
) -> None:
    """``turntree index build``."""
    from turntree.search_backend.index import build_index, check_fits, find_kind, survey_corpus, total_estimate

    found = find_kind(kind)
    options = dict(map(argument, settings)) | ({"encoder": encoder} if encoder is not None else {})
    checked = found.settings(options)
    about = survey_corpus(corpus)
    needs = total_estimate(found, about, checked)
    for line in _estimate_lines(about, needs):
        say(line)
    try:
        check_fits(found, about, checked, out, memory_limit=_bytes(memory_limit))
    except CapacityError as error:
        if not force:
            raise CapacityError(f"{error}. --force builds nevertheless") from None
        say(f"does not fit, but --force: {error}")
    if dry_run:
        return
    if needs.seconds > _ASK_FROM and not yes and sys.stdin.isatty():
        click.confirm("Build it?", abort=True)
    try:
        with stage_bars() as report:
            build_index(corpus, out, kind=kind, options=options, progress=_progress(report, about), replace=replace)
    except KeyboardInterrupt:
        raise Stopped("stopped; the same command goes on where it was") from None
    for line in _info_lines(out):
        say(line)


def _progress(report: Callable[[str, int, int, str], None], about: Survey) -> Callable[[str, int, int, str], None]:
    """Stages of unknown length get the estimated one."""
    return lambda stage, done, total, note: report(stage, done, total or max(about.passages, done), note)


def _bytes(text: str | None) -> int | None:
    from turntree.search_backend.machine import parse_bytes

    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory-limit: {error}") from error


def _estimate_lines(about: Survey, needs: Estimate) -> list[str]:
    from turntree.search_backend.machine import human_bytes

    size = f"{about.passages} passages, {human_bytes(about.text_bytes)} of text"
    minutes = f"{needs.seconds:.0f} s" if needs.seconds < 120 else f"{needs.seconds / 60:.0f} min"
    return [
        f"corpus: {'' if about.exact else 'about '}{size}",
        f"build: about {human_bytes(needs.build_memory)} of memory, {human_bytes(needs.disk)} of disk, {minutes}",
        f"search: about {human_bytes(needs.load_memory)} of memory, and {human_bytes(needs.mapped)} of mapped files",
        *needs.notes,
    ]


def run_index_info(folder: Path, *, as_json: bool) -> None:
    """``turntree index info``."""
    from turntree.search_backend.index import check_index, is_shipped, open_index, read_manifest

    if as_json:
        say_json(read_manifest(folder))
        return
    opened = is_shipped(read_manifest(folder)["kind"])
    if opened:
        open_index(folder)  # all its checks
    else:
        check_index(folder)
    for line in _info_lines(folder):
        say(line)
    if not opened:
        say("not opened: its kind is no part of turntree; turntree index search --set kind=... does")


def _info_lines(folder: Path) -> list[str]:
    from turntree.search_backend.index import read_manifest
    from turntree.search_backend.machine import human_bytes

    manifest = read_manifest(folder)
    corpus = manifest["corpus"]
    return [
        f"index: {folder}, kind {manifest['kind']}, {human_bytes(sum(manifest['files'].values()))}",
        f"corpus: {corpus['passages']} passages, fingerprint {corpus['fingerprint']}, in {corpus['path']}",
        "settings: " + " ".join(f"{name}={value}" for name, value in manifest["settings"].items()),
        "built: " + " ".join(f"{name}={value}" for name, value in manifest["built"].items()),
        "versions: " + " ".join(f"{name} {value}" for name, value in manifest["versions"].items() if value),
    ]


def run_index_search(folder: Path, queries: Sequence[str], *, k: int, settings: Sequence[str], as_json: bool) -> None:
    """``turntree index search``."""
    from turntree.search_backend.index import open_index

    backend = open_index(folder, **dict(map(argument, settings)))
    found = backend.search(list(queries), k=k)
    if as_json:
        rows = [{"query": q, "passages": [asdict(p) for p in passages]} for q, passages in zip(queries, found)]
        say_json(rows)
        return
    for query, passages in zip(queries, found):
        if len(queries) > 1:
            say(f"query: {query}")
        for rank, p in enumerate(passages, start=1):
            text = " ".join(p.text.split())
            say(f"{rank:2}. {p.score:.3f}  [{p.id}] {p.title}: {text[:160]}")
        if not passages:
            say("nothing matched")
