"""Syntax errors: turns the parser's state into a diagnostic with a suggested fix."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection

from lark import Token

from piperlang.diagnostics import Diagnostic, nearest
from piperlang.source import Source, Span
from piperlang.syntax import grammar
from piperlang.syntax import tokens as tokens_at
from piperlang.syntax.words import CONNECTIVES, KEYWORDS, PYTHON_HABITS, SIZE_UNITS, STATEMENT_STARTS

LOOK_ALIKES = {
    "“": '"',
    "”": '"',
    "„": '"',
    "‘": "'",
    "’": "'",
    "´": "'",
    "–": "-",
    "—": "-",
    "−": "-",
    "‐": "-",
    "×": "*",
    "÷": "/",
    "→": "->",
    "≠": "!=",
    "≤": "<=",
    "≥": ">=",
    "：": ":",
    "，": ",",
    "＝": "=",
    "（": "(",
    "）": ")",
    "［": "[",
    "］": "]",
    "а": "a",
    "в": "b",
    "е": "e",
    "і": "i",
    "ј": "j",
    "о": "o",
    "р": "p",
    "с": "c",
    "ѕ": "s",
    "у": "y",
    "х": "x",
    "А": "A",
    "В": "B",
    "Е": "E",
    "К": "K",
    "М": "M",
    "Н": "H",
    "О": "O",
    "Р": "P",
    "С": "C",
    "Т": "T",
    "Х": "X",
    "α": "a",
    "ο": "o",
    "ν": "v",
    "Α": "A",
    "Β": "B",
    "Ε": "E",
    "Ζ": "Z",
    "Η": "H",
    "Ι": "I",
    "Κ": "K",
    "Μ": "M",
    "Ν": "N",
    "Ο": "O",
    "Ρ": "P",
    "Τ": "T",
    "Υ": "Y",
    "Χ": "X",
    "\u00a0": " ",
    "\u2009": " ",
    "\u202f": " ",
    "\u3000": " ",
    "\u200b": "",
    "\ufeff": "",
}
"""Pasted Unicode characters that look like ASCII ones."""


def unexpected(source: Source, tokens: list[Token], at: int, accepted: Collection[str]) -> Diagnostic:
    """The diagnostic for `tokens[at]`, which the parser rejected; `accepted` are the terminal types it allows there."""
    token = tokens[at]
    span = tokens_at.span(source, token)
    raw = _raw(token, span)
    if raw is not None:
        return raw
    first = tokens[0]
    wrong_start = _wrong_start(source, tokens, at)
    if wrong_start is not None:
        return wrong_start
    expected = _expected(accepted)
    message = f"unexpected {_describe(token)}"
    label = f"expected {expected}" if expected else "nothing is allowed here"
    return Diagnostic("P0102", message, span, label, helps=_repair(token, first, tokens, at, accepted))


def _raw(token: Token, span: Span) -> Diagnostic | None:
    """A token that the lexer marked as invalid."""
    text = str(token)
    if token.type == "BAD_STRING":
        return Diagnostic(
            "P0106",
            "unterminated string",
            span,
            "no closing quote on this line",
            helps=(f'add `{text[0]}`; use """ for a multi-line string',),
        )
    if token.type == "BAD_TEXT":
        return Diagnostic("P0106", 'unterminated """ string', span, 'no closing """ found', helps=('add `"""`',))
    if token.type == "BAD_NUMBER":
        return _bad_number(text, span)
    if token.type == "BAD_CHARACTER":
        return _bad_character(text, span)
    return None


def _bad_number(text: str, span: Span) -> Diagnostic:
    tail = text.lstrip("0123456789._").lower()
    if tail in ("b", "kb", "mb", "gb", "tb", "kib", "mib", "gib", "tib"):
        unit = tail.upper().replace("IB", "iB")
        fix = text[: len(text) - len(tail)] + unit
        return Diagnostic(
            "P0110",
            f"`{text}` is not a size",
            span,
            "valid units are B, KB, MB, GB, TB, KiB, MiB, GiB and TiB",
            helps=(f"did you mean `{fix}`?",),
        )
    return Diagnostic(
        "P0110",
        f"`{text}` is not a number",
        span,
        "write numbers as 8, 1_000, 0.5 or 1e-3, and sizes as 25MB",
        helps=("put a space or an operator between the number and the name",),
    )


