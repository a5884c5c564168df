"""The syntax tree: frozen, spanned, and equal when it means the same (comparison ignores spans).

Chains of one precedence level (`a + b - c`) are one flat node, so that a long line is not a deep tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from piperlang.source import Source
from piperlang.syntax.node import Ident as Ident
from piperlang.syntax.node import Node as Node

# ---------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, as in `25MB`; keeps its unit out of integer arithmetic."""

    bytes: int

    def __str__(self) -> str:
        for unit, factor in (
            ("GiB", 2**30),
            ("GB", 10**9),
            ("MiB", 2**20),
            ("MB", 10**6),
            ("KiB", 2**10),
            ("KB", 10**3),
        ):
            if self.bytes and self.bytes % factor == 0:
                return f"{self.bytes // factor}{unit}"
        return f"{self.bytes}B"


class Literal(Node):
    value: int | float | bool | str | Size


class Name(Node):
    text: str


class ListOf(Node):
    items: tuple[Expr, ...]


class Each(Node):
    """`for names in iterable` of a comprehension."""

    names: tuple[Ident, ...]
    iterable: Expr


class Given(Node):
    """`if test` of a comprehension."""

    test: Expr


class Comprehension(Node):
    element: Expr
    clauses: tuple[Each | Given, ...]


class Argument(Node):
    name: Ident | None
    value: Expr


class CallOf(Node):
    function: Expr
    arguments: tuple[Argument, ...]


class Attribute(Node):
    base: Expr
    name: Ident


class Range(Node):
    """`low:high`; either side may be missing."""

    low: Expr | None
    high: Expr | None


class Everything(Node):
    """`*`"""


class Next(Node):
    """`next`: the lowest one not yet ordered there; `next?`: the same, or nothing if none is left."""

    optional: bool = False


class Choices(Node):
    """`{a, b}`"""

    items: tuple[Expr, ...]


class IndexOf(Node):
    base: Expr
    index: Expr | Range | Everything


class Condition(Node):
    """One condition of a selector. `test` is `=`, `!=`, `absent` (`!key`) or `update`."""

    key: Ident
    test: str
    value: Expr | Range | Everything | Next | Choices | None


class SelectorOf(Node):
    conditions: tuple[Condition, ...]


class Pick(Node):
    """`gpu[pp=0]`: a submesh."""

    base: Expr
    conditions: tuple[Condition, ...]


class Unary(Node):
    operator: str
    operand: Expr


class Power(Node):
    base: Expr
    exponent: Expr


class Chain(Node):
    """`first op1 x1 op2 x2 ...`, evaluated from the left; arithmetic of one precedence."""

    first: Expr
    rest: tuple[tuple[str, Expr], ...]


class Compare(Node):
    """`a < b <= c`, as in Python: every adjacent pair must hold."""

    first: Expr
    rest: tuple[tuple[str, Expr], ...]


class Logic(Node):
    """`and` / `or` over two or more operands."""

    operator: str
    operands: tuple[Expr, ...]


class Join(Node):
    """`|` / `&` over two or more selectors."""

    operator: str
    operands: tuple[Expr, ...]


class Choice(Node):
    """`then if test else other`"""

    then: Expr
    test: Expr
    other: Expr


class Overlap(Node):
    """`a & b` as a step of an order: both may overlap."""

    items: tuple[Expr, ...]


Expr: TypeAlias = (
    Literal
    | Name
    | ListOf
    | Comprehension
    | CallOf
    | Attribute
    | IndexOf
    | SelectorOf
    | Pick
    | Unary
    | Power
    | Chain
    | Compare
    | Logic
    | Join
    | Choice
)
Step: TypeAlias = Expr | Overlap

# ----------------------------------------------------------------------------------------------------- statements


class Directive(Node):
    """A statement that changes the graph. What it means is in the file of piperlang/directives/ that registers it."""


class Library(Node):
    """`std.pipeline`"""

    parts: tuple[str, ...]


class File(Node):
    """`"./common.piper"`"""

    path: str


class Imported(Node):
    name: Ident
    bound: Ident


class FromImport(Node):
    module: Library | File
    names: tuple[Imported, ...]


class ImportModule(Node):
    module: Library | File
    name: Ident


class Param(Node):
    name: Ident
    value: Expr


class Let(Node):
    names: tuple[Ident, ...]
    values: tuple[Expr, ...]


class Axis(Node):
    name: Ident
    size: Expr


class MeshOf(Directive):
    name: Ident
    axes: tuple[Axis, ...]


class Block(Node):
    _unlike: ClassVar[frozenset[str]] = frozenset({"inline"})
    statements: tuple[Statement, ...]
    inline: bool = False
    """Written after the colon on the same line."""


class Parameter(Node):
    name: Ident
    default: Expr | None


class Define(Node):
    name: Ident
    parameters: tuple[Parameter, ...]
    body: Block
    result: Steps | None
    """The one-line form `def f(x): expression`: the expression."""
    doc: str | None


class Setting(Node):
    """`key=value` of `tag` and of `with`."""

    name: Ident
    value: Expr


class Path(Node):
    """A module path: names, child indices, ranges and `*`, or its text in quotes."""

    parts: tuple[str | Expr | Range | Everything, ...]


class TagAt(Directive):
    tags: tuple[Setting, ...]
    paths: tuple[Path, ...]


class PlaceOn(Directive):
    selector: Expr
    where: Expr


class ReplicateOver(Directive):
    selector: Expr
    axes: tuple[Expr, ...]
    options: tuple[Setting, ...]


class ShardOver(Directive):
    selector: Expr
    axes: tuple[Expr, ...]
    options: tuple[Setting, ...]


class SplitInto(Directive):
    selector: Expr | None
    """None is the batch."""
    count: Expr
    name: Ident


class StreamOn(Directive):
    selector: Expr
    stream: Expr
    options: tuple[Setting, ...]


class Recompute(Directive):
    selector: Expr
    options: tuple[Setting, ...]


class Offload(Directive):
    selector: Expr
    options: tuple[Setting, ...]


class OrderBlock(Directive):
    where: Expr
    body: Block


class OrderChain(Directive):
    steps: tuple[Step, ...]


class Steps(Node):
    """Steps of an order; outside of one, a single call."""

    steps: tuple[Step, ...]


class For(Node):
    names: tuple[Ident, ...]
    iterable: Expr
    body: Block


class Repeat(Node):
    times: Expr
    body: Block


class If(Node):
    branches: tuple[tuple[Expr, Block], ...]
    otherwise: Block | None


class Return(Node):
    value: Expr | None


class Require(Node):
    test: Expr
    message: Expr


class Print(Node):
    values: tuple[Expr, ...]


Statement: TypeAlias = (
    FromImport | ImportModule | Param | Let | Define | Directive | Steps | For | Repeat | If | Return | Require | Print
)


@dataclass(frozen=True, slots=True)
class Script:
    """A parsed file. `broken` are the words of statements that did not parse: names they may have bound."""

    source: Source = field(compare=False)
    doc: str | None
    statements: tuple[Statement, ...]
    broken: frozenset[str] = field(compare=False, default=frozenset())
