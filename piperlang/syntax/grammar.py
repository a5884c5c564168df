"""The parser tables that Lark makes from grammar/piper.lark, cached so that a second start takes milliseconds.

This is the only file that depends on Lark's internals. Tested with lark 1.3.1:
- `Lark(cache=path)` writes the tables with a digest of grammar, options, Lark and Python version at the start;
- `parse_interactive()` without text, fed token by token; `accepts()` for the tokens that are allowed next;
- `Lark.lex` builds a new lexer at each call, so ours is built once (`_build_lexer`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lark import Lark, Token
from lark.lexer import LexerThread
from lark.parsers.lalr_interactive_parser import InteractiveParser

from piperlang.resources import resource
from piperlang.syntax.build import Builder

BUILDER = Builder()

RAW = ("LINE_END", "COMMENT", "BAD_TEXT", "BAD_STRING", "BAD_NUMBER", "BAD_CHARACTER")
"""Terminals that no rule uses: lines.py reads them."""

TABLES = f"grammar-{sys.implementation.cache_tag}.tables"


class _KeepRaw:
    """Lark drops terminals that no rule mentions unless a postlex asks for them; ours does only that."""

    always_accept = RAW

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


def build(strict: bool = False, cache_file: str | None = None) -> Lark:
    options: dict[str, Any] = {"cache": cache_file} if cache_file else {}
    return Lark(
        resource("grammar", "piper.lark").read_text(encoding="utf-8"),
        parser="lalr",
        lexer="basic",
        start="statement",
        strict=strict,
        keep_all_tokens=True,
        maybe_placeholders=False,
        postlex=_KeepRaw(),
        transformer=BUILDER,
        **options,
    )


def _cache_file() -> str | None:
    """A file in the user's own cache folder; None if it is not writable. Each Python has its own: they do not read each
    other's tables, and would make them anew at every start."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "piperlang"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return str(folder / TABLES) if os.access(folder, os.W_OK) else None
    except OSError:
        return None


@cache
def parser() -> Lark:
    return build(cache_file=_cache_file())


@cache
def _lexer() -> Any:
    return parser()._build_lexer()


def tokens(text: str) -> Iterator[Token]:
    stream: Iterator[Token] = LexerThread.from_text(_lexer(), text).lex(None)  # type: ignore[no-untyped-call]
    return stream


def fresh() -> InteractiveParser:
    """A parser at the start of one statement."""
    return parser().parse_interactive()


def ended(parser: InteractiveParser, last: Token) -> Any:
    """The statement, once all its tokens were fed."""
    return parser.feed_eof(last)  # type: ignore[no-untyped-call]


def accepted(parser: InteractiveParser) -> set[str]:
    """The terminals that the parser accepts next."""
    found: set[str] = parser.accepts()  # type: ignore[no-untyped-call]
    return found


@cache
def spelling() -> dict[str, str]:
    """How each terminal is written, for messages: fixed ones as they are, the others described."""
    described = {
        "NAME": "a name",
        "KEY": "a key",
        "INT": "a number",
        "FLOAT": "a number",
        "SIZE": "a size",
        "STRING": "a string",
        "TEXT": "a string",
        "NEWLINE": "the end of the line",
        "INDENT": "an indented block",
        "DEDENT": "the end of the block",
        "$END": "the end of the statement",
        "SUM_OP": "`+`",
        "PRODUCT_OP": "`/`",
    }
    for terminal in parser().terminals:
        if terminal.name not in described and terminal.name not in RAW:
            described[terminal.name] = f"`{terminal.pattern.value}`"
    return described


@cache
def keyword_types() -> dict[str, str]:
    """Token type of each keyword, as the grammar has them."""
    return {
        t.name: t.pattern.value
        for t in parser().terminals
        if t.pattern.value.isidentifier() and t.pattern.type == "str"
    }
