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


def join(tokens: Sequence[Token], line: Sequence[Token]) -> str:
    """The tokens as one line; `line` is the whole logical line they are part of."""
    spaced = _statement_equals(line)
    parts: list[str] = []
    for i, token in enumerate(tokens):
        if i and _apart(tokens, i, line[0], spaced):
            parts.append(" ")
        parts.append(spelled(token))
    return "".join(parts)


def _statement_equals(line: Sequence[Token]) -> Token | None:
    """The `=` that binds in `let x = 1`: it has spaces, unlike that of a key, an option or a default."""
    if line[0] in ("let", "param", "mesh"):
        return next((token for token in line if token == "=" and token.type == "EQUAL"), None)
    return None


def _apart(tokens: Sequence[Token], i: int, first: Token, spaced: Token | None) -> bool:
    before, token = tokens[i - 1], tokens[i]
    if token is spaced or before is spaced:
        return True
    if token in (",", ".", "?", *CLOSERS) or before in (".", "!", *OPENERS):
        return False
    if before == ",":
        return True
    if token == ":" or before == ":":
        return before == ":" and not _in_brackets(tokens, i)
    if token == "=" or before == "=":
        return False
    if token == "!=" or before == "!=":
        return not (before.type == "KEY" or (i > 1 and before == "!=" and tokens[i - 2].type == "KEY"))
    if token == "**" or before == "**":
        return False
    if token in ("(", "[") and before.type in ("NAME", "RPAR", "RSQB"):
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


def _in_brackets(tokens: Sequence[Token], i: int) -> bool:
    """Whether the colon before `i` is that of a range."""
    depth = 0
    for token in tokens[:i]:
        depth += (token in OPENERS) - (token in CLOSERS)
    return depth > 0
