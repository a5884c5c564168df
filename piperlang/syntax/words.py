"""Every word the language knows, in one place.

The grammar, the highlighters (Pygments, VS Code, Vim) and the messages all take their words from here; a test holds
this list against grammar/piper.lark.
"""

from __future__ import annotations

DIRECTIVES = ("tag", "place", "replicate", "shard", "split", "stream", "order", "recompute", "offload")
DECLARATIONS = ("from", "import", "param", "let", "mesh", "def")
CONTROL = ("for", "repeat", "if", "elif", "else", "return", "require", "print")
CONNECTIVES = ("as", "at", "batch", "in", "into", "on", "over", "with")
OPERATORS = ("and", "or", "not")
CONSTANTS = ("True", "False", "next", "update")

KEYWORDS = DIRECTIVES + DECLARATIONS + CONTROL + CONNECTIVES + OPERATORS + CONSTANTS
"""Reserved: none of these can be a name. Inside a selector's brackets, before `=`, any word is a key."""

STATEMENT_STARTS = DIRECTIVES + DECLARATIONS + ("for", "repeat", "if", "return", "require", "print")

NEVER_IN_BRACKETS = frozenset(STATEMENT_STARTS) - {"for", "if"} | {"elif"}
"""A line that starts with one of these begins a statement, even when a bracket above was left open."""

BUILTINS = (
    "abs", "count", "enumerate", "len", "max", "min", "range", "reversed", "sorted", "sum", "tags", "zip",
)  # fmt: skip

PASSES = ("F", "B", "I", "W")
COMMUNICATIONS = (
    "p2p", "send", "recv", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
)  # fmt: skip
SELECTOR_WORDS = {"pass": PASSES, "comm": COMMUNICATIONS}
"""Keys whose values are words of the language, not names of the script."""

OPTION_WORDS = {
    "grads": ("sharded", "replicated"),
    "params": ("sharded", "replicated"),
    "states": ("sharded", "replicated"),
    "reduce": ("mean",),
    "style": ("experts", "columns", "rows", "sequence"),
}
"""Options after `with` whose values are words."""

OPTIONS = {
    "replicate": ("bucket", "grads", "params", "prefetch", "reduce", "states"),
    "shard": ("style",),
    "recompute": (),
    "offload": ("prefetch",),
}
"""What may follow `with` in each directive."""

SIZE_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
