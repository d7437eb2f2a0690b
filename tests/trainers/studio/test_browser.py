"""The studio in a real browser."""

from __future__ import annotations

import json
import re
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.trainers.studio.conftest import KEY, Client
from tests.trainers.studio.stored import EVIL, made_up, write_run
from turntree.agents.dialogue import Dialogue
from turntree.agents.engines.protocol import SamplingParams
from turntree.agents.engines.scripted import ScriptedEngine
from turntree.agents.models import load_tokenizer
from turntree.trainers.compose import compose
from turntree.trainers.rollout import GrowthPlan, Limits, Prompt, grow
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.task import build_task
from turntree.trainers.tree import Group

pytestmark = pytest.mark.slow

LIMIT_MS = 200
"""What an interaction may take until it is painted."""

MEASURE = """async () => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => {
    const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0); }));
  const timed = async (act) => { const t = performance.now(); act(); await painted(); return performance.now() - t; };
  const frame = document.querySelector('.picture'); frame.focus();
  const svg = document.querySelector('svg.canvas'); const input = document.querySelector('.filters input');
  const type = (text) => { input.value = text; input.dispatchEvent(new Event('input', {bubbles: true})); };
  const key = (where, name) => where.dispatchEvent(new KeyboardEvent('keydown', {key: name, bubbles: true}));
  const out = {select: [], collapse: [], pan: [], filter: []};
  for (let round = 0; round < 4; round++) {
    for (const k of ['Right', 'Down', 'Right', 'Left', 'Left'])
      out.select.push(await timed(() => key(frame, `Arrow${k}`)));
    for (const k of ['c', 'e']) out.collapse.push(await timed(() => key(window, k)));
    for (const dy of [80, -60, 40]) out.pan.push(await timed(() => svg.dispatchEvent(
      new WheelEvent('wheel', {deltaY: dy, bubbles: true, cancelable: true}))));
    for (const text of ['1', '19', 'river', '']) out.filter.push(await timed(() => type(text)));
  }
  return out; }"""

SWITCH = """async () => {
  const painted = () => new Promise((done) => requestAnimationFrame(() => {
    const c = new MessageChannel(); c.port1.onmessage = done; c.port2.postMessage(0); }));
  const taken = [];
  for (const number of [77, 120, 3, 199, 60, 61, 150, 10, 181, 42]) {
    const there = () => document.querySelector('.head h1')?.textContent.includes(`number ${number}`);
    const start = performance.now(); document.querySelector(`[data-tree="${number}"]`).click();
    while (!there()) await new Promise((r) => setTimeout(r, 2));
    await painted();
    taken.push(performance.now() - start);
    await new Promise((r) => setTimeout(r, 150));  // the address is written
  }
  return taken; }"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "runs"
    write_run(folder / "big", steps=1, trees=200, leaves=64)
    write_run(folder / "evil", steps=2, trees=3, leaves=12, evil=True)
    write_run(folder / "small", steps=3, trees=4, leaves=6)
    return folder


@pytest.fixture(scope="module")
def client(runs: Path, open_studio: Callable[..., Client]) -> Client:
    return open_studio(runs)


class Tab:
    """A page of the studio that fails the test with whatever its console says."""

    def __init__(self, browser: Any, client: Client, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1400, "height": 860}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.client = client
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.set_default_timeout(60_000)

    def open(self, link: str = "", *, wait: str = ".canvas .card") -> Any:
        self.page.goto(f"{self.client.entrance}{link}")
        self.page.wait_for_selector(wait)
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.said == []
        assert all(url.startswith((self.client.url, "blob:")) for url in self.asked)


@pytest.fixture
def tab(browser: Any, client: Client) -> Iterator[Tab]:
    opened = Tab(browser, client)
    yield opened
    opened.close()


def until(page: Any, expression: str) -> None:
    """Wait for an expression to hold. Asked from outside: the page's policy forbids to evaluate texts inside of it."""
    end = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within a minute: {expression}"
        page.wait_for_timeout(30)


def selected(page: Any) -> str:
    return str(page.get_attribute(".canvas .card.selected", "data-node"))


def test_a_deep_link_opens_the_node_and_the_key_leaves_the_address(tab: Tab) -> None:
    page = tab.open("#/?run=small&step=2&tree=1&node=0&tab=siblings", wait=".inspector")
    assert selected(page) == "0"
    assert page.text_content(".head h1") == "Who rules the city number 1?"
    assert page.text_content("[role=tab][aria-selected=true]") == "Siblings"
    assert KEY not in page.url
    page.click(".tabs >> text=Turn")
    until(page, "!location.hash.includes('tab=')")
    page.reload()
    page.wait_for_selector(".inspector")
    assert selected(page) == "0"


