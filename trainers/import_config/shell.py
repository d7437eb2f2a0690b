"""Reads a bash launch script without running it: assignments, arithmetic, arrays, and the command that trains.

tree-sitter's grammar of bash does the parsing. Nothing of this machine flows in: variables that the script does not set
itself, arguments and command substitutions stay as they are written, and the setting is marked as unresolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.errors import DataError, MissingExtraError
from turntree.trainers.import_config.settings import Launch, Note, Setting
from turntree.trainers.import_config.translation import hidden

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["read_script"]

_OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_][\w]*(?:\.[\w+\-]+)*)=(.*)", re.DOTALL)
_FLAG = re.compile(r"--(config-path|config-name|config-dir)=(.*)", re.DOTALL)
_ASSIGNED = re.compile(r"(\w+)=(\S+)")
_CONDITIONS = frozenset(
    ("if_statement", "for_statement", "while_statement", "case_statement", "c_style_for_statement", "list")
)
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True, slots=True)
class _Word:
    """A word after expansion: where it stands, and what in it is not known."""

    text: str
    line: int
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class _Variable:
    words: tuple[_Word, ...]
    line: int
    used: bool = False


def read_script(path: Path) -> Launch:
    """The settings of the training command in a bash script.

    Raises :class:`DataError` where the script starts no program with ``key=value`` settings, and
    :class:`MissingExtraError` without the extra ``scripts``.
    """
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise MissingExtraError(f"reading {path} needs a parser of bash: pip install 'turntree[scripts]'") from error
    source = path.read_bytes()
    tree = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language())).parse(source)
    shell = _Shell()
    try:
        shell.run(tree.root_node)
    except RecursionError as error:
        raise DataError(f"{path}: expected a launch script, found one that is nested too deeply") from error
    if not shell.launches:
        raise DataError(
            f"{path}: expected a command with settings such as data.train_batch_size=512, found none; pass the script "
            "that starts the training, or a YAML file of its configuration"
        )
    program, words = max(shell.launches, key=lambda launch: len(launch[1]))
    shell.notes += [
        Note(w[0].line, f"{p} ...", "another command with settings") for p, w in shell.launches if w is not words
    ]
    settings = [s for word in words for s in [_setting(word)] if s is not None]
    rest = [Note(w.line, w.text, "an argument that is no setting") for w in words if _setting(w) is None and w.text]
    unused = [
        Note(
            variable.line,
            f"{name}={hidden(name, ' '.join(w.text for w in variable.words))}",
            "a variable that no setting uses",
        )
        for name, variable in shell.variables.items()
        if not variable.used
    ]
    notes = sorted((*shell.notes, *rest, *unused), key=lambda note: note.line)
    return Launch(path.name, program, tuple(settings), tuple(notes))


def _setting(word: _Word) -> Setting | None:
    found = _FLAG.fullmatch(word.text) or _OVERRIDE.fullmatch(word.text)
    if found is None:
        return None
    return Setting(found[1], found[2], word.line, ", ".join(word.unknown))


@dataclass(slots=True)
class _Shell:
    variables: dict[str, _Variable] = field(default_factory=dict)
    launches: list[tuple[str, list[_Word]]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    # Statements -------------------------------------------------------------------------------------------------------

    def run(self, node: Node, *, conditional: bool = False) -> None:
        """Take in every statement below ``node`` in order; those in conditions and loops as if they ran once."""
        for child in node.named_children:
            kind = child.type
            if kind == "ERROR":
                self._note(child, "bash that was not understood: check the settings around it")
                self.run(child, conditional=conditional)
            elif kind == "variable_assignment":
                self._assign(child, conditional)
            elif kind == "declaration_command":
                self.run(child, conditional=conditional)
            elif kind == "command":
                self._command(child)
            elif kind in ("comment", "variable_name", "word", "test_command", "function_definition"):
                if kind in ("test_command", "function_definition"):
                    self._note(child, "not evaluated")
            else:
                self.run(child, conditional=conditional or kind in _CONDITIONS)

    def _assign(self, node: Node, conditional: bool) -> None:
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name = _text(name_node) if name_node is not None else ""
        if value is None:
            words: tuple[_Word, ...] = (_Word("", _line(node)),)
        elif value.type == "array":
            words = tuple(word for part in value.named_children for word in self.words(part))
        else:
            words = (self.word(value),)
        if any(child.type == "+=" for child in node.children) and name in self.variables:
            words = (*self.variables[name].words, *words)
        if conditional:
            self._note(node, "inside a condition or a loop: read as if it ran once")
        self.variables[name] = _Variable(words, _line(node))

    def _command(self, node: Node) -> None:
        words: list[_Word] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._note(child, "a variable for one command")
            elif child.type == "command_name":
                words += self.words(child.named_children[0])
            elif "redirect" not in child.type:
                words += self.words(child)
        settings = [w for w in words if (s := _setting(w)) is not None and "." in s.key]
        if len(settings) < 2:
            self._note(node, "a command that is not run")
            return
        start = next((i for i, word in enumerate(words) if _setting(word)), 0)
        self.launches.append((_program([word.text for word in words[:start]]), words[start:]))

    def _note(self, node: Node, why: str) -> None:
        text = _ASSIGNED.sub(lambda m: f"{m[1]}={hidden(m[1], m[2])}", " ".join(_text(node).split()))
        self.notes.append(Note(_line(node), text[:100], why))

    # Words ------------------------------------------------------------------------------------------------------------

    def words(self, node: Node) -> list[_Word]:
        """The words that one argument becomes: an array as many as it has items, anything else one."""
        inner = node.named_children[0] if node.type == "string" and len(node.named_children) == 1 else node
        name = _array_name(inner)
        if name and name in self.variables:
            variable = self.variables[name]
            variable.used = True
            return list(variable.words)
        return [self.word(node)]

    def word(self, node: Node) -> _Word:
        """The text of one argument, expanded as far as the script tells."""
        pieces = list(self._pieces(node))
        unknown = tuple(dict.fromkeys(what for _, what in pieces if what))
        return _Word("".join(text for text, _ in pieces), _line(node), unknown)

    def _pieces(self, node: Node) -> Iterator[tuple[str, str]]:
        """(text, what is unknown about it) of every part of a word."""
        kind, text = node.type, _text(node)
        if kind == "raw_string":
            yield text[1:-1], ""
        elif kind == "string":
            yield from self._quoted(node)
        elif kind == "string_content":
            yield re.sub(r'\\([\\"$`])', r"\1", text.replace("\\\n", "")), ""
        elif kind == "concatenation":
            for child in node.children:
                yield from self._pieces(child)
        elif kind in ("simple_expansion", "expansion"):
            yield from self._variable(node)
        elif kind == "arithmetic_expansion":
            yield self._arithmetic(node)
        elif kind == "command_substitution":
            yield text, f"the output of {text}"
        else:
            yield re.sub(r"\\(.)", r"\1", text.replace("\\\n", "")), ""

    def _quoted(self, node: Node) -> Iterator[tuple[str, str]]:
        source, start = _text(node), node.start_byte
        data, at = source.encode(), 1
        for child in node.named_children:
            begin = child.start_byte - start
            yield data[at:begin].decode(), ""
            yield from self._pieces(child)
            at = child.end_byte - start
        yield data[at:-1].decode(), ""

    def _variable(self, node: Node) -> Iterator[tuple[str, str]]:
        named = node.named_children
        name = _text(named[0]) if named else ""
        operators = [child.type for child in node.children if child.type in (":-", "-", ":=", "=")]
        plain = node.type == "simple_expansion" or len(node.children) == 3
        known = self.variables.get(name)
        if known is not None and (plain or (operators and any(w.text for w in known.words))):
            known.used = True
            yield " ".join(w.text for w in known.words), ", ".join(u for w in known.words for u in w.unknown)
        elif operators:
            for child in named[1:]:
                yield from self._pieces(child)
        else:
            yield _text(node), f"{_text(node)} is not set in the script" if plain else f"{_text(node)}"

    def _arithmetic(self, node: Node) -> tuple[str, str]:
        text = _text(node)
        inner = text[2:-1] if text.startswith("$[") else text[3:-2]

        def value(match: re.Match[str]) -> str:
            known = self.variables.get(match[1])
            if known is None:
                return match[0]
            known.used = True
            return known.words[0].text

        try:
            return str(
                _calculate(ast.parse(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", value, inner).strip(), mode="eval").body)
            ), ""
        except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
            return text, f"the value of {text}"


def _calculate(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _calculate(node.left), _calculate(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
            raise ValueError("too large")
        return int(_OPERATORS[type(node.op)](left, right))
    raise ValueError("not integer arithmetic")


def _array_name(node: Node) -> str:
    """``ARGS`` for ``${ARGS[@]}``; '' for anything else."""
    if node.type != "expansion" or not node.named_children or node.named_children[0].type != "subscript":
        return ""
    match = re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", _text(node))
    return match[1] if match else ""


def _program(words: list[str]) -> str:
    """The module or script that a command starts."""
    if "-m" in words and words.index("-m") + 1 < len(words):
        return words[words.index("-m") + 1]
    return next((word for word in reversed(words) if word.endswith(".py")), " ".join(words))


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")


def _line(node: Node) -> int:
    return int(node.start_point[0]) + 1
