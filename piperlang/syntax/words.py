"""All keywords and option words of the language.

The grammar, the highlighters (Pygments, VS Code, Vim) and the messages use these lists; a test compares
them with grammar/piper.lark.
"""

from __future__ import annotations

DIRECTIVES = ("tag", "place", "replicate", "shard", "split", "stream", "order", "recompute", "offload")
IMPORTS = ("from", "import")
DECLARATIONS = (*IMPORTS, "param", "let", "mesh", "def")
CONTROL = ("for", "repeat", "if", "elif", "else", "return", "require", "print")
CONNECTIVES = ("as", "at", "batch", "into", "on", "over", "with")
OPERATORS = ("and", "or", "not", "in")
CONSTANTS = ("True", "False", "next", "update")

KEYWORDS = DIRECTIVES + DECLARATIONS + CONTROL + CONNECTIVES + OPERATORS + CONSTANTS
"""Reserved words; they cannot be names. Inside a selector's brackets, before `=`, any word is a key."""

STATEMENT_STARTS = DIRECTIVES + DECLARATIONS + ("for", "repeat", "if", "return", "require", "print")

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

OPTION_WORDS = {
    "accumulate": ("whole", "sharded"),
    "grads": ("sharded", "replicated"),
    "params": ("sharded", "replicated"),
    "states": ("sharded", "replicated"),
    "reduce": ("mean",),
    "style": ("experts", "columns", "rows", "sequence"),
}
"""Options after `with` whose values are words."""

OPTIONS = {
    "replicate": ("accumulate", "bucket", "grads", "params", "prefetch", "reduce", "states"),
    "shard": ("style",),
    "recompute": (),
    "offload": ("prefetch",),
}
"""The options that each directive accepts after `with`."""

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
