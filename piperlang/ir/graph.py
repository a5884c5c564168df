"""The global training DAG: compute, communication and updates of one step, as nodes over parts of a mesh.

A node is SPMD over its part, so the graph does not grow with the number of replicas. Nodes that differ only in their
microbatch share a Family, which holds all that is the same; selecting looks at families first, so it costs what it
finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from piperlang.elaborate.directive import Directive, Step
from piperlang.elaborate.selector import Condition, Conjunction, Selector, TagValue
from piperlang.elaborate.values import Slice
from piperlang.ir.layout import Layout
from piperlang.ir.model import Arrangement, Model, Place, Slot, Tensor

Key: TypeAlias = str
"""Names a value: what it is, and of which microbatch."""

COMPUTE = ("F", "B", "I", "W", "R")
"""Passes of a chunk; R is a forward again, for the activations of a backward."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
WAY = "!way"
"""Ends the key of the way that rows go to their experts: which go where, and how many come from where."""
LOCAL = ("slice", "concat", "share", "offload", "fetch")
"""What moves data without another device."""


class Held(NamedTuple):
    """How a weight, or its gradient, lies on a part: divided in dims along some axes, and flat along others (ZeRO)."""

    weight: str
    where: Slice
    places: tuple[Place, ...]
    flat: tuple[str, ...]
    """Axes along which what each device would have is divided again, as a flat buffer; outermost first."""


class Value(NamedTuple):
    """A tensor of the graph: its global shape, where it lies and how, and which samples it is of."""

    tensor: Tensor
    layout: Layout
    first: int
    samples: int
    inner: tuple[tuple[int, int], ...] = ()
    """Nested splits: which part of how many, of what each device has."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """What nodes of all microbatches share."""

    op: str
    tags: Mapping[str, TagValue]
    where: Slice
    dims: tuple[str, ...] = ()
    """The splits that number its nodes."""
    chunk: int | None = None
    phase: str | None = None
    """The pass it is, or serves."""
    slots: tuple[Slot, ...] = ()
    """For compute: what stands behind each of a node's reads."""
    gives: tuple[Slot, ...] = ()
    samples: int = 0
    """For compute: how many each device has of a piece."""
    arranged: Arrangement = ((), ())
    """For compute: the axes that divide its weights, and how its inputs arrive along them."""
    layout: Layout | None = None
    """For compute: how samples lie on its devices."""
    axes: tuple[str, ...] = ()
    """For communication within a part: the axes along which devices talk."""
    by: Directive | None = None
    """The directive that asked for it."""
    beyond: tuple[Slice, ...] = ()
    """Further parts that take part, where a weight is kept in several."""
    points: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Its nodes."""

    @property
    def communicates(self) -> bool:
        return self.op in COLLECTIVES or self.op in ("send", "recv")

    def attributes(self) -> dict[str, TagValue]:
        found = dict(self.tags)
        if self.phase is not None:
            found["pass"] = self.phase
        if self.communicates:
            found["comm"] = self.op
        if self.op == "update":
            found["update"] = True
        return found


class Node(NamedTuple):
    id: int
    family: Family
    point: tuple[int, ...]
    reads: tuple[tuple[Key, ...], ...]
    """Where one entry has several keys they are parts: of a sum for gradients, of a whole for data."""
    writes: tuple[Key, ...]
    stream: str

    @property
    def op(self) -> str:
        return self.family.op

    @property
    def routes(self) -> str | None:
        """What an exchange of rows with their experts is: `choose` for the choice itself, which finds the way; `route`
        for what follows it there and back."""
        if any(key.endswith(WAY) for key in self.writes):
            return "choose"
        return "route" if len(self.reads) == 2 and self.reads[1] and self.reads[1][0].endswith(WAY) else None

    @property
    def name(self) -> str:
        """`send.F[stage=0, mb=1]`: what it is, of what."""
        family = self.family
        words = [f"{key}={value}" for key, value in sorted(family.tags.items())]
        words += [f"{name}={at}" for name, at in zip(family.dims, self.point, strict=False)]
        return (
            f"{family.op}{'.' + family.phase if family.phase and family.phase != family.op else ''}[{', '.join(words)}]"
        )

    def __str__(self) -> str:
        return f"{self.name} on {self.family.where}"


@dataclass(frozen=True)
class Steps:
    """The order on some devices, or of a chain on none: groups of nodes, each after the one before; and who wrote
    each."""

    devices: frozenset[int]
    groups: Sequence[Sequence[int]]
    written: Sequence[Step]

    def fences(self, stream: Callable[[int], str]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Who is before whom: a step after all of the step before.

        A step with `&` may run into the next step with `&`, but not past it: between those only work on the compute
        stream keeps the order, the rest is after all of the step before that. Without this a pair of forward and
        backward would drain every stream before the next pair fills them again."""
        before: Sequence[int] = ()
        last: Sequence[int] = ()
        overlapped = False
        for group, step in zip(self.groups, self.written, strict=True):
            if overlapped and len(step.items) > 1:
                yield before, group
                yield (
                    [node for node in last if stream(node) == "compute"],
                    [node for node in group if stream(node) == "compute"],
                )
            else:
                yield [*before, *last], group
            overlapped = len(step.items) > 1
            before, last = (last, group) if overlapped else ((), group)


