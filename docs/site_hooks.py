"""What the site adds to the pages: a reference page for each public module, and files of the repository they link to.

A public symbol without a docstring fails the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "envs": "Environments, tasks, grammars, rewards",
    "agents": "Dialogue, engines, teachers, scorers",
    "trainers": "Trees, credit, objectives, runs",
    "search_backend": "Passages and how to find them",
}
_LINK = re.compile(r"\]\((\.\./(?:\.\./)?[^)#\s]+)(#[^)\s]*)?\)")
_INFO = re.compile(r"^```(python) no-run$|^```(text) output$", re.MULTILINE)
_KINDS = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def public_modules() -> Iterator[tuple[str, Path, list[str]]]:
    """Name, file and ``__all__`` of each module of the rooms that has one."""
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            names = exported(file)
            if (
                names
                and not any(part.startswith("_") and part != "__init__" for part in parts)
                and "inside" not in parts
            ):
                yield ".".join(("turntree", *(p for p in parts if p != "__init__"))), file, names


def exported(file: Path) -> list[str]:
    """The names in the module's ``__all__``."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def undocumented(file: Path, names: list[str]) -> list[str]:
    """Which of the names the module defines without a docstring (for constants, a text below or a comment above them).

    Names that are imported from elsewhere are documented there.
    """
    source = file.read_text(encoding="utf-8")
    lines, body = source.splitlines(), ast.parse(source).body
    found = []
    for node, after in zip(body, [*body[1:], None]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in names:
            overload = any(ast.unparse(d).endswith("overload") for d in node.decorator_list)
            if not ast.get_docstring(node) and not overload:
                found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            commented = node.lineno > 1 and lines[node.lineno - 2].lstrip().startswith("#")
            for target in targets:
                if isinstance(target, ast.Name) and target.id in names and not (said or commented):
                    found.append(target.id)
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    missing = [
        f"{module}: {', '.join(bad)}" for module, file, names in public_modules() if (bad := undocumented(file, names))
    ]
    if missing:
        raise PluginError("public names without a docstring:\n" + "\n".join(missing))
    made: dict[str, str] = {}
    rows = []
    for room, text in ROOMS.items():
        listed = []
        for module, _, names in public_modules():
            if module.split(".")[1] == room:
                uri = f"reference/{module.removeprefix('turntree.').replace('.', '/')}.md"
                made[uri] = f"# {module}\n\n::: {module}\n"
                listed.append(f"- [{module}]({uri.removeprefix('reference/')}): {', '.join(f'`{n}`' for n in names)}")
        rows.append(f"## {text}\n\n" + "\n".join(listed))
    made["reference/index.md"] = "# Reference\n\nPublic names by module.\n\n" + "\n\n".join(rows) + "\n"
    for uri, file in outside_files():
        kind = _KINDS.get(file.suffix, "text")
        text = file.read_text(encoding="utf-8")
        made[uri] = text if file.suffix == ".md" else f"# {file.relative_to(ROOT)}\n\n````{kind}\n{text}\n````\n"
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    return files


def outside_files() -> Iterator[tuple[str, Path]]:
    """Files beside docs/ that pages link to, and the address of each on the site; a folder stands for its files."""
    seen: set[Path] = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for match in _LINK.finditer(page.read_text(encoding="utf-8")):
            target = (page.parent / match[1]).resolve()
            for file in sorted(target.rglob("*")) if target.is_dir() else [target]:
                if (
                    file.is_file()
                    and file not in seen
                    and ROOT / "docs" not in file.parents
                    and "__pycache__" not in file.parts
                ):
                    seen.add(file)
                    yield site_address(file), file


def site_address(file: Path) -> str:
    """Where the site shows a file of the repository."""
    inside = file.relative_to(ROOT).as_posix()
    return f"files/{inside}" if file.suffix == ".md" else f"files/{inside}.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Info strings that a browser's highlighter knows; links out of docs/ lead to the pages made of those files."""
    markdown = _INFO.sub(lambda m: f"```{m[1] or m[2]}", markdown)
    here = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        target = (ROOT / "docs" / posixpath.dirname(here) / match[1]).resolve()
        if ROOT / "docs" in target.parents or not target.exists():
            return match[0]
        if target.is_dir():
            readme = target / "README.md"
            target = readme if readme.is_file() else next(f for f in sorted(target.rglob("*.py")))
        return f"]({posixpath.relpath(site_address(target), posixpath.dirname(here) or '.')})"

    return (
        _LINK.sub(link, markdown) if not here.startswith("files/") else re.sub(r"\]\((?!https?:)[^)]*\)", "]", markdown)
    )


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name other symbols as Sphinx does; the site shows their names."""
    return re.sub(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)", "", html)
