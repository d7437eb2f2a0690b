"""The tree picture shows what happened and runs nothing that a passage says."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.envs.task import FrozenDict, Question
from turntree.trainers.report.viewer import render_tree_html
from turntree.trainers.store import LeafAdvantages
from turntree.trainers.tree import Group, Node, Tree

VOID = {"meta"}


class Page(HTMLParser):
    """Tags with attributes, text by element, and whether everything was closed in order."""

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
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def cards(self) -> list[str]:
        return [a["class"] or "" for tag, a in self.tags if tag == "details"]


def turn(parent: Node, kind: str, argument: str, **fields: object) -> Node:
    text = f"<think>why {argument}</think><{kind}>{argument}</{kind}>"
    node = Node(ordinal=len(parent.children), text=text, action=kind, **fields)  # type: ignore[arg-type]
    return parent.add_child(node)


@pytest.fixture
def sample() -> tuple[Tree, LeafAdvantages]:
    root = Node(observation="Answer.\nQuestion: who?")
    info = FrozenDict({"retrieved": ({"id": "d1", "title": "First title"}, {"id": "d2", "title": "第二"})})
    search = turn(root, "search", "a query", entropy=0.5, observation="<information>doc</information>", info=info)
    good = turn(search, "answer", "right", status="answered", reward=1.0, turn_ids=(1, 2), logprobs=(-0.1, -0.2))
    bad = turn(search, "answer", "wrong", status="answered", reward=0.0, picked=good, score=0.25, reason="uncertain")
    turn(root, "answer", "lost", status="failed")
    tree = Tree(root, "q", task=Question("q", "Who was it?", ("right", "Right One")))
    return tree, {(good, search): 1.5, (bad, search): -0.5, (good, good): 1.5, (bad, bad): -1.5}


def test_everything_of_a_turn_is_on_the_page(sample: tuple[Tree, LeafAdvantages]) -> None:
    tree, advantages = sample
    page = Page(render_tree_html(tree, advantages=advantages, title="step 4"))
    text = "\n".join(page.text)
    for expected in (
        "step 4",
        "Who was it?",
        "Right One",
        "a query",
        "why a query",
        "First title · 第二",
        "<information>doc</information>",
        "\u21b3 grown from 0.0, score 0.25",
        "uncertain",
        "+0.50 over 2 leaves (\u22120.50 to +1.50)",
        "\u2713 1.00",
        "\u2717 0.00",
        "failed",
        "2 tok",
    ):
        assert expected in text
    assert page.cards() == ["card root z", "card open p2", "card answered p4", "card answered n4", "card failed z"]


def test_the_same_tree_gives_the_same_page(sample: tuple[Tree, LeafAdvantages]) -> None:
    tree, advantages = sample
    assert render_tree_html(tree, advantages=advantages) == render_tree_html(tree, advantages=advantages)


def test_a_group_shows_all_its_trees(sample: tuple[Tree, LeafAdvantages]) -> None:
    tree, advantages = sample
    other = Tree(Node(observation="Q"), "q", index=1)
    page = Page(render_tree_html(Group("q", [tree, other]), advantages=advantages))
    assert [text for text in page.text if text.startswith("Tree ")] == ["Tree 0", "Tree 1"]


def test_without_advantages_there_is_no_colour_scale(sample: tuple[Tree, LeafAdvantages]) -> None:
    page = Page(render_tree_html(sample[0]))
    assert all(classes.split()[-1] == "z" for classes in page.cards())
    assert "better" not in page.text


# Hostile text ---------------------------------------------------------------------------------------------------------

PAYLOADS = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "</pre></details></body><iframe src=//evil.example>",
    "<!--",
    "&lt;script&gt;",
    "]]><svg/onload=alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
]


def hostile_tree(text: str) -> Tree:
    root = Node(observation=text)
    info = FrozenDict({"retrieved": ({"id": text, "title": text},), "stop_reason": text, "invalid_reason": text})
    node = turn(root, "search", text, observation=text, reason=text, info=info)
    node.action, node.picked = text, root
    node.add_child(Node(text=text, action=text, status="answered", reward=1.0, info=info))
    return Tree(root, text, task=Question(text, text, (text,)))


def skeleton(html: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(tag, tuple(attrs)) for tag, attrs in Page(html).tags]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_text_adds_an_element_or_an_attribute(payload: str) -> None:
    html = render_tree_html(hostile_tree(payload), title=payload)
    assert skeleton(html) == skeleton(render_tree_html(hostile_tree("plain"), title="plain"))
    assert payload in "".join(Page(html).text)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(), min_size=1, max_size=30))
def test_any_text_makes_a_well_formed_page(text: str) -> None:
    html = render_tree_html(hostile_tree(f"x{text}"), title=text)
    html.encode("utf-8")
    assert {tag for tag, _ in skeleton(html)} == {tag for tag, _ in skeleton(render_tree_html(hostile_tree("plain")))}


def test_the_policy_allows_the_page_s_own_script_only(sample: tuple[Tree, LeafAdvantages]) -> None:
    html = render_tree_html(sample[0])
    policy = next(a["content"] for tag, a in Page(html).tags if a.get("http-equiv") == "Content-Security-Policy")
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_nothing_is_loaded_from_elsewhere(sample: tuple[Tree, LeafAdvantages]) -> None:
    html = render_tree_html(sample[0])
    assert not re.search(r"https?:|//\w|url\(|@import", html)
    assert not any(name in attrs for _, attrs in Page(html).tags for name in ("src", "href", "srcset"))


# Size and shape -------------------------------------------------------------------------------------------------------


def test_wide_and_deep_trees() -> None:
    wide = Node(observation="Q")
    for i in range(200):
        turn(wide, "answer", str(i), status="answered", reward=float(i % 2))
    assert len(Page(render_tree_html(Tree(wide))).cards()) == 201
    deep = node = Node(observation="Q")
    for i in range(1500):
        node = turn(node, "search", str(i))
    assert len(Page(render_tree_html(Tree(deep))).cards()) == 1501


def test_odd_numbers_and_empty_turns() -> None:
    root = Node()
    node = root.add_child(Node(entropy=float("nan"), score=float("inf"), status="truncated"))
    lost = root.add_child(Node(ordinal=1, entropy=-0.001, status="answered", reward=-1.0, pruned=True))
    html = render_tree_html(Tree(root), advantages={(node, node): float("nan"), (lost, lost): -0.001})
    text = Page(html).text
    assert "truncated \u2717 no reward" in text
    assert "\u2717 \u22121.00" in text
    assert "answered (pruned)" in text
    assert Page(render_tree_html(Tree(Node()))).cards() == ["card root z"]