@dataclass(frozen=True)
class Graph:
    model: Model
    nodes: Sequence[Node]
    families: Sequence[Family]
    values: Mapping[Key, Value]
    held: Mapping[Key, Held]
    made: Mapping[Key, int]
    after: Mapping[int, Sequence[int]]
    """Temporal edges that passes ask for: node -> nodes before it."""
    orders: Sequence[Steps]
    directives: Sequence[Directive] = ()
    losses: Sequence[Key] = ()
    next: Mapping[Key, Key] = field(default_factory=dict)
    """What each weight's key is called once it has been updated."""
    chains: Sequence[Steps] = ()
    """`order A -> B`, whose edges are in `after`; here for whoever has to say which line asked for them."""

    def select(self, selector: Selector) -> Iterator[Node]:
        """The nodes that match, in the order of the graph's families; costs the number of families and of nodes
        found."""
        seen: set[int] = set()
        for conjunction in selector.alternatives:
            for family in self.families:
                if not fits(family, conjunction):
                    continue
                for number in among(family, conjunction):
                    if number not in seen:
                        seen.add(number)
                        yield self.nodes[number]

    def sources(self, node: Node) -> Iterator[int]:
        """Nodes that make what it reads."""
        for keys in node.reads:
            for key in keys:
                maker = self.made.get(key)
                if maker is not None:
                    yield maker


def fits(family: Family, conjunction: Conjunction) -> bool:
    """Whether nodes of a family can match, as far as its microbatches do not matter.

    Communication and updates are meant only where they are named: `[pass=F]` is compute."""
    named = {c.key for c in conjunction}
    if ("comm" in named) != family.communicates or ("update" in named) != (family.op == "update"):
        return False
    if family.op in LOCAL or family.op == "R":
        return False
    attributes = family.attributes()
    return all(_holds(c, attributes) for c in conjunction if c.key not in family.dims)


def _holds(condition: Condition, attributes: Mapping[str, TagValue]) -> bool:
    if condition.key == "comm" and "p2p" in condition.values:
        values = (*(v for v in condition.values if v != "p2p"), "send", "recv")
        condition = Condition("comm", condition.test, values)
    return condition.holds(attributes)


def among(family: Family, conjunction: Conjunction) -> Iterable[int]:
    """The nodes of a family whose microbatches match."""
    conditions = [
        (family.dims.index(c.key), c)
        for c in conjunction
        if c.key in family.dims and c.test not in ("next", "next?", "present")
    ]
    if not conditions:
        return family.points.values()
    if len(conditions) == len(family.dims) and all(c.test == "in" and len(c.values) == 1 for _, c in conditions):
        at = {i: c.values[0] for i, c in conditions}
        exact = family.points.get(tuple(int(at.get(i, -1)) for i in range(len(family.dims))))
        return () if exact is None else (exact,)
    return [number for point, number in family.points.items() if all(c.holds({c.key: point[i]}) for i, c in conditions)]
