"""Text to Script. Each top-level statement that does not parse gives one diagnostic; the others are still parsed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lark.exceptions import UnexpectedToken

from piperlang.diagnostics import LIMIT, Diagnostic, PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.source import Source
from piperlang.syntax import grammar, tree
from piperlang.syntax.build import documentation
from piperlang.syntax.lines import MAX_DEPTH, StatementTokens, TokenLayout, lay_out
from piperlang.syntax.tokens import made, span, start

MAX_BYTES = 1_000_000
MAX_LINE = 20_000
MAX_HEIGHT = 100


def read(path: Path, name: str | None = None, *, library: bool = False) -> Source:
    """The file's text, or a located diagnostic if it is not text."""
    shown = name or str(path)
    if os.path.exists(path) and not is_file(path):
        what = "a directory" if path.is_dir() else "not a regular file"
        raise error(
            "P0901",
            f"cannot read {shown}",
            notes=[f"it is {what}"],
            help="pass a .piper file, or pipe the script to `piperc check -`",
        )
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem, shown) from None
    return decode(data, shown, library=library)


def is_file(path: Path, *, folder: bool = False) -> bool:
    """Whether it is a regular file (or a directory); False for names that the system rejects."""
    try:
        return path.is_dir() if folder else path.is_file()
    except (OSError, ValueError):
        return False


def decode(data: bytes, name: str, *, library: bool = False) -> Source:
    if len(data) > MAX_BYTES:
        raise error(
            "P0108",
            "the file is too long",
            Source(name, "", library).span(0, 0),
            f"more than {MAX_BYTES:,} bytes",
            help="split it into several files and `import` them",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        good = data[: problem.start].decode("utf-8-sig", errors="replace")
        source = Source(name, newlines(good) + "\ufffd", library)
        raise error(
            "P0101",
            "the file is not UTF-8 text",
            source.span(len(source.text) - 1, len(source.text)),
            f"byte 0x{data[problem.start]:02x}",
            help="save the script as UTF-8",
        ) from None
    return Source(name, newlines(text), library)


def newlines(text: str) -> str:
    """Normalize line endings to `\\n`."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse(source: Source) -> tuple[tree.Script, list[Diagnostic]]:
    layout = laid_out(source)
    statements: list[tree.Statement] = []
    problems: list[Diagnostic] = []
    broken: set[str] = set()
    for tokens in layout.statements:
        try:
            statements.append(_statement(source, tokens))
        except PiperError as problem:
            problems.extend(problem.diagnostics)
            if len(problems) > LIMIT:
                break  # more would not be shown
            broken.update(str(token) for token in tokens.tokens if token.type == "NAME")
    doc = documentation(statements[0]) if statements else None
    body = tuple(statements[1:] if doc is not None else statements)
    return tree.Script(source, doc, body, frozenset(broken)), problems


def laid_out(source: Source) -> TokenLayout:
    _refuse_long_lines(source)
    return lay_out(source, grammar.tokens(source.text))


def _refuse_long_lines(source: Source) -> None:
    text, first = source.text, 0
    while first < len(text):
        last = text.find("\n", first, first + MAX_LINE + 1)
        if last < 0:
            if len(text) - first > MAX_LINE:
                raise error(
                    "P0108",
                    "this line is too long",
                    source.span(first, first),
                    f"more than {MAX_LINE:,} characters",
                    help="break it inside brackets",
                )
            return
        first = last + 1


def _statement(source: Source, written: StatementTokens) -> tree.Statement:
    if written.problem is not None:
        raise PiperError(written.problem)
    grammar.BUILDER.source = source
    parser = grammar.fresh()
    tokens = written.tokens
    position = 0
    try:
        for position, token in enumerate(tokens):  # noqa: B007
            parser.feed_token(token)
        position = len(tokens)
        result: tree.Statement = grammar.ended(parser, tokens[-1])
    except UnexpectedToken:
        from piperlang.syntax import complaints  # needed for errors only

        end = made("$END", start(tokens[-1]))
        raise PiperError(complaints.unexpected(source, [*tokens, end], position, grammar.accepted(parser))) from None
    if len(tokens) > MAX_HEIGHT and _height(result) > MAX_HEIGHT + MAX_DEPTH:
        raise error(
            "P0107",
            "this statement is nested too deeply",
            span(source, tokens[0]),
            "it starts here",
            help="name the inner parts with `let`",
        )
    return result


def _height(root: Any) -> int:
    """Depth of the tree, walked without recursion: the tree may be too deep for Python's stack."""
    level: list[Any] = [root]
    height = 0
    while level:
        below: list[Any] = []
        for node in level:
            if isinstance(node, tree.Node):
                below.extend(getattr(node, name) for name in node._fields)
            elif isinstance(node, tuple):
                below.extend(node)
        level = [child for child in below if isinstance(child, tree.Node | tuple)]
        height += 1
    return height
