"""Options of directives, `with NAME=VALUE, ...`: those that a directive has, and those that a script gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from piperlang.diagnostics import Label, did_you_mean, error, listed
from piperlang.elaborate.values import Value, brief
from piperlang.source import Span
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.elaborate.directive import Directive
    from piperlang.elaborate.evaluate import Evaluator


@dataclass(frozen=True)
class Words:
    """The values of an option that takes one of some words."""

    words: tuple[str, ...]
    note: str = ""
    """Why there is no other word."""


@dataclass(frozen=True)
class Count:
    """The values of an option that takes an integer."""

    least: int = 0
    most: int | None = None
    usual: int = 1

    def has(self, value: object) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and self.least <= value and (self.most is None or value <= self.most)  # type: ignore[operator]

    def __str__(self) -> str:
        return f"of {self.least} or more" if self.most is None else f"from {self.least} to {self.most}"


Kind: TypeAlias = Words | Count | type[tree.Size]
"""The values of an option: words, integers, or sizes above 0."""


@dataclass(frozen=True)
class Option:
    """One option that a script gives."""

    name: str
    value: Value
    span: Span

    def __str__(self) -> str:
        return f"{self.name}={written(self.value)}"


def given_options(
    script: Evaluator, directive: type[Directive], settings: Sequence[tree.Setting]
) -> tuple[Option, ...]:
    """The options after `with`, checked against those that the directive has."""
    legal = directive.legal
    seen: dict[str, Option] = {}
    for setting in settings:
        name = setting.name.text
        if name not in legal:
            known = "its option is" if len(legal) == 1 else "its options are"
            label = f"{known} {listed(legal, 'and')}" if legal else "it takes no options"
            raise error(
                "P0405",
                f"`{directive.word()}` has no option `{name}`",
                setting.name.span,
                label,
                help=did_you_mean(name, legal),
            )
        if name in seen:
            raise error("P0405", f"`{name}` is given twice", setting.span, also=[Label(seen[name].span, "first here")])
        seen[name] = Option(name, _value(script, legal[name], setting), setting.span)
    return tuple(seen.values())


def _value(script: Evaluator, kind: Kind, setting: tree.Setting) -> Value:
    name, node = setting.name.text, setting.value
    if isinstance(kind, Words):
        word = node.text if isinstance(node, tree.Name) and node.text in kind.words else script.evaluate(node)
        if word not in kind.words:
            # A variable is known by its value: it may be a parameter of a function of the library.
            shown = word if isinstance(node, tree.Name) and isinstance(word, str) else node.span.text
            raise error(
                "P0405",
                f"`{name}` cannot be `{shown}`",
                node.span,
                f"it must be {listed(kind.words)}" + (f"; {kind.note}" if kind.note else ""),
                help=did_you_mean(shown, kind.words),
            )
        return word
    value = script.evaluate(node)
    if isinstance(kind, Count):
        if not kind.has(value):
            meant = _whole(value)
            raise error(
                "P0405",
                f"`{name}` must be an integer {kind}",
                node.span,
                brief(value),
                help=f"{name}={meant if kind.has(meant) else kind.usual}",
            )
    elif not isinstance(value, tree.Size) or value.bytes < 1:
        raise error("P0405", f"`{name}` must be a size above 0", node.span, brief(value), help=f"{name}=25MB")
    return value


def _whole(value: object) -> int | None:
    """The integer that a float or a string stands for."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 10 else None
    return int(value) if isinstance(value, float) and value.is_integer() else None


def written(value: object) -> str:
    """A value as scripts write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) and not value.isidentifier() else str(value)
