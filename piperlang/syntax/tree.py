"""The syntax tree: frozen, spanned, and equal when it means the same (spans do not count in comparison).

Chains of one precedence level (`a + b - c`) are one flat node, so that a long line is not a deep tree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from piperlang.source import Source, Span


@dataclass(frozen=True, slots=True)
class Node:
    span: Span = field(compare=False, repr=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Ident(Node):
    """A word where it is bound or names a part: `x` in `let x = 1`, `dp` in `gpu.dp`."""

    text: str


# ---------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, as in `25MB`; keeps its unit out of integer arithmetic."""

    bytes: int

    def __str__(self) -> str:
        for unit, factor in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("KB", 10**3)):
            if self.bytes and self.bytes % factor == 0:
                return f"{self.bytes // factor}{unit}"
        return f"{self.bytes}B"


@dataclass(frozen=True, slots=True)
class Literal(Node):
    value: int | float | bool | str | Size


@dataclass(frozen=True, slots=True)
class Name(Node):
    text: str


@dataclass(frozen=True, slots=True)
class ListOf(Node):
    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Each(Node):
    """`for names in iterable` of a comprehension."""

    names: tuple[Ident, ...]
    iterable: Expr


@dataclass(frozen=True, slots=True)
class Given(Node):
    """`if test` of a comprehension."""

    test: Expr


@dataclass(frozen=True, slots=True)
class Comprehension(Node):
    element: Expr
    clauses: tuple[Each | Given, ...]


@dataclass(frozen=True, slots=True)
class Argument(Node):
    name: Ident | None
    value: Expr


@dataclass(frozen=True, slots=True)
class CallOf(Node):
    function: Expr
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Attribute(Node):
    base: Expr
    name: Ident


@dataclass(frozen=True, slots=True)
class Range(Node):
    """`low:high`, either side open."""

    low: Expr | None
    high: Expr | None


@dataclass(frozen=True, slots=True)
class Everything(Node):
    """`*`"""


@dataclass(frozen=True, slots=True)
class Next(Node):
    """`next`: the lowest one not yet ordered there; `next?` the same, or nothing when none is left."""

    optional: bool = False


@dataclass(frozen=True, slots=True)
class Choices(Node):
    """`{a, b}`"""

    items: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class IndexOf(Node):
    base: Expr
    index: Expr | Range | Everything


@dataclass(frozen=True, slots=True)
class Condition(Node):
    """One condition of a selector. `test` is `=`, `!=`, `absent` (`!key`) or `update`."""

    key: Ident
    test: str
    value: Expr | Range | Everything | Next | Choices | None


@dataclass(frozen=True, slots=True)
class SelectorOf(Node):
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Pick(Node):
    """`gpu[pp=0]`: a part of a mesh."""

    base: Expr
    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Unary(Node):
    operator: str
    operand: Expr


@dataclass(frozen=True, slots=True)
class Power(Node):
    base: Expr
    exponent: Expr


@dataclass(frozen=True, slots=True)
class Chain(Node):
    """`first op1 x1 op2 x2 ...`, evaluated from the left; arithmetic of one precedence."""

    first: Expr
    rest: tuple[tuple[str, Expr], ...]


@dataclass(frozen=True, slots=True)
class Compare(Node):
    """`a < b <= c`, as in Python: every neighbouring pair must hold."""

    first: Expr
    rest: tuple[tuple[str, Expr], ...]


@dataclass(frozen=True, slots=True)
class Logic(Node):
    """`and` / `or` over two or more operands."""

    operator: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Join(Node):
    """`|` / `&` over two or more selectors."""

    operator: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Choice(Node):
    """`then if test else other`"""

    then: Expr
    test: Expr
    other: Expr


@dataclass(frozen=True, slots=True)
class Overlap(Node):
    """`a & b` as a step of an order: what may run side by side."""

    items: tuple[Expr, ...]


Expr: TypeAlias = (
    Literal | Name | ListOf | Comprehension | CallOf | Attribute | IndexOf | SelectorOf | Pick | Unary | Power
    | Chain | Compare | Logic | Join | Choice
)  # fmt: skip
Step: TypeAlias = Expr | Overlap

