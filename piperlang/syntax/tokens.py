"""Positions of tokens. Lark types them as optional; ours, from the lexer or the line layer, always have them."""

from __future__ import annotations

from lark import Token

from piperlang.source import Source, Span


def start(token: Token) -> int:
    return token.start_pos or 0


def end(token: Token) -> int:
    return token.end_pos or 0


def span(source: Source, token: Token) -> Span:
    return Span(source, start(token), end(token))


def made(kind: str, at: int) -> Token:
    """A token without text, made by the line layer at offset `at`."""
    return Token(kind, "", at, None, None, None, None, at)


def retyped(token: Token, kind: str) -> Token:
    return Token.new_borrow_pos(kind, str(token), token)
