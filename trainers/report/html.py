"""Parts that every self-contained page has: escaping, the frame with its policy, tables."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

import turntree.trainers.report

__all__ = ["asset", "document", "table", "text"]

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def text(value: object) -> str:
    """Escaped for any place between tags or in a quoted attribute; characters that HTML cannot hold are replaced."""
    return escape(_CONTROL.sub("\ufffd", str(value)), quote=True)


def asset(name: str) -> str:
    """A style or script of this package."""
    return files(turntree.trainers.report).joinpath(name).read_text(encoding="utf-8")


def document(body: str, *, title: str, styles: Iterable[str], script: str = "") -> str:
    """A whole page around ``body``, which is HTML; ``title`` is text.

    It loads nothing from anywhere: a content security policy allows its own style and script (by hash), nothing else.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    run = f"script-src 'sha256-{digest}'; " if script else ""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; {run}base-uri 'none'; form-action 'none'"
    style = "".join(asset(name) for name in styles)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<style>{style}</style>
</head>
<body>
{body}
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, name: str = "") -> str:
    """A table whose cells are HTML already; the first column is its rows' heading."""
    head = "".join(f'<th scope="col">{text(heading)}</th>' for heading in headings)
    body = "".join(
        f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>' for cells in rows
    )
    caption = f"<caption>{text(name)}</caption>" if name else ""
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
