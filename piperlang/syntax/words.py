"""All keywords of the language, from the rules of grammar/piper.lark.

The parser, the highlighters (Pygments, VS Code, Vim) and the messages use these lists. What each directive is, and its
options, is in piperlang/directives/.
"""

from __future__ import annotations

import re

from piperlang.resources import resource

_GRAMMAR = re.sub("//.*", "", resource("grammar", "piper.lark").read_text(encoding="utf-8"))
_WORDS = dict.fromkeys(re.findall(r'"([A-Za-z]+)"', _GRAMMAR))
_STARTS = dict.fromkeys(  # of the rules that `simple` and `compound` list
    word
    for rules in re.findall(r"^\?(?:simple|compound): ((?:.|\n )*)", _GRAMMAR, re.MULTILINE)
    for rule in re.findall(r"\w+", rules)
    for word in re.findall(rf'^{rule}: "(\w+)"', _GRAMMAR, re.MULTILINE)
)

IMPORTS = ("from", "import")
DECLARATIONS = (*IMPORTS, "param", "let", "mesh", "def")
CONTROL = ("for", "repeat", "if", "elif", "else", "return", "require", "print")
OPERATORS = ("and", "or", "not", "in")
CONSTANTS = ("True", "False", "next", "update")
DIRECTIVES = tuple(word for word in _STARTS if word not in DECLARATIONS + CONTROL)
CONNECTIVES = tuple(sorted(_WORDS.keys() - {*DIRECTIVES, *DECLARATIONS, *CONTROL, *OPERATORS, *CONSTANTS}))
"""Words inside a statement, between its operands."""

KEYWORDS = DIRECTIVES + DECLARATIONS + CONTROL + CONNECTIVES + OPERATORS + CONSTANTS
"""Reserved words; they cannot be names. Inside a selector's brackets, before `=`, any word is a key."""

STATEMENT_STARTS = DIRECTIVES + DECLARATIONS + tuple(word for word in CONTROL if word in _STARTS)

NEVER_IN_BRACKETS = frozenset(STATEMENT_STARTS) - {"for", "if"} | {"elif"}
"""A line that starts with one of these begins a statement, even when a bracket above was left open."""

BUILTINS = ("abs", "count", "enumerate", "len", "max", "min", "range", "reversed", "sorted", "sum", "tags", "zip")

PASSES = ("F", "B", "I", "W")
COMMUNICATIONS = ("p2p", "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
SELECTOR_WORDS = {"pass": PASSES, "comm": COMMUNICATIONS}
"""Keys whose values are words of the language, not names of the script."""
RESERVED_KEYS = ("pass", "comm", "update")
"""Attributes of every node; no tag or split may use these names."""

PYTHON_HABITS = {
    "while": "loops are bounded: use `for x in ...:` or `repeat n:`",
    "lambda": "use `def name(x): expression`",
    "class": "there are no classes; use functions",
    "try": 'there are no exceptions; use `require condition, "message"`',
    "assert": 'use `require condition, "message"`',
    "with": "`with` only follows a directive: `replicate ... with grads=sharded`",
    "elif": "`elif` follows an `if` block at the same indentation",
    "else": "`else` follows an `if` block at the same indentation",
    "global": "names are immutable; pass values as arguments",
    "del": "names are immutable",
    "pass": "empty blocks are not allowed; remove the statement",
    "break": "loops always run to the end; use `if` inside the loop, or a shorter range",
    "continue": "use `if` around the rest of the block",
    "yield": "use `return`, or name the steps inside an `order` block",
    "None": "there is no None; omit the value",
    "true": "did you mean `True`?",
    "false": "did you mean `False`?",
}
"""Python constructs that the language does not have, and their replacements."""

SIZE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
