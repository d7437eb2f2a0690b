"""One rollout tree as a picture: a self-contained HTML page.

The page loads nothing from anywhere. All text of models and passages is escaped; a content security policy that
allows only the page's own script (by hash) stands behind that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from turntree.trainers.report.html import asset, document, text
from turntree.trainers.report.reading import read_turn
from turntree.trainers.store import LeafAdvantages, mean_advantages
from turntree.trainers.tree import Group, Node, Tree

__all__ = ["legend", "render_tree", "render_tree_html"]

_LEVELS = 4


@dataclass(frozen=True, slots=True)
class _Scales:
    """What the colours and bars of a page are relative to."""

    advantages: Mapping[Node, float]
    per_leaf: Mapping[Node, tuple[float, ...]]
    largest_advantage: float
    largest_entropy: float


def render_tree_html(
    source: Tree | Group, *, advantages: LeafAdvantages | None = None, title: str = "Rollout tree"
) -> str:
    """The page of one tree, or of all trees of a prompt, as HTML text; write it as UTF-8.

    Each turn is a card that opens: action, thought, observation, retrieved titles, entropy, advantage (the mean over
    leaves, and its range), why it was grown. ``advantages``: per (leaf, node), see :mod:`turntree.trainers.store`.
    The same tree gives the same text.
    """
    trees = list(source.trees) if isinstance(source, Group) else [source]
    scales = _scales(trees, advantages or {})
    sections = "\n".join(_section(tree, scales, alone=len(trees) == 1) for tree in trees)
    body = f"{_header(trees, title, scales)}\n<main>\n{sections}\n</main>"
    return document(body, title=title, styles=("tree.css", "viewer.css"), script=asset("viewer.js"))


def render_tree(tree: Tree, *, advantages: LeafAdvantages | None = None) -> str:
    """One tree as a part of another page, which needs the style ``tree.css``; cards open without script."""
    scales = _scales([tree], advantages or {})
    return f'<dl class="facts">{_facts([tree])}</dl>{_section(tree, scales, alone=True)}'


def legend(*, advantages: bool) -> str:
    """What the marks on cards mean, as HTML."""
    return _LEGEND + (_COLOURS if advantages else "")


def _scales(trees: Iterable[Tree], advantages: LeafAdvantages) -> _Scales:
    nodes = [node for tree in trees for node in tree.nodes()]
    mean = mean_advantages(advantages)
    per_leaf: dict[Node, tuple[float, ...]] = {}
    for (_, node), value in advantages.items():
        per_leaf[node] = (*per_leaf.get(node, ()), value)
    finite = [abs(mean[n]) for n in nodes if n in mean and math.isfinite(mean[n])]
    entropies = [n.entropy for n in nodes if math.isfinite(n.entropy)]
    return _Scales(mean, per_leaf, max(finite, default=0.0), max(entropies, default=0.0))


# Head of the page -----------------------------------------------------------------------------------------------------


def _header(trees: list[Tree], title: str, scales: _Scales) -> str:
    task = next((tree.task for tree in trees if tree.task is not None), None)
    question = f'<p class="question" dir="auto">{text(task.question)}</p>' if task else ""
    accepted = task.golden_answers if task else ()
    gold = "".join(f'<span class="gold" dir="auto">{text(answer)}</span>' for answer in accepted)
    answers = f'<p class="answers"><span class="key">accepted</span>{gold}</p>' if gold else ""
    return f"""<header>
