"""The global training DAG: compute, communication and updates of one step, as nodes over parts of a mesh.

A node is SPMD over its submesh, so the graph does not grow with the number of replicas. Nodes that differ only in their
microbatch share a template, which holds all that is the same; selecting looks at templates first, so it costs what it
finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from piperlang.core.mesh import Submesh
from piperlang.core.placement import Placement
from piperlang.core.selector import Condition, Conjunction, Selector, TagValue
from piperlang.core.streams import StreamResources
from piperlang.core.value_id import Kind, ValueId
from piperlang.elaborate.directive import Directive, Step
from piperlang.ir.layout import Layout
from piperlang.ir.model import Model, Sharding, Slot, Tensor

COMPUTE = ("F", "B", "I", "W", "R")
"""Passes of a chunk; R is a forward again, for the activations of a backward."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
LOCAL = ("slice", "concat", "share", "offload", "fetch")
"""What moves data without another device."""


class WeightLayout(NamedTuple):
    """How a weight, or its gradient, is sharded on a submesh: in dims along some axes, and flat along others (ZeRO)."""

    weight: str
    where: Submesh
    placements: tuple[Placement, ...]
    flat: tuple[str, ...]
    """Axes along which what each device would have is divided again, as a flat buffer; outermost first."""
    owners: tuple[tuple[str, int], ...] = ()
    """Of those axes, the ones along which one device has all of it: its coordinate."""


class Value(NamedTuple):
    """A tensor of the graph: its global shape, its layout, and which samples it is of."""

    tensor: Tensor
    layout: Layout
    first: int
    samples: int
    inner: tuple[tuple[int, int], ...] = ()
    """Nested splits: which part of how many, of what each device has."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeTemplate:
    """What nodes of all microbatches share."""

    op: str
    tags: Mapping[str, TagValue]
    where: Submesh
    dims: tuple[str, ...] = ()
    """The splits that number its nodes."""
    chunk: int | None = None
    phase: str | None = None
    """The pass it is, or serves."""
    slots: tuple[Slot, ...] = ()
    """For compute: what stands behind each of a node's reads."""
    outputs: tuple[Slot, ...] = ()
    samples: int = 0
    """For compute: how many each device has of a microbatch."""
    sharding: Sharding = ((), ())
    """For compute: the axes that shard its weights, and the placements of its inputs along them."""
    layout: Layout | None = None
    """For compute: the layout of samples on its devices."""
    axes: tuple[str, ...] = ()
    """For communication within a submesh: the axes along which devices communicate."""
    by: Directive | None = None
    """The directive that asked for it."""
    beyond: tuple[Submesh, ...] = ()
    """Further submeshes that take part, where a weight has replicas on several."""
    also: tuple[Mapping[str, TagValue], ...] = ()
    """Tags of further chunks, where it is for the weights of several: a selector that names one of them names it."""
    points: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Its nodes."""

    @property
    def every(self) -> tuple[Mapping[str, TagValue], ...]:
        """The tags of each of its chunks."""
        return (self.tags, *self.also)

    @property
    def shared(self) -> dict[str, TagValue]:
        """The tags that all of its chunks have."""
        return {key: value for key, value in self.tags.items() if all(tags.get(key) == value for tags in self.also)}

    @property
    def communicates(self) -> bool:
        return self.op in COLLECTIVES or self.op in ("send", "recv")

    def attributes(self) -> dict[str, TagValue]:
        return self.shared | self.kind

    @property
    def kind(self) -> dict[str, TagValue]:
        """What selectors may ask of it besides tags and microbatches."""
        found: dict[str, TagValue] = {}
        if self.phase is not None:
            found["pass"] = self.phase
        if self.communicates:
            found["comm"] = self.op
        if self.op == "update":
            found["update"] = True
        return found


class Node(NamedTuple):
    id: int
    template: NodeTemplate
    point: tuple[int, ...]
    reads: tuple[tuple[ValueId, ...], ...]
    """Where one entry has several keys they are parts: of a sum for gradients, of a whole for data."""
    writes: tuple[ValueId, ...]
    stream: str

    @property
    def op(self) -> str:
        return self.template.op

    @property
    def splits(self) -> ValueId | None:
        """For an exchange of routed tokens: the counts that it follows, or, for the expert indices, makes."""
        return next((one for one in (*self.writes, *chain(*self.reads[1:2])) if one.kind is Kind.SPLITS), None)

    @property
    def name(self) -> str:
        """`send.F[stage=0, mb=1]`: what it is, of what."""
        template = self.template
        words = [
            f"{key}={_values(key, template.every)}" for key in sorted({key for tags in template.every for key in tags})
        ]
        words += [f"{name}={at}" for name, at in zip(template.dims, self.point, strict=False)]
        phase = f".{template.phase}" if template.phase and template.phase != template.op else ""
        return f"{template.op}{phase}[{', '.join(words)}]"

    def attributes(self) -> dict[str, TagValue]:
        return self.template.attributes() | dict(zip(self.template.dims, self.point, strict=False))

    def __str__(self) -> str:
        return f"{self.name} on {self.template.where}"


def _values(key: str, every: Sequence[Mapping[str, TagValue]]) -> str:
    """The values of a tag, as a selector names them."""
    found = sorted({tags[key] for tags in every if key in tags}, key=lambda value: (isinstance(value, str), value))
    first, last = found[0], found[-1]
    if len(found) == 1:
        return str(first)
    if isinstance(first, int) and isinstance(last, int) and last - first == len(found) - 1:
        return f"{first}:{last + 1}"
    return f"{{{', '.join(map(str, found))}}}"


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
    templates: Sequence[NodeTemplate]
    values: Mapping[ValueId, Value]
    held: Mapping[ValueId, WeightLayout]
    made: Mapping[ValueId, int]
    after: Mapping[int, Sequence[int]]
    """Temporal edges that passes ask for: node -> nodes before it."""
    orders: Sequence[Steps]
    directives: Sequence[Directive] = ()
    losses: Sequence[ValueId] = ()
    next: Mapping[ValueId, ValueId] = field(default_factory=dict)
    """What each weight's key is called once it has been updated."""
    chains: Sequence[Steps] = ()
    """`order A -> B`, whose edges are in `after`; here for whoever has to say which line asked for them."""
    streams: Mapping[str, StreamResources] = field(default_factory=dict)
    """Those that a script gives resources."""

    def select(self, selector: Selector) -> Iterator[Node]:
        """The nodes that match, in the order of the graph's templates; costs the number of templates and of nodes
        found."""
        seen: set[int] = set()
        for conjunction in selector.alternatives:
            for template in self.templates:
                if not fits(template, conjunction):
                    continue
                for number in among(template, conjunction):
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


