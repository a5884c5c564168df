"""Syntax highlighting of .piper text: a Pygments lexer, used by `pygmentize`, Rich, Sphinx and the REPL.

Regular expressions are sufficient for the language. The design rests on two properties of Pygments:
- where no rule of the current state matches a line end, the lexer goes back to `root`. So a state that belongs to one
  line (options, mesh axes, tags) has no rule for the line end, and an open bracket does not match the line end before a
  word that can only start a statement, as the parser does. One missing bracket does not affect the rest of the file;
- what no rule matches becomes an Error token of one character: an unmatched closing bracket, `;`, `$`, `é`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from pygments.lexer import RegexLexer, bygroups, default, include, words
from pygments.token import Comment, Error, Keyword, Name, Number, Operator, Punctuation, String, Whitespace, _TokenType

from piperlang.directives import OPTION_WORDS
from piperlang.syntax.words import (
    BUILTINS,
    CONNECTIVES,
    CONSTANTS,
    CONTROL,
    DECLARATIONS,
    DIRECTIVES,
    IMPORTS,
    NEVER_IN_BRACKETS,
    OPERATORS,
    SELECTOR_WORDS,
    SIZE_UNITS,
)

KEYWORD_TOKENS: dict[str, _TokenType] = {
    **dict.fromkeys(DIRECTIVES, Keyword),
    **dict.fromkeys(DECLARATIONS, Keyword.Declaration),
    **dict.fromkeys(IMPORTS, Keyword.Namespace),
    **dict.fromkeys(CONTROL, Keyword.Reserved),
    **dict.fromkeys(CONNECTIVES, Keyword.Pseudo),
    **dict.fromkeys(OPERATORS, Operator.Word),
    **dict.fromkeys(CONSTANTS, Keyword.Constant),
}
"""The token type of every reserved word."""


def _any(choices: Iterable[str]) -> str:
    """A pattern for one of `choices`, the longest first, so that a prefix does not match first."""
    return f"(?:{'|'.join(sorted(map(re.escape, choices), key=len, reverse=True))})"


NAME = r"[A-Za-z_][A-Za-z0-9_]*"
IDENTIFIER = rf"(?!{_any(KEYWORD_TOKENS)}\b){NAME}"
"""A name that can be bound: a reserved word in its place keeps its own color, which shows the error."""


def _keywords() -> list[tuple[words, _TokenType]]:
    groups: dict[_TokenType, list[str]] = {}
    for word, token in KEYWORD_TOKENS.items():
        groups.setdefault(token, []).append(word)
    return [(words(tuple(group), suffix=r"\b"), token) for token, group in groups.items()]


def _starts(word: str, *states: str) -> tuple[str, _TokenType, tuple[str, ...]]:
    return rf"{word}\b", KEYWORD_TOKENS[word], states


def _string(quote: str) -> str:
    """The opening quote of a string that is closed on its line, as the grammar requires."""
    return rf"{quote}(?=[^{quote}\\\n]*(?:\\.[^{quote}\\\n]*)*{quote}(?!{quote}))"


class PiperLexer(RegexLexer):  # type: ignore[misc]  # Pygments has no types
    """The .piper language: schedules for distributed training."""

    name = "Piper"
    aliases: ClassVar[list[str]] = ["piper"]
    filenames: ClassVar[list[str]] = ["*.piper"]
    mimetypes: ClassVar[list[str]] = ["text/x-piper"]
    flags = re.MULTILINE | re.ASCII

    tokens: ClassVar[dict[str, list[Any]]] = {
        "root": [(r"\n", Whitespace), (r",", Punctuation), include("expression")],
        "space": [(r"[ \t]+", Whitespace), (r"#[^\n]*", Comment.Single)],
        "lines": [(rf"\n(?![ \t]*{_any(NEVER_IN_BRACKETS)}\b)", Whitespace)],
        "expression": [
            include("space"),
            include("strings"),
            include("numbers"),
            (rf"(\.)([ \t]*)({NAME})", bygroups(Punctuation, Whitespace, Name)),  # model.order: no keyword after a dot
            (r"(next)([ \t]*)(\?)", bygroups(KEYWORD_TOKENS["next"], Whitespace, Operator)),
            include("statements"),
            *_keywords(),
            (words(BUILTINS, suffix=r"\b(?=[ \t]*\()"), Name.Builtin),
            (NAME, Name),
            (r"->|\*\*|//|[=!<>]=|[-+*/%<>=&|]", Operator),
            (r"\[", Punctuation, ("square", "key")),
            (r"\(", Punctuation, "round"),
            (r"\{", Punctuation, "curly"),
            (r"[:.]", Punctuation),
        ],
        # ------------------------------------------------------------------------------------- words that bind names
        "statements": [
            _starts("def", "function"),
            _starts("param", "bound"),
            _starts("let", "all bound"),
            _starts("mesh", "axes", "bound"),
            _starts("as", "bound"),
            _starts("from", "imported", "module"),
            _starts("import", "module"),
            _starts("tag", "tags"),
            _starts("with", "options"),
        ],
        "function": [include("space"), (IDENTIFIER, Name.Function, "#pop"), default("#pop")],
        "bound": [include("space"), (IDENTIFIER, Name.Variable, "#pop"), default("#pop")],
        "all bound": [include("space"), *_keywords(), (NAME, Name.Variable), (r",", Punctuation), default("#pop")],
        "module": [include("space"), (rf"{IDENTIFIER}(?:\.{NAME})*", Name.Namespace, "#pop"), default("#pop")],
        "imported": [include("space"), include("strings"), (r"import\b", Keyword.Namespace, "#pop"), default("#pop")],
        "axes": [(rf"({IDENTIFIER})(?=[ \t]*:)", Name.Attribute), (r",", Punctuation), include("expression")],
        "tags": [
            (rf"({IDENTIFIER})(?=[ \t]*=(?!=))", Name.Attribute),
            (r"at\b", KEYWORD_TOKENS["at"], "#pop"),
            (r",", Punctuation),
            include("expression"),
        ],
        "options": [
            *(
                (
                    rf"({option})([ \t]*)(=)([ \t]*)({_any(values)})\b",
                    bygroups(Name.Attribute, Whitespace, Operator, Whitespace, Name.Constant),
                )
                for option, values in OPTION_WORDS.items()
            ),
            (rf"({IDENTIFIER})(?=[ \t]*=(?!=))", Name.Attribute),
            (r",", Punctuation),
            include("expression"),
        ],
        # ------------------------------------------------------------------------------------------------- brackets
        "round": [(r"\)", Punctuation, "#pop"), (r",", Punctuation), include("lines"), include("expression")],
        "curly": [(r"\}", Punctuation, "#pop"), (r",", Punctuation), include("lines"), include("expression")],
        "square": [(r"\]", Punctuation, "#pop"), (r",", Punctuation, "key"), include("lines"), include("expression")],
        # After `[` and after a comma in it, a word before `=` or `!=` is a key, reserved or not.
        "key": [
            include("lines"),
            include("space"),
            *(
                (
                    rf"({key})(\s*)(!?=)(?!=)",
                    bygroups(Name.Attribute, Whitespace, Operator),
                    ("#pop", f"value of {key}", "value"),
                )
                for key in SELECTOR_WORDS
            ),
            (rf"({NAME})(\s*)(!?=)(?!=)", bygroups(Name.Attribute, Whitespace, Operator), ("#pop", "value")),
            (rf"(!)([ \t]*)({NAME})", bygroups(Operator, Whitespace, Name.Attribute), "#pop"),
            (r"\*(?=\s*\])", Keyword.Constant, "#pop"),
            default("#pop"),
        ],
        "value": [include("lines"), include("space"), (r"\*(?!\*)", Keyword.Constant, "#pop"), default("#pop")],
        # The words of a key, anywhere in its value: pass=F, pass={F, B}, pass=B if late else F.
        **{
            f"value of {key}": [include(f"words of {key}"), include("lines"), include("expression"), default("#pop")]
            for key in SELECTOR_WORDS
        },
        **{
            f"nested value of {key}": [
                (r"[)}]", Punctuation, "#pop"),
                (r",", Punctuation),
                include(f"words of {key}"),
                include("lines"),
                include("expression"),
            ]
            for key in SELECTOR_WORDS
        },
        **{
            f"words of {key}": [
                (words(values, suffix=r"\b(?![ \t]*\()"), Name.Constant),
                (r"[({]", Punctuation, f"nested value of {key}"),
            ]
            for key, values in SELECTOR_WORDS.items()
        },
        # ------------------------------------------------------------------------------------- strings and numbers
        "strings": [
            (r'"""', String.Doc, "text"),
            (_string('"'), String.Double, "double"),
            (_string("'"), String.Single, "single"),
            (r"[\"'][^\n]*", Error),
        ],
        "escapes": [(r"\\[nt\\\"']", String.Escape), (r"\\.", Error)],
        "text": [
            (r'"""', String.Doc, "#pop"),
            (r"\\\n", String.Escape),
            include("escapes"),
            (r'[^"\\]+|"', String.Doc),
        ],
        "double": [(r'"', String.Double, "#pop"), include("escapes"), (r'[^"\\]+', String.Double)],
        "single": [(r"'", String.Single, "#pop"), include("escapes"), (r"[^'\\]+", String.Single)],
        "numbers": [
            (rf"[0-9]+(?:\.[0-9]+)?{_any(SIZE_UNITS)}\b", Number),
            (r"[0-9]+(?:\.[0-9]+(?:[eE][+-]?[0-9]+)?|[eE][+-]?[0-9]+)\b", Number.Float),
            (r"[0-9]+(?:_[0-9]+)*(?!\w|\.[0-9])", Number.Integer),
            (r"[0-9][\w.]*", Error),
        ],
    }