<div class="top"><h1>{text(title)}</h1><div class="buttons"><button id="open">Open all</button>\
<button id="close">Close all</button></div></div>
{question}{answers}
<dl class="facts">{_facts(trees)}</dl>
<p class="legend">{legend(advantages=bool(scales.advantages))}</p>
</header>"""


_LEGEND = '<span class="key">H</span><span>mean \u2212log p of the sampled tokens, nats</span>'
_COLOURS = (
    '<span class="key">A</span><span>advantage, worse</span><span class="ramp"><i class="n4"></i><i class="n3"></i>'
    '<i class="n2"></i><i class="n1"></i><i class="z"></i><i class="p1"></i><i class="p2"></i><i class="p3"></i>'
    '<i class="p4"></i></span><span>better</span>'
)


def _facts(trees: list[Tree]) -> str:
    leaves = [leaf for tree in trees for leaf in tree.leaves()]
    rewards = [leaf.reward for leaf in leaves if leaf.is_scored and leaf.reward is not None]
    facts: list[tuple[str, str]] = [
        ("trees", str(len(trees))),
        ("leaves", str(len(leaves))),
        ("turns", str(sum(len(tree.nodes()) - 1 for tree in trees))),
        ("sampled tokens", f"{sum(tree.generated_tokens for tree in trees):,}"),
        ("mean reward", _signed(fmean(rewards), plus="") if rewards else "none"),
    ]
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)


# The tree -------------------------------------------------------------------------------------------------------------


def _section(tree: Tree, scales: _Scales, *, alone: bool) -> str:
    heading = "" if alone else f"<h2>Tree {tree.index}</h2>"
    return f'<section>{heading}<div class="scroll"><ul class="tree">{_branch(tree.root, scales)}</ul></div></section>'


def _branch(root: Node, scales: _Scales) -> str:
    """Nested lists, written without recursion: a chain may be longer than Python's stack."""
    out: list[str] = []
    stack: list[Node | str] = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            out.append(item)
            continue
        out.append(f"<li>{_card(item, scales)}")
        stack.append("</li>\n")
        if item.children:
            out.append("<ul>")
            stack.append("</ul>")
            stack.extend(reversed(item.children))
    return "".join(out)


def _card(node: Node, scales: _Scales) -> str:
    if node.parent is None:
        return (
            '<details class="card root z"><summary><span class="row"><b>prompt</b></span>'
            f'<span class="main" dir="auto">{text(_excerpt(node.observation))}</span></summary>'
            f'<div class="body">{_block("prompt", node.observation)}</div></details>'
        )
    turn = read_turn(node.text, node.action)
    kind, argument, thought = turn.kind, turn.argument, turn.thought
    classes = " ".join(["card", node.status, _level(node, scales), *(["pruned"] if node.pruned else [])])
    head = (
        f'<span class="row"><span class="path">{".".join(map(str, node.path))}</span>'
        f'<span class="{"kind invalid" if kind == "invalid" else "kind"}">{text(_KINDS.get(kind, kind))}</span>'
        f"{_verdict(node)}</span>"
    )
    grown = f'<span class="grown">{text(_grown(node))}</span>' if node.picked is not None else ""
    line = f'<span class="main" dir="auto">{text(_excerpt(argument or thought or node.text))}</span>'
    return (
        f'<details class="{classes}"><summary>{head}{grown}{line}{_titles(node)}'
        f"{_measures(node, scales)}</summary>"
        f'<div class="body">{_details(node, argument, thought, scales)}</div></details>'
    )


def _grown(node: Node) -> str:
    score = "" if node.score is None else f", score {_signed(node.score, plus='')}"
    return f"\u21b3 grown from {_where(node.picked)}{score}"


_KINDS = {"search": "search", "answer": "answer", "python": "python", "invalid": "no action", "": "turn"}


def _where(node: Node | None) -> str:
    return ".".join(map(str, node.path)) or "the prompt" if node is not None else ""


def _excerpt(content: str, limit: int = 160) -> str:
    """The start of a text with its line breaks flattened."""
    flat = " ".join(content.split())
    return flat if len(flat) <= limit else f"{flat[:limit]}\u2026"


def _level(node: Node, scales: _Scales) -> str:
    """Colour class: ``p1`` to ``p4`` for positive advantages, ``n1`` to ``n4`` for negative ones, ``z`` for none."""
    value = scales.advantages.get(node, 0.0)
    if not math.isfinite(value) or value == 0.0 or scales.largest_advantage == 0.0:
        return "z"
    steps = max(1, math.ceil(_LEVELS * min(1.0, abs(value) / scales.largest_advantage)))
    return f"{'p' if value > 0 else 'n'}{steps}"