def fits(template: NodeTemplate, conjunction: Conjunction) -> bool:
    """Whether nodes of a template can match, as far as its microbatches do not matter.

    Communication and updates are meant only where they are named: `[pass=F]` is compute."""
    named = {c.key for c in conjunction}
    if ("comm" in named) != template.communicates or ("update" in named) != (template.op == "update"):
        return False
    if template.op in LOCAL or template.op == "R":
        return False
    conditions, kind = [c for c in conjunction if c.key not in template.dims], template.kind
    return any(all(_holds(c, {**tags, **kind}) for c in conditions) for tags in template.every)


def _holds(condition: Condition, attributes: Mapping[str, TagValue]) -> bool:
    if condition.key == "comm" and "p2p" in condition.values:
        values = (*(v for v in condition.values if v != "p2p"), "send", "recv")
        condition = Condition("comm", condition.test, values)
    return condition.holds(attributes)


def among(template: NodeTemplate, conjunction: Conjunction) -> Iterable[int]:
    """The nodes of a template whose microbatches match."""
    conditions = [
        (template.dims.index(c.key), c)
        for c in conjunction
        if c.key in template.dims and c.test not in ("next", "next?", "present")
    ]
    if not conditions:
        return template.points.values()
    if len(conditions) == len(template.dims) and all(c.test == "in" and len(c.values) == 1 for _, c in conditions):
        at = {i: c.values[0] for i, c in conditions}
        exact = template.points.get(tuple(int(at.get(i, -1)) for i in range(len(template.dims))))
        return () if exact is None else (exact,)
    return [
        number for point, number in template.points.items() if all(c.holds({c.key: point[i]}) for i, c in conditions)
    ]
