"""report.html of a run: whole, self-contained, and deaf to what models, passages and configurations say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.trainers.report.made_runs import made_run
from tests.trainers.studio.stored import EVIL
from turntree.errors import CheckpointError, DataError
from turntree.trainers.report.history import RunHistory
from turntree.trainers.report.run_page import render_run, write_page, write_run_page
from turntree.trainers.run_folder import MetricsLog, RunFolder

VOID = {"meta", "input"}


class Page(HTMLParser):
    """Tags with attributes and text; everything must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or not self.open or self.open[-1] != tag:
            raise AssertionError(f"</{tag}> closes {self.open[-1:]}")
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def loads_nothing(html: str) -> None:
    page = Page(html)
    assert not [t for t, _ in page.tags if t in ("script", "link", "img", "iframe", "object", "base", "form")]
    for _, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on") or a == "src"]
        assert (attributes.get("href") or "#").startswith("#")
    assert not re.search(r"url\(|@import", html)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert "script-src" not in policy


def test_a_page_says_what_the_run_did(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "seed=7", "algorithm=at2po", "search.args.api_key=sesame-123", trees=True)
    file = write_run_page(run)
    html = file.read_text(encoding="utf-8")
    assert file == run / "report.html"
    loads_nothing(html)
    said = " ".join(Page(html).text)
    for words in ("finished", "seed 7", "at2po", "step 4 of 4", "Exact match on validation", "60%", "before training",
                  "How trajectories end", "Sample trees", "algorithm.name", "data.sha256", "aaa"):  # fmt: skip
        assert words in said, words
    for axis in ("tokens", "calls", "time", "step"):
        assert html.count(f'class="by by-{axis}"') > 4
    assert "sesame-123" not in html
    assert html == render_run(RunHistory.read(run)), "the same files give the same page"


def test_nothing_that_a_run_holds_becomes_html(tmp_path: Path) -> None:
    evil = {"data": {"dataset": EVIL, "</style><script>": EVIL}, "version": 1}
    unquoted = EVIL.replace("'", "")
    run = made_run(tmp_path / "run", f"env.prompt='{unquoted}'", trees=True, evil=True, passport=evil)
    html = write_run_page(run).read_text(encoding="utf-8")
    loads_nothing(html)
    assert "window.pwned" in "".join(Page(html).text)


def test_a_run_without_steps_validations_or_trees_still_has_a_page(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 0})
    assert "No step was finished" in render_run(RunHistory.read(run.path))
    with MetricsLog(run.metrics_file) as log:
        log.write(1, {"loss": 2.5})
        log.write(2, {"loss": float("nan")})
    html = render_run(RunHistory.read(run.path))
    loads_nothing(html)
    assert "by-step" in html
    assert 'by-tokens"' not in html, "what was not counted is no axis"
    assert "not finite in 1 steps, first in step 2" in html


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "trainer.steps=9", validate=())
    html = render_run(RunHistory.read(run))
    assert "not finished: step 4 of 9" in html


def test_a_broken_file_is_named_and_costs_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = made_run(tmp_path / "run")
    (run / "validation/step-000002/evaluation.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match="step-000002"):
        write_run_page(run)
    write_page(run)
    assert "report.html was not written" in caplog.text
    with pytest.raises(CheckpointError):
        write_run_page(tmp_path)