def test_keyboard(tab: Tab) -> None:
    page = tab.open("#/?run=small&step=2&tree=0")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".inspector")
    first = selected(page)
    page.keyboard.press("ArrowRight")
    until(page, f"document.querySelector('.card.selected')?.dataset.node !== {json.dumps(first)}")
    cards = page.locator(".canvas .card").count()
    page.keyboard.press("c")
    until(page, f"document.querySelectorAll('.canvas .card').length < {cards}")
    page.keyboard.press("e")
    until(page, f"document.querySelectorAll('.canvas .card').length === {cards}")
    page.keyboard.press("2")
    page.wait_for_selector(".tokens")
    page.keyboard.press("]")
    until(page, "document.querySelector('.steps .figure')?.textContent === '3'")
    page.keyboard.press("j")
    until(page, "!!document.querySelector('.list .selected')")
    page.keyboard.press("?")
    page.wait_for_selector(".help")
    page.keyboard.press("Escape")
    page.wait_for_selector(".help", state="detached")
    page.keyboard.press("/")
    page.keyboard.type("king 2")
    page.wait_for_selector(".hits mark")
    assert page.text_content(".hits mark") == "King 2"
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.head h1')?.textContent.includes('number 2')")


def worked(devtools: Any) -> float:
    """Seconds that the page's main thread has worked."""
    metrics = devtools.send("Performance.getMetrics")["metrics"]
    return float(next(item["value"] for item in metrics if item["name"] == "TaskDuration"))


