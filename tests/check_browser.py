"""The tree studio in a real browser, once: a tree, a node, tokens, search, an evil passage. Run by ``make smoke``."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from turntree.envs.task import Question
from turntree.trainers.run_folder import RunFolder
from turntree.trainers.store import TreeStore
from turntree.trainers.tree import Group, Node, Tree

KEY = "smokekey0"
CHROMIUM = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
EVIL = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"


def check(condition: bool, message: str) -> None:
    if not condition:
        sys.exit(f"browser smoke: {message}")


def chromium() -> str:
    """The system's Chromium. Ends the check, with the reason, where it cannot be had."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path is not None:
            return path
    print("browser smoke skipped: no chromium here and none could be installed (apt-get install chromium)")
    sys.exit(0)


def write_run(folder: Path) -> None:
    rng = np.random.default_rng(0)
    root = Node(observation="Who rules?", observation_ids=(1, 2))
    for i in range(8):
        search = root.add_child(
            Node(ordinal=i, **_turn(rng, "search", f"ruler {i}"), observation=f"passage {i} {EVIL}")
        )
        for j in range(8):
            search.add_child(
                Node(ordinal=j, **_turn(rng, "answer", f"king {j}"), status="answered", reward=float(j % 2))
            )
    tree = Tree(root, "0/0", 0, Question("q", "Who rules?", ("king 1",)))
    config = {"seed": 0, "algorithm": {"credit": "turntree.trainers.credit:grpo", "credit_args": {}}}
    store = TreeStore(RunFolder.create(folder, config).trees)
    advantages = {(leaf, node): 1.0 for leaf in tree.leaves() for node in leaf.trajectory()}
    store.write(1, [Group("0/0", [tree])], advantages)


def _turn(rng: np.random.Generator, kind: str, text: str) -> dict[str, Any]:
    logprobs = tuple((-rng.random(6)).tolist())
    return {"turn_ids": tuple(range(6)), "logprobs": logprobs, "entropies": tuple(-x for x in logprobs),
            "entropy": 0.5, "action": kind, "text": f"<{kind}>{text}</{kind}>"}  # fmt: skip


def look(page: Any, address: str) -> None:
    """Everything a person would do first."""
    page.set_default_timeout(30_000)
    page.goto(address)
    page.wait_for_selector(".canvas .card")
    check(page.locator(".canvas .card").count() == 73, "the picture does not hold every node")
    check(KEY not in page.url, "the key stays in the address")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".inspector pre")
    page.keyboard.press("2")
    page.wait_for_selector(".tok")
    page.keyboard.press("4")
    page.wait_for_selector(".arithmetic")
    page.keyboard.press("/")
    page.keyboard.type("king 3")
    page.wait_for_selector(".hits mark")
    page.keyboard.press("Enter")
    page.wait_for_selector(".search", state="detached")
    page.keyboard.press("t")
    check(page.evaluate("window.pwned") is None, "text of a passage ran as script")


def main() -> None:
    started = time.monotonic()
    browser_path = chromium()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory(prefix="turntree-browser-smoke-") as tmp:
        write_run(Path(tmp) / "run")
        command = [
            sys.executable,
            "-m",
            "turntree.cli",
            "view",
            f"{tmp}/run",
            "--port",
            "0",
            "--token-env",
            "SMOKE_KEY",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "SMOKE_KEY": KEY})
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            check("http://127.0.0.1:" in line, f"the studio did not start: {line!r}")
            address = next(word for word in line.split() if word.startswith("http://"))
            ready = time.monotonic() - started
            said: list[str] = []
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=browser_path, args=CHROMIUM.split())
                page = browser.new_page()
                page.on("console", lambda message: said.append(message.text))
                page.on("pageerror", lambda error: said.append(str(error)))
                look(page, address)
                browser.close()
            check(not said, f"the console says {json.dumps(said)[:500]}")
        finally:
            server.terminate()
            server.wait(timeout=20)
    print(f"browser smoke passed in {time.monotonic() - started:.0f} s: studio ready after {ready:.0f} s")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(300, exit=True)  # a smoke that hangs is a smoke that failed
    main()
