"""Directives: one request of a script to the graph each, with its location and call stack."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from piperlang.diagnostics import Call
from piperlang.elaborate.selector import Selector, TagValue
from piperlang.elaborate.values import Axis, Mesh, Slice, Value
from piperlang.source import Span


@dataclass(frozen=True, kw_only=True)
class Written:
    """The location of a directive, and its call stack, outermost call first."""

    span: Span
    trail: tuple[Call, ...] = ()


@dataclass(frozen=True)
class UseMesh(Written):
    mesh: Mesh


@dataclass(frozen=True)
class ModulePath:
    """`layers[0:6].attn`: names, and per index a number, a half-open range, or None for all."""

    parts: tuple[str | int | tuple[int | None, int | None] | None, ...]
    span: Span

    def __str__(self) -> str:
        text = ""
        for part in self.parts:
            if isinstance(part, str):
                text += f".{part}" if text else part
            elif isinstance(part, tuple):
                text += f"[{'' if part[0] is None else part[0]}:{'' if part[1] is None else part[1]}]"
            else:
                text += "[*]" if part is None else f"[{part}]"
        return text


@dataclass(frozen=True)
class Tag(Written):
    tags: tuple[tuple[str, TagValue], ...]
    paths: tuple[ModulePath, ...]


@dataclass(frozen=True)
class Place(Written):
    selector: Selector
    where: Slice


@dataclass(frozen=True)
class Option:
    name: str
    value: Value
    span: Span


@dataclass(frozen=True)
class Replicate(Written):
    selector: Selector
    axes: tuple[Axis, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Shard(Written):
    selector: Selector
    axes: tuple[Axis, ...]
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Split(Written):
    selector: Selector | None
    """None is the batch."""
    count: int
    name: str


@dataclass(frozen=True)
class Stream(Written):
    selector: Selector
    stream: str


@dataclass(frozen=True)
class Recompute(Written):
    selector: Selector
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Offload(Written):
    selector: Selector
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Step(Written):
    """One step of an order: the selectors in it may overlap."""

    items: tuple[Selector, ...]


@dataclass(frozen=True)
class Order(Written):
    where: Slice | None
    """None for `order A -> B`, which relates nodes wherever they are."""
    steps: tuple[Step, ...]


Directive: TypeAlias = UseMesh | Tag | Place | Replicate | Shard | Split | Stream | Recompute | Offload | Order


class Graph(Protocol):
    """The evaluator's interface to the graph: it applies each directive, then queries the result.

    The outline of a script alone implements it (elaborate/outline.py), and so does the graph of a model.
    """

    def apply(self, directive: Directive) -> None: ...

    def count(self, selector: Selector) -> int: ...

    def tags(self, name: str) -> Iterable[TagValue]: ...