def _bad_character(text: str, span: Span) -> Diagnostic:
    char = text[0]
    one = Span(span.source, span.start, span.start + 1)
    name = unicodedata.name(char, f"U+{ord(char):04X}")
    if char in LOOK_ALIKES:
        plain = LOOK_ALIKES[char]
        fix = f"replace it with `{plain}`" if plain.strip() else "delete it" if not plain else "replace it with a space"
        return Diagnostic(
            "P0109", f"`{char}` is the Unicode character {name}", one, "only ASCII is allowed here", helps=(fix,)
        )
    hints = {
        "\\": "a line continues inside brackets; no backslash is needed",
        ";": "write one statement per line",
        "!": "use `not` for negation; `!tag` is allowed in selectors only",
        "$": "names have no prefix",
    }
    shown = char if char.isprintable() else f"U+{ord(char):04X}"
    helps = (
        (hints[char],)
        if char in hints
        else ("names consist of ASCII letters, digits and `_`; put other text in quotes",)
    )
    return Diagnostic("P0109", f"invalid character `{shown}`", one, name.lower() if name.isascii() else "", helps=helps)


def _wrong_start(source: Source, tokens: list[Token], at: int) -> Diagnostic | None:
    """If the first word is a misspelled keyword, the parser fails at a later token: report the word instead."""
    first = _statement_start(tokens, at)
    if first is None or first.type != "NAME":
        return None
    word = str(first)
    span = tokens_at.span(source, first)
    if word in PYTHON_HABITS:
        return Diagnostic("P0102", f"`{word}` is not a statement here", span, helps=(PYTHON_HABITS[word],))
    near = nearest(word, STATEMENT_STARTS)
    following = tokens[tokens.index(first) + 1] if first is not tokens[-1] else None
    if near and following is not None and following != "=" and following.type not in ("LPAR", "DOT", "NEWLINE"):
        return Diagnostic("P0102", f"`{word}` is not a statement", span, helps=(f"did you mean `{near}`?",))
    return None


def _statement_start(tokens: list[Token], at: int) -> Token | None:
    """The first token of the (perhaps nested) statement that holds `tokens[at]`."""
    start = at
    while start > 0 and tokens[start - 1].type not in ("NEWLINE", "INDENT", "DEDENT"):
        start -= 1
    return tokens[start] if start < len(tokens) and start != at else None


def _repair(token: Token, first: Token, tokens: list[Token], at: int, accepted: Collection[str]) -> tuple[str, ...]:
    word = str(token)
    keywords = grammar.keyword_types()
    if word in PYTHON_HABITS and token is first:
        return (PYTHON_HABITS[word],)
    if token.type == "NAME" and (near := nearest(word, [keywords[t] for t in accepted if t in keywords])):
        return (f"did you mean `{near}`?",)
    if word == "=" and at == 1 and first.type == "NAME":
        return (f"bind a name with `let {first} = ...`; it cannot change afterwards",)
    if word == "=" and str(_statement_start(tokens, at)) in ("if", "elif", "require"):
        return ("compare with `==`",)
    if word in SIZE_UNITS and at and tokens[at - 1].type == "INT":
        return (f"did you mean `{tokens[at - 1]}{word}`?",)
    if word in KEYWORDS and "NAME" in accepted:
        return (f"`{word}` is a keyword; choose another name",)
    if token.type == "INDENT":
        return ("indent only after a line that ends in `:`",)
    if "INDENT" in accepted:
        return ("indent the block by four spaces",)
    if word == "|" and at and "NEWLINE" in accepted:
        return ("inside an order, join selectors in parentheses: `([stage=0] | [stage=1])`",)
    if token.type == "NEWLINE" and "COLON" in accepted:
        return ("end the line with `:`",)
    if token.type == "NEWLINE" and "ON" in accepted and first == "place":
        return ("add the devices: `place [stage=0] on gpu[pp=0]`",)
    return ()


def _describe(token: Token) -> str:
    if token.type == "NEWLINE":
        return "end of line"
    if token.type == "INDENT":
        return "indentation"
    if token.type in ("DEDENT", "$END"):
        return "end of the block"
    text = str(token)
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"


def _expected(accepted: Collection[str]) -> str:
    spelling = grammar.spelling()
    if "NAME" in accepted and "LSQB" in accepted:
        rest = sorted(spelling[t] for t in accepted if t in ("NEWLINE", "RPAR", "RSQB", "RBRACE", "BATCH", "NEXT"))
        return " or ".join(["an expression", *rest])
    plain = [t for t in accepted if t not in ("SUM_OP", "STAR", "PRODUCT_OP")]
    if "SUM_OP" in accepted:
        # After a complete expression: name what ends or follows it, not every operator.
        follows = {"NEWLINE", "COMMA", "COLON", "RPAR", "RSQB", "RBRACE", "ELSE", "EQUAL"}
        keywords = grammar.keyword_types()
        plain = [t for t in plain if t in follows or keywords.get(t) in CONNECTIVES]
    words = sorted({spelling.get(t, t) for t in plain})
    if not words:
        return "an operator"
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
