"""Typed text as statements: whether it is complete, how the next line is indented, where one statement ends and
the next begins."""

from __future__ import annotations

from dataclasses import dataclass

from lark import Token

from piperlang.source import Source
from piperlang.syntax import grammar
from piperlang.syntax.lines import CLOSE, OPEN
from piperlang.syntax.parse import laid_out
from piperlang.syntax.tokens import end

INDENT = 4


def is_command(text: str) -> bool:
    """Commands start with a colon, which no statement does."""
    return text.lstrip().startswith(":")


@dataclass(frozen=True)
class Line:
    """The last logical line of a text: a line, or several that a bracket holds together."""

    indent: int
    tokens: tuple[Token, ...]
    """Without comments."""
    unclosed: tuple[Token, ...]
    """Brackets that are open at its end, outermost first; an unterminated string counts as one."""

    @property
    def opens_block(self) -> bool:
        return not self.unclosed and bool(self.tokens) and self.tokens[-1] == ":"


def last_line(text: str) -> Line:
    found: list[Token] = []
    unclosed: list[Token] = []
    indent = len(text) - len(text.lstrip(" "))
    for token in grammar.tokens(text):
        if token.type == "LINE_END" and not unclosed:
            found, indent = [], len(token.rpartition("\n")[2])
        elif token.type == "BAD_TEXT" or token in OPEN:
            unclosed.append(token)
        elif token in CLOSE and unclosed:
            unclosed.pop()
        if token.type not in ("LINE_END", "COMMENT"):
            found.append(token)
    return Line(indent, tuple(found), tuple(unclosed))


def is_complete(text: str) -> bool:
    """Whether Enter ends the input. A block or an open bracket continues until an empty line."""
    if is_command(text) or not text.strip():
        return True
    if text.rpartition("\n")[2].strip() == "" and "\n" in text:
        return True
    line = last_line(text)
    return not (line.unclosed or line.opens_block or line.indent)


def next_indent(text: str) -> int:
    """The indentation of the line after `text`."""
    line = last_line(text)
    inside = bool(line.unclosed) and line.unclosed[-1].type != "BAD_TEXT"
    return line.indent + (INDENT if inside or line.opens_block else 0)


def statements(source: Source) -> list[str]:
    """The text of each top-level statement, with the comments before it; trailing text belongs to the last one."""
    text = source.text.rstrip()
    if not text:
        return []
    ends = []
    for statement in laid_out(source).statements:
        last = max(end(token) for token in statement.tokens)
        newline = text.find("\n", last)
        ends.append(len(text) if newline < 0 else newline)
    ends = [*ends[:-1], len(text)]
    return [text[first + (first > 0) : last] for first, last in zip([0, *ends], ends, strict=False)]


def inputs(text: str) -> list[str]:
    """The parts of one typed or pasted input: statements together, applied all or none; one by one if commands
    are among them."""
    lines = text.split("\n")
    if not any(is_command(line) and not line.startswith(" ") for line in lines[1:]):
        return [text]
    grouped = Grouped()
    return [one for line in lines for one in grouped.take(line)] + grouped.rest()


class Grouped:
    """Splits line-by-line input into statements, without empty lines after blocks: a line in the first column
    ends the statement before it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def take(self, line: str) -> list[str]:
        """Add a line; return the inputs that it completes."""
        held, text = self.lines, "\n".join(self.lines)
        if is_command(line) and not line.startswith(" "):
            self.lines = []
            return [*([text] if text.strip() else []), line.strip()]
        starts = bool(line.strip()) and not line.startswith((" ", "\t", "#"))
        ready = []
        if starts and text.strip() and not line.startswith(("elif", "else")) and not last_line(text).unclosed:
            ready, held = [text], []
        held.append(line)
        if starts and not line.startswith("if") and is_complete("\n".join(held)):  # an `else` may follow an `if`
            ready.append("\n".join(held))
            held = []
        self.lines = held
        return ready

    def rest(self) -> list[str]:
        text, self.lines = "\n".join(self.lines), []
        return [text] if text.strip() else []