def test_two_hundred_trees_of_64_leaves_stay_responsive(tab: Tab, runs: Path) -> None:
    page = tab.open("#/?run=big")
    page.wait_for_selector(".trees li")
    assert page.locator(".trees li").count() == 200
    assert page.locator(".canvas .card:not(.open)").count() == 64
    page.evaluate(MEASURE)  # the first round compiles
    taken: dict[str, list[float]] = page.evaluate(MEASURE)
    # The faster half: what a busy machine adds is not the page's.
    usual = {name: statistics.median(sorted(times)[: len(times) // 2]) for name, times in taken.items()}
    # To open another tree the server takes part too; what is counted is the page's own work, by the processor's clock.
    devtools = tab.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = worked(devtools)
    walls = page.evaluate(SWITCH)
    usual["another tree"] = 1000 * (worked(devtools) - before) / len(walls)
    assert all(ms < LIMIT_MS for ms in usual.values()), usual
    print(json.dumps({"ms": usual, "another tree, by the clock on the wall": statistics.median(walls)}))


def test_text_of_passages_and_models_runs_nothing(tab: Tab) -> None:
    page = tab.open("#/?run=evil&node=0", wait=".inspector")
    for name in ("Tokens", "Siblings", "Credit", "Turn"):
        page.click(f".tabs >> text={name}")
        page.wait_for_timeout(150)
        if name == "Turn":
            page.wait_for_selector("pre")
            assert EVIL in page.text_content(".inspector .body")
    page.keyboard.press("/")
    page.keyboard.type("<script>")
    page.wait_for_selector(".hits mark")
    page.keyboard.press("Escape")
    page.hover(".canvas .card >> nth=1")
    page.click("text=Compare steps")
    page.click(".popover .list button")
    page.wait_for_selector(".half:nth-child(2) .card")
    assert page.evaluate("window.pwned") is None
    assert page.locator("#app script, #app iframe, #app [onerror], #app a[href^=javascript]").count() == 0
    assert page.evaluate("document.querySelectorAll('#app img').length") == 1  # the logo


def test_exports(tab: Tab, tmp_path: Path) -> None:
    page = tab.open("#/?run=evil&step=2&tree=1")
    files = {}
    for kind, words in (
        ("svg", "SVG picture"),
        ("png", "PNG picture"),
        ("json", "JSON, as stored"),
        ("html", "One HTML file"),
    ):
        page.click("text=Export")
        with page.expect_download() as download:
            page.click(f"text={words}")
        files[kind] = tmp_path / download.value.suggested_filename
        download.value.save_as(files[kind])
        assert files[kind].name == f"tree-step2-1.{kind}"
    svg = ElementTree.parse(files["svg"]).getroot()
    assert len(svg.findall(".//{http://www.w3.org/2000/svg}title")) == page.locator(".canvas .card").count()
    source = files["svg"].read_text(encoding="utf-8")
    assert not re.search(r"<script|<image|<foreignObject|var\(|light-dark", source.replace("&lt;", ""))
    png = files["png"].read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    assert width > 600
    assert height > 400
    assert json.loads(files["json"].read_text(encoding="utf-8"))["step"] == 2
    # The exported page and picture run nothing either.
    for kind in ("html", "svg"):
        page.goto(files[kind].as_uri())
        page.wait_for_timeout(300)
        assert page.evaluate("window.pwned") is None
    tab.asked.clear()


def test_dark_and_light_follow_the_system_and_the_choice(browser: Any, client: Client) -> None:
    tab = Tab(browser, client, color_scheme="dark")
    page = tab.open("#/?run=small")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    page.keyboard.press("t")
    until(page, "document.documentElement.dataset.theme === 'light'")
    light = page.evaluate(colour)
    brightness = [sum(map(int, re.findall(r"\d+", text)[:3])) for text in (dark, light)]
    assert brightness[0] < 150 < 600 < brightness[1]
    page.keyboard.press("t")
    until(page, "document.documentElement.dataset.theme === 'dark'")
    assert page.evaluate(colour) == dark
    page.reload()
    page.wait_for_selector(".canvas .card")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.close()


def test_filters(tab: Tab) -> None:
    page = tab.open("#/?run=small&step=1")
    page.wait_for_selector(".trees li")
    trees = client_trees(tab.client, "small", 1)
    page.fill("[aria-label='Least mean reward']", "0.5")
    wanted = [tree for tree in trees if tree["mean"] is not None and tree["mean"] >= 0.5]
    until(page, f"document.querySelectorAll('.trees li').length === {len(wanted)}")
    page.click("text=clear filters")
    page.click(".chip >> text=failed")
    wanted = [tree for tree in trees if tree["failed"]]
    until(page, f"document.querySelectorAll('.trees li').length === {len(wanted)}")
    page.click(".chip >> text=failed")
    page.fill("[aria-label='Filter questions']", "nothing like this")
    page.wait_for_selector("text=No tree passes these filters")


def client_trees(client: Client, run: str, step: int) -> list[dict[str, Any]]:
    return list(client.ask("/api/trees", run=run, step=step).json["trees"])


def test_a_step_that_is_written_appears_and_is_followed(browser: Any, tmp_path: Path, open_studio: Any) -> None:
    folder = write_run(tmp_path / "run", steps=0)
    tab = Tab(browser, open_studio(folder))
    page = tab.open("", wait=".notice")
    store, rng = TreeStore(folder / "trees"), np.random.default_rng(1)
    store.write(1, [Group("0/1", [made_up(rng, 1, 3)])])
    page.wait_for_selector(".canvas .card")
    page.check(".check input")
    page.click(".list button")
    store.write(2, [Group("0/2", [made_up(rng, 2, 3)])])
    until(page, "document.querySelector('.steps .figure')?.textContent === '2'")
    until(page, "document.querySelector('.head h1')?.textContent.includes('number 2')")
    tab.close()


def test_what_cannot_be_shown_is_said(browser: Any, tmp_path: Path, open_studio: Any) -> None:
    folder = write_run(tmp_path / "run", steps=2, trees=2, leaves=3)
    (folder / "trees" / "step-00000002.jsonl.zst").write_bytes(b"broken")
    tab = Tab(browser, open_studio(folder))
    page = tab.open("", wait=".notice.error")
    assert "corrupt" in page.text_content("main .notice.error")
    page.click("[aria-label='Previous step']")
    page.wait_for_selector(".canvas .card")
    tab.said = [text for text in tab.said if "404" not in text]  # the browser's own note on the failed request
    tab.close()


def test_a_link_to_no_run_says_so(tab: Tab) -> None:
    page = tab.open("#/?run=gone&step=9&tree=3", wait="main .notice.error")
    assert "There is no run gone here" in page.text_content("main .notice")
    page.click("main .notice button")
    page.wait_for_selector(".canvas .card")
    assert "run=big" in page.evaluate("location.hash") or page.input_value(".runs select") == "big"


def test_texts_stay_inside_their_cards(tab: Tab) -> None:
    page = tab.open("#/?run=evil")
    over = page.evaluate("""() => [...document.querySelectorAll('.canvas .card')].filter((card) =>
      [...card.querySelectorAll('text.gist')].some((text) =>
        text.getBBox().x + text.getBBox().width > card.querySelector('.face').getBBox().width)).length""")
    assert over == 0


def test_fork_in_the_page(browser: Any, bed: Any, tmp_path: Path, open_studio: Any) -> None:
    """Resume a node, play a search, let the model write, answer."""
    config = compose([*bed.args, "env.grammar=turntree.envs.worlds.grammar:WorldGrammar", "reward.name=em", "seed=3"])
    tokenizer = load_tokenizer(bed.model)
    task = build_task(config, tokenizer)
    rollout = grow(
        [Prompt("0/0", task.questions[0])],
        core=task.core,
        engine=ScriptedEngine(
            lambda context, seed: "<search>a ruler</search>" if seed % 3 else "<answer>x</answer>", tokenizer
        ),
        dialogue=Dialogue(tokenizer),
        plan=GrowthPlan(trees=1, chains=4),
        sampling=SamplingParams(40, 1.0, stop=tuple(task.core.stop)),
        limits=Limits(max_turn_tokens=40, max_context_tokens=400),
        run_seed=3,
    )
    folder = RunFolder.create(tmp_path / "run", config)
    TreeStore(folder.trees).write(1, rollout.groups)
    tab = Tab(browser, open_studio(folder.path))
    page = tab.open("#/?node=root&tab=fork", wait="textarea")
    page.fill("textarea", "who is the ruler")
    page.click(".chip >> text=search")
    assert page.input_value("textarea") == "<search>who is the ruler</search>"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".played .observation")
    assert page.text_content(".played .observation pre").strip()
    page.click("text=Let the model write")
    page.wait_for_selector(".sampled")
    assert page.input_value("textarea")
    page.fill("textarea", f"<answer>{task.questions[0].golden_answers[0]}</answer>")
    page.click("text=Play turn")
    page.wait_for_selector("text=The episode ended")
    assert "1.00" in page.text_content(".fork .played >> nth=1")
    page.click("text=Take back")
    page.wait_for_selector("textarea")
    tab.close()
