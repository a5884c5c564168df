"""The canonical layout of a script. Works on tokens, so no comment is lost and no word is changed.

Four spaces per block, at most one blank line, a blank line around functions with a block, comments of adjacent
lines aligned in one column, lines of at most 100 characters broken at brackets. The result is parsed again and must
give the same tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from lark import Token

from piperlang.diagnostics import PiperError
from piperlang.source import Source
from piperlang.syntax.lines import TokenLayout
from piperlang.syntax.parse import laid_out, parse
from piperlang.syntax.tokens import end, start
from piperlang.syntax.wrap import INDENT, comment_text, wrap


@dataclass
class _Entry:
    """A logical line, or a comment on its own line."""

    depth: int
    lines: list[str]
    start: int
    end: int
    beside: str = ""
    comment: bool = False
    opens_function: bool = False
    """A `def` with a block."""
    column: int = 0
    blank_before: bool = False


@dataclass
class _Logical:
    depth: int
    tokens: list[Token] = field(default_factory=list)


def format_source(source: Source) -> str:
    script, problems = parse(source)
    if problems:
        raise PiperError(*problems)
    text = _formatted(source)
    again, problems = parse(Source(f"{source.name} as formatted", text))
    if problems and problems[0].code == "P0108":
        raise PiperError(*problems)  # the layout has more line ends and commas than the script
    if again != script:
        raise AssertionError(f"formatting {source.name} would change its meaning")
    return text


def _formatted(source: Source) -> str:
    layout = laid_out(source)
    entries = _entries(source, layout)
    _blank_lines(source, entries)
    _align(entries)
    lines: list[str] = []
    for entry in entries:
        if entry.blank_before and lines:
            lines.append("")
        lines += entry.lines
    return "".join(f"{line}\n" for line in lines)


def _logical_lines(layout: TokenLayout) -> Iterator[_Logical]:
    for statement in layout.statements:
        line = _Logical(0)
        depth = 0
        for token in statement.tokens:
            if token.type == "INDENT":
                depth += 1
            elif token.type == "DEDENT":
                depth -= 1
            elif token.type == "NEWLINE":
                yield line
                line = _Logical(depth)
                continue
            else:
                if not line.tokens:
                    line.depth = depth
                line.tokens.append(token)


def _entries(source: Source, layout: TokenLayout) -> list[_Entry]:
    entries: list[_Entry] = []
    comments = layout.comments
    at = 0
    open_columns: list[int] = []
    for line in _logical_lines(layout):
        first, last = start(line.tokens[0]), end(line.tokens[-1])
        column = first - (source.text.rfind("\n", 0, first) + 1)
        own: list[Token] = []
        while at < len(comments) and start(comments[at]) < first:
            own.append(comments[at])
            at += 1
        entries += _comments(source, own, open_columns, line.depth)
        open_columns = [*open_columns[: line.depth], column]
        inner: list[Token] = []
        while at < len(comments) and start(comments[at]) < last:
            inner.append(comments[at])
            at += 1
        lines = wrap(source, line.tokens, inner, line.depth)
        while lines[0].lstrip().startswith("#"):  # a comment that cannot stay in the line goes above it
            entries.append(_Entry(line.depth, [lines.pop(0)], first, first, comment=True))
        entry = _Entry(line.depth, lines, first, last)
        entry.opens_function = line.tokens[0] == "def" and line.tokens[-1] == ":"
        if at < len(comments) and "\n" not in source.text[last : start(comments[at])]:
            entry.beside = comment_text(comments[at])
            entry.end = end(comments[at])
            at += 1
        entries.append(entry)
    return entries + _comments(source, comments[at:], open_columns, 0)


def _comments(source: Source, comments: list[Token], open_columns: list[int], next_depth: int) -> list[_Entry]:
    """Comments on their own lines: in the deepest open block of their indentation, at least the next line's depth."""
    entries: list[_Entry] = []
    for comment in comments:
        first = start(comment)
        column = first - (source.text.rfind("\n", 0, first) + 1)
        fitting = [depth for depth, at in enumerate(open_columns) if at <= column]
        depth = max(next_depth, fitting[-1] if fitting else 0)
        entries.append(_Entry(depth, [INDENT * depth + comment_text(comment)], first, end(comment), comment=True))
    return entries


def _blank_lines(source: Source, entries: list[_Entry]) -> None:
    for before, entry in pairwise(entries):
        entry.blank_before = source.text.count("\n", before.end, entry.start) > 1
    in_function = False
    for i, entry in enumerate(entries):
        if entry.depth == 0 and in_function:
            in_function = False
            entry.blank_before = True
        if entry.opens_function:
            first = i
            while (
                first > 0
                and entries[first - 1].comment
                and entries[first - 1].depth == entry.depth
                and not entries[first].blank_before
            ):
                first -= 1
            entries[first].blank_before = True
            in_function = True


def _align(entries: list[_Entry]) -> None:
    """Align the trailing comments of adjacent lines."""
    run: list[_Entry] = []
    for entry in [*entries, None]:
        if entry is not None and entry.beside and len(entry.lines) == 1 and not (run and entry.blank_before):
            run.append(entry)
            continue
        column = max((len(e.lines[0]) for e in run), default=0)
        for e in run:
            e.lines[0] = f"{e.lines[0]:<{column}}  {e.beside}"
        run = []
        if entry is not None and entry.beside:
            if len(entry.lines) == 1:
                run = [entry]
            else:
                entry.lines[-1] += f"  {entry.beside}"
