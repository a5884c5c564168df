"""Activations and their gradients between chunks: communication where producer and consumer have different layouts.

Values of a microbatch move as they are. Where chunks have splits of their own, or divide the samples among different
numbers of devices, parts are concatenated to the microbatch, redistributed, and sliced again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from piperlang.build.nodes import Nodes
from piperlang.build.schedule import Schedule
from piperlang.build.sites import Site
from piperlang.core.mesh import Submesh
from piperlang.core.placement import Dispatched, dispatched
from piperlang.core.value_id import Kind, Point, ValueId
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate import directive as d
from piperlang.ir.graph import LOCAL, NodeTemplate, Value
from piperlang.ir.layout import Layout, axes_of
from piperlang.ir.model import Tensor
from piperlang.ir.redistribute import alike, exchanging, in_place, moves


class Edge(NamedTuple):
    """A value on its way from the chunk that makes it to a chunk that reads it, for all microbatches."""

    value: ValueId
    """Without a microbatch."""
    tensor: Tensor
    source: Site
    have: Layout
    target: Site
    want: Layout
    phase: str


@dataclass(eq=False)
class _Hop:
    """One operation of a route, for all microbatches."""

    op: str
    target: Layout
    templates: tuple[NodeTemplate, ...]
    number: int
    """Of the target layout."""


class Flow:
    def __init__(self, nodes: Nodes, schedule: Schedule) -> None:
        self.nodes, self.schedule = nodes, schedule
        self._routes: dict[tuple[ValueId, Layout, Layout, tuple[str, ...], tuple[str, ...]], list[_Hop]] = {}
        self._cut: dict[tuple[str, Layout, tuple[str, ...], ValueId], NodeTemplate] = {}
        self._numbers: dict[Layout, int] = {}
        self._splits: dict[tuple[str, Submesh, Point], ValueId] = {}
        """By expert indices, submesh and microbatch."""

    def fetch(self, edge: Edge, point: Point) -> tuple[ValueId, ...]:
        """The values that the target reads at `point`: one, or several whose sum it is."""
        source, target, tensor = edge.source, edge.target, edge.tensor
        if tensor.own and (
            source.dims != target.dims or source.degree != target.degree or not alike(edge.have, edge.want)
        ):
            raise self._refused(
                edge, f"{edge.value.name} depends on which samples are in a part of the batch, or on how many"
            )
        if source.dims == target.dims and (
            source.degree == target.degree or len(source.dims) == source.outer or tensor.batch is None
        ):
            return (self._move(edge, edge.value.at(point), point),)
        if tensor.batch is None:
            return self._unbatched(edge, point)
        if tensor.buried:
            raise self._refused(edge, f"the samples of {edge.value.name} are inside a dimension, not outermost")
        outer = point[: target.outer]
        moved = self._move(edge, self._join(edge, outer), outer)
        return (self._cut_for(edge, moved, point),)

    def _unbatched(self, edge: Edge, point: Point) -> tuple[ValueId, ...]:
        """Without samples every microbatch has the same value; of gradients, each microbatch has a term of the sum."""
        source, outer = edge.source, edge.target.outer
        inner = list(product(*(range(count) for count in source.counts[source.outer :])))
        if edge.phase == "F":
            inner = inner[:1]
        elif any(point[outer:]):
            return ()  # the first part takes the gradient of them all
        points = [point[:outer] + at for at in inner]
        return tuple(self._move(edge, edge.value.at(at), at) for at in points)

    # ------------------------------------------------------------------------------------------------ moving

    def _move(self, edge: Edge, have: ValueId, point: Point) -> ValueId:
        if edge.have == edge.want:
            return have
        if edge.tensor.buried and not alike(edge.have, edge.want):
            raise self._refused(edge, f"the samples of {edge.value.name} are inside a dimension, not outermost")
        value = self.nodes.values[have]
        route, as_it_is = self._route(edge), edge.source.dims == edge.target.dims
        for hop in route:
            if hop is route[-1] and as_it_is and in_place(self.nodes.values[have], hop.target):
                break
            moved = have.redistributed(hop.number)
            if moved not in self.nodes.values:  # what two readers want alike moves once
                before = self.nodes.values[have].layout.placements
                self.nodes.values[moved] = Value(edge.tensor, hop.target, value.first, value.samples, value.inner)
                self._hop_at(hop, have, moved, point, dispatched((*before, *hop.target.placements)))
            have = moved
        return have

    def _hop_at(self, hop: _Hop, have: ValueId, moved: ValueId, point: Point, routed: Dispatched | None) -> None:
        add, first = self.nodes.add, hop.templates[0]
        if routed is not None and hop.op == "all_to_all":
            where = routed.indices, hop.target.where, point
            if have.kind is Kind.ACTIVATION and have.name == routed.indices:
                self._splits[where] = moved.splits
                add(first, point, ((have,),), (moved, moved.splits))
            else:
                add(first, point, ((have,), (self._splits[where],)), (moved,))
        elif len(hop.templates) == 2:
            add(first, point, ((have,),), (moved.sent,))
            self.nodes.values[moved.sent] = self.nodes.values[moved]
            add(hop.templates[1], point, ((moved.sent,),), (moved,))
        else:
            add(first, point, ((have,),), (moved,))

    def _route(self, edge: Edge) -> list[_Hop]:
        shared = (edge.value, edge.have, edge.want, edge.source.dims, edge.target.dims)
        if shared not in self._routes:
            hops, now = [], edge.have
            for op, then in moves(edge.have, edge.want):
                hops.append(self._hop(op, now, then, edge.source, edge.target, edge.phase))
                now = then
            self._routes[shared] = hops
        return self._routes[shared]

    def _hop(self, op: str, now: Layout, then: Layout, source: Site, target: Site, phase: str) -> _Hop:
        number = self._numbers.setdefault(then, len(self._numbers))
        dims = (
            target.dims[: target.outer] if source.dims != target.dims or source.degree != target.degree else target.dims
        )
        if op == "p2p":
            send = self.nodes.template(
                NodeTemplate("send", source.chunk.tags, now.where, dims, phase=phase, by=source.by)
            )
            recv = self.nodes.template(
                NodeTemplate("recv", target.chunk.tags, then.where, dims, phase=phase, by=target.by)
            )
            return _Hop(op, then, (send, recv), number)
        if now.where != then.where:
            # Of the two chunks, the one that divides its weights is why there are two views of the devices.
            owner = target if target.divides or not source.divides else source
            template = NodeTemplate(
                op, owner.chunk.tags, now.where, dims, phase=phase, by=owner.by, beyond=(then.where,)
            )
            return _Hop(op, then, (self.nodes.template(template),), number)
        axes = exchanging(now, then)
        # Communication within a part belongs to the chunk whose weights are divided: it is why there is any.
        owner = next((site for site in (target, source) if any(divide.axis in axes for divide in site.divides)), target)
        use = next((owner.uses[axis] for axis in axes if axis in owner.uses), None)
        template = NodeTemplate(
            op,
            owner.chunk.tags,
            now.where,
            dims,
            phase=phase,
            axes=() if op in LOCAL else axes,
            by=use.directive if use else None,
        )
        return _Hop(op, then, (self.nodes.template(template),), number)

    # ------------------------------------------------------------------------------------- splits of chunks alone

    def _join(self, edge: Edge, point: Point) -> ValueId:
        source, value = edge.source, edge.value
        if len(source.dims) == source.outer:
            return value.at(point)
        joined = value.at(point).joined
        if joined not in self.nodes.values:
            inner = product(*(range(count) for count in source.counts[source.outer :]))
            parts = tuple(value.at(point + at) for at in inner)
            template = self._local("concat", source, edge.have, source.dims[: source.outer], edge)
            self.nodes.values[joined] = Value(edge.tensor, edge.have, source.first(point), source.samples)
            self.nodes.add(template, point, (parts,), (joined,))
        return joined

    def _cut_for(self, edge: Edge, whole: ValueId, point: Point) -> ValueId:
        target = edge.target
        if len(target.dims) == target.outer:
            return whole
        part = whole.sliced(point[target.outer :])
        if part not in self.nodes.values:
            template = self._local("slice", target, edge.want, target.dims, edge)
            first, inner = target.first(point), target.inner(point)
            self.nodes.values[part] = Value(edge.tensor, edge.want, first, target.samples, inner)
            self.nodes.add(template, point, ((whole,),), (part,))
        return part

    def _local(self, op: str, site: Site, layout: Layout, dims: tuple[str, ...], edge: Edge) -> NodeTemplate:
        known = (op, layout, dims, edge.value)
        if known not in self._cut:
            self._cut[known] = self.nodes.template(
                NodeTemplate(op, site.chunk.tags, layout.where, dims, phase=edge.phase)
            )
        return self._cut[known]

    def _refused(self, edge: Edge, why: str) -> PiperError:
        """Concatenating or slicing its dimension would mix parts of different samples."""
        source, target = edge.source, edge.target
        splits = [split for site in (target, source) for split in self.schedule.splits(site.group)[site.outer :]]
        by = splits[0] if splits and source.dims != target.dims else _placed(target) or _placed(source)
        repair = (
            "compute all terms of the loss in the same chunk"
            if edge.tensor.own
            else ("keep the batch in the first dimension where the model is cut")
        )
        return error(
            "P0411",
            f"{edge.value.name}, which {target.chunk} reads from {source.chunk}, cannot be redistributed",
            by.span if by else None,
            "asks for it",
            notes=[why, f"in the model: {', '.join(target.chunk.modules[:3])}"],
            help=f"divide the batch alike in both chunks, or {repair}",
        )


def _placed(site: Site) -> d.Directive | None:
    return next((use.directive for axis, _ in axes_of(site.where) if (use := site.uses.get(axis))), None)