def _verdict(node: Node) -> str:
    if node.status == "open":
        return ""
    if node.status == "failed":
        return '<span class="verdict failed">failed</span>'
    reward = "no reward" if node.reward is None else _signed(node.reward, plus="")
    good = node.reward is not None and node.reward > 0
    note = "truncated " if node.status == "truncated" else ""
    colour, mark = ("good", "\u2713") if good else ("bad", "\u2717")
    return f'<span class="verdict {colour}">{note}{mark} {reward}</span>'


def _titles(node: Node) -> str:
    titles = " \u00b7 ".join(_retrieved(node))
    return f'<span class="titles" dir="auto">{text(titles)}</span>' if titles else ""


def _retrieved(node: Node) -> list[str]:
    found = node.info.get("retrieved") or ()
    return [str(p.get("title") or p.get("id") or "") for p in found if isinstance(p, Mapping)]


def _measures(node: Node, scales: _Scales) -> str:
    share = node.entropy / scales.largest_entropy if scales.largest_entropy > 0 else 0.0
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    bar = f'<i class="bar"><i style="width:{share:.0%}"></i></i>'
    entropy = _signed(node.entropy, plus="")
    parts = [f'<span title="mean negative log-prob of the turn, nats">H {bar} {entropy}</span>']
    if node in scales.advantages:
        mean = _signed(scales.advantages[node])
        parts.append(f'<span class="adv" title="mean advantage over its leaves">A {mean}</span>')
    parts.append(f'<span title="sampled tokens">{len(node.turn_ids)} tok</span>')
    return f'<span class="measures">{"".join(parts)}</span>'


# Inside an open card --------------------------------------------------------------------------------------------------


def _details(node: Node, argument: str, thought: str, scales: _Scales) -> str:
    whole = not (argument and thought)
    blocks = [
        _block("thought", thought),
        _block("action", argument),
        _block("turn", node.text) if whole else "",
        _list("retrieved", _retrieved(node)),
        _block("observation", node.observation),
        _pairs(_why(node)),
        _pairs(_numbers(node, scales)),
    ]
    return "".join(blocks)


def _why(node: Node) -> list[tuple[str, str]]:
    rows = [] if node.picked is None else [("picked", _where(node.picked))]
    if node.score is not None:
        rows.append(("score", _signed(node.score, plus="")))
    if node.reason:
        rows.append(("reason", node.reason))
    return rows


def _numbers(node: Node, scales: _Scales) -> list[tuple[str, str]]:
    rows = [("status", node.status + (" (pruned)" if node.pruned else ""))]
    values = scales.per_leaf.get(node, ())
    if values:
        spread = f" ({_signed(min(values))} to {_signed(max(values))})" if len(values) > 1 else ""
        leaves = "1 leaf" if len(values) == 1 else f"{len(values)} leaves"
        rows.append(("advantage", f"{_signed(scales.advantages[node])} over {leaves}{spread}"))
    rows.append(("weights", f"version {node.version}"))
    if not node.branchable:
        rows.append(("branching", "not possible here"))
    names = ("stop_reason", "invalid_reason", "em", "f1", "format_valid", "observation_truncated")
    rows.extend((name.replace("_", " "), str(node.info[name])) for name in names if node.info.get(name) is not None)
    return rows


def _block(name: str, content: str) -> str:
    return f'<h3>{text(name)}</h3><pre dir="auto">{text(content)}</pre>' if content.strip() else ""


def _list(name: str, items: list[str]) -> str:
    rows = "".join(f'<li dir="auto">{text(item)}</li>' for item in items)
    return f"<h3>{text(name)}</h3><ol>{rows}</ol>" if items else ""


def _pairs(rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows)
    return f"<dl>{cells}</dl>" if rows else ""


def _signed(value: float, *, plus: str = "+") -> str:
    """Two decimals with a real minus sign; a sign for positive numbers too, unless ``plus`` is empty."""
    shown = f"{value:{plus}.2f}"
    return f"{0.0:{plus}.2f}".replace("+", "") if float(shown) == 0.0 else shown.replace("-", "\u2212")