# ----------------------------------------------------------------------------------------------------- statements


@dataclass(frozen=True, slots=True)
class Library(Node):
    """`std.pipeline`"""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class File(Node):
    """`"./common.piper"`"""

    path: str


@dataclass(frozen=True, slots=True)
class Imported(Node):
    name: Ident
    bound: Ident


@dataclass(frozen=True, slots=True)
class FromImport(Node):
    module: Library | File
    names: tuple[Imported, ...]


@dataclass(frozen=True, slots=True)
class ImportModule(Node):
    module: Library | File
    name: Ident


@dataclass(frozen=True, slots=True)
class Param(Node):
    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True)
class Let(Node):
    names: tuple[Ident, ...]
    values: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Axis(Node):
    name: Ident
    size: Expr


@dataclass(frozen=True, slots=True)
class MeshOf(Node):
    name: Ident
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class Block(Node):
    statements: tuple[Statement, ...]
    inline: bool = field(compare=False, default=False)
    """Written after the colon on the same line."""


@dataclass(frozen=True, slots=True)
class Parameter(Node):
    name: Ident
    default: Expr | None


@dataclass(frozen=True, slots=True)
class Define(Node):
    name: Ident
    parameters: tuple[Parameter, ...]
    body: Block
    result: Steps | None
    """The one-line form `def f(x): expression`: what a call of it means."""
    doc: str | None


@dataclass(frozen=True, slots=True)
class Setting(Node):
    """`key=value` of `tag` and of `with`."""

    name: Ident
    value: Expr


@dataclass(frozen=True, slots=True)
class Path(Node):
    """A module path: names, child indices, ranges and `*`, or its text in quotes."""

    parts: tuple[str | Expr | Range | Everything, ...]


@dataclass(frozen=True, slots=True)
class TagAt(Node):
    tags: tuple[Setting, ...]
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class PlaceOn(Node):
    selector: Expr
    where: Expr


@dataclass(frozen=True, slots=True)
class Across(Node):
    """`replicate` or `shard` SELECTOR over AXES with OPTIONS."""

    kind: str
    selector: Expr
    axes: tuple[Expr, ...]
    options: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class SplitInto(Node):
    selector: Expr | None
    """None is the batch."""
    count: Expr
    name: Ident


@dataclass(frozen=True, slots=True)
class StreamOn(Node):
    selector: Expr
    stream: Expr


@dataclass(frozen=True, slots=True)
class Trade(Node):
    """`recompute` or `offload` SELECTOR with OPTIONS."""

    kind: str
    selector: Expr
    options: tuple[Setting, ...]


@dataclass(frozen=True, slots=True)
class OrderBlock(Node):
    where: Expr
    body: Block


@dataclass(frozen=True, slots=True)
class OrderChain(Node):
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Steps(Node):
    """Steps of an order; outside of one, a single call."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class For(Node):
    names: tuple[Ident, ...]
    iterable: Expr
    body: Block


@dataclass(frozen=True, slots=True)
class Repeat(Node):
    times: Expr
    body: Block


@dataclass(frozen=True, slots=True)
class If(Node):
    branches: tuple[tuple[Expr, Block], ...]
    otherwise: Block | None


@dataclass(frozen=True, slots=True)
class Return(Node):
    value: Expr | None


@dataclass(frozen=True, slots=True)
class Require(Node):
    test: Expr
    message: Expr


@dataclass(frozen=True, slots=True)
class Print(Node):
    values: tuple[Expr, ...]


Statement: TypeAlias = (
    FromImport | ImportModule | Param | Let | MeshOf | Define | TagAt | PlaceOn | Across | SplitInto | StreamOn
    | Trade | OrderBlock | OrderChain | Steps | For | Repeat | If | Return | Require | Print
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """A parsed file. `broken` are the words of statements that did not parse: names they may have bound."""

    source: Source = field(compare=False)
    doc: str | None
    statements: tuple[Statement, ...]
    broken: frozenset[str] = field(compare=False, default=frozenset())
