"""The spaces between the tokens of one logical line."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from piperlang.syntax.words import KEYWORDS

OPENERS = ("(", "[", "{")
CLOSERS = (")", "]", "}")
_BEFORE_VALUE = frozenset(KEYWORDS) - {"True", "False", "next", "update"}
"""Words after which `+` or `-` is unary and a bracket starts a value, not a call or an index."""


def spelled(token: Token) -> str:
    """A token's canonical text: strings in double quotes where that needs no escape."""
    text = str(token)
    if token.type == "STRING" and text[0] == "'" and '"' not in text and "\\" not in text:
        return f'"{text[1:-1]}"'
    return text


def join(tokens: Sequence[Token], line: Sequence[Token], depth: int = 0) -> str:
    """The tokens as one line; `line` is the whole logical line they are part of, in which `depth` brackets are open
    before them."""
    spaced = _statement_equals(line)
    parts: list[str] = []
    for i, token in enumerate(tokens):
        if i and _apart(tokens, i, spaced, in_brackets=depth > 0):
            parts.append(" ")
        parts.append(spelled(token))
        depth += nesting(token)
    return "".join(parts)


def _statement_equals(line: Sequence[Token]) -> Token | None:
    """The `=` that binds in `let x = 1`: it has spaces, unlike that of a key, an option or a default."""
    if line[0] in ("let", "param", "mesh"):
        return next((token for token in line if token == "=" and token.type == "EQUAL"), None)
    return None


def nesting(token: Token) -> int:
    """How many brackets more are open after the token than before it."""
    text = str(token)  # lark's tokens compare slowly
    return (text in OPENERS) - (text in CLOSERS)


def _apart(tokens: Sequence[Token], i: int, spaced: Token | None, *, in_brackets: bool) -> bool:
    if tokens[i] is spaced or tokens[i - 1] is spaced:
        return True
    before, token = str(tokens[i - 1]), str(tokens[i])
    if token in (",", ".", "?", *CLOSERS) or before in (".", "!", *OPENERS):
        return False
    if before == ",":
        return True
    if token == ":" or before == ":":
        return before == ":" and not in_brackets  # in brackets it is a range's
    if token == "=" or before == "=":
        return False
    if token == "!=" or before == "!=":
        return not (tokens[i - 1].type == "KEY" or (i > 1 and before == "!=" and tokens[i - 2].type == "KEY"))
    if token == "**" or before == "**":
        return False
    if token in ("(", "[") and tokens[i - 1].type in ("NAME", "RPAR", "RSQB"):
        return False
    return not _unary(tokens, i - 1)


def _unary(tokens: Sequence[Token], i: int) -> bool:
    """Whether the sign at `i` belongs to what follows it."""
    if tokens[i].type != "SUM_OP":
        return False
    if i == 0:
        return True
    before = tokens[i - 1]
    return before.type not in ("NAME", "INT", "FLOAT", "SIZE", "STRING", "TEXT", "RPAR", "RSQB") and before not in (
        "True",
        "False",
    )
