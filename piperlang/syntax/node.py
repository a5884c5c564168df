"""Base classes of the syntax tree: frozen records with a span."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar, Self, dataclass_transform

from piperlang.source import Span


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of all nodes: frozen records like dataclasses, without the millisecond that creating each class costs.

    Seventy dataclasses would take a sixth of the time that `piperc check` may take.
    """

    _fields: ClassVar[tuple[str, ...]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _unlike: ClassVar[frozenset[str]] = frozenset()
    """Fields that comparison ignores."""

    def __init_subclass__(cls) -> None:
        names = [name for name, kind in cls.__annotations__.items() if not kind.startswith("ClassVar")]
        cls._fields = tuple(names)
        cls._defaults = {name: cls.__dict__[name] for name in names if name in cls.__dict__}

    def __init__(self, *values: Any, span: Span) -> None:
        fields = self._fields
        if len(values) != len(fields):
            values = (*values, *(self._defaults[name] for name in fields[len(values) :]))
        self.__dict__.update(zip(fields, values, strict=True), span=span)

    if __debug__:

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError(f"syntax trees are frozen: {name}")

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        mine, theirs = self.__dict__, other.__dict__
        return all(mine[name] == theirs[name] for name in self._fields if name not in self._unlike)

    def __hash__(self) -> int:
        return hash((type(self).__name__, *(self.__dict__[name] for name in self._fields if name not in self._unlike)))

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={self.__dict__[name]!r}" for name in self._fields)
        return f"{type(self).__name__}({parts})"


class Node(Record):
    span: Span = field(kw_only=True)

    def children(self) -> Iterator[Node]:
        """The nodes in its fields, in the order of the fields."""
        for name in self._fields:
            yield from _nodes_in(self.__dict__[name])

    def over(self, span: Span) -> Self:
        """The same node with another span: that of the parentheses around it."""
        return type(self)(*(self.__dict__[name] for name in self._fields), span=span)


class Ident(Node):
    """A word where it is bound or names a part: `x` in `let x = 1`, `dp` in `gpu.dp`."""

    text: str


def _nodes_in(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _nodes_in(item)
