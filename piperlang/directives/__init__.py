"""All directives: a file for each, with its class, its checks, its printed form and its effects.

A file is found by being here. What other parts know about directives follows from the classes: what the interpreter
evaluates, what completion and editors offer, what `:help` prints."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from piperlang.elaborate.directive import BY_NODE, Directive
from piperlang.elaborate.options import Words
from piperlang.syntax.words import KEYWORDS

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")

BY_WORD: Mapping[str, type[Directive]] = {
    directive.word(): directive for directive in sorted(BY_NODE.values(), key=lambda x: KEYWORDS.index(x.word()))
}
"""By keyword, in the order of the grammar."""

OPTION_WORDS: Mapping[str, tuple[str, ...]] = {
    name: kind.words
    for directive in BY_WORD.values()
    for name, kind in directive.legal.items()
    if isinstance(kind, Words)
}
"""Options after `with` whose values are words."""
