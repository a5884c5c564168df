"""Collectives of parameters and gradients, and updates: which part of a weight each device contributes and gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from piperlang.core.value_id import ValueId
from piperlang.diagnostics import error
from piperlang.ir.graph import Graph, Node, WeightLayout
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import coordinates, dividing, in_pieces, interval, local_shape
from piperlang.plan.estimate.machine import HALF
from piperlang.plan.instructions import (
    GatherParameters,
    Interval,
    ParameterUpdate,
    ReduceGradients,
    ScatterGradients,
    Shards,
    Update,
)
from piperlang.plan.lower.emit import Emitter

COLLECTIVES = {"all_gather": GatherParameters, "reduce_scatter": ScatterGradients, "all_reduce": ReduceGradients}
Position = Mapping[str, int]
"""A coordinate along each axis of a submesh."""


class Parameters:
    def __init__(self, graph: Graph, emitter: Emitter) -> None:
        self.graph, self.emitter = graph, emitter
        self.wide: set[ValueId] = set()
        """What was reduced of gradients in float32, of weights in half precision."""

    def collective(self, node: Node) -> None:
        if node.template.beyond:
            self._across_replicas(node)
            return
        axes, where = node.template.axes, node.template.where
        positions = dict(zip(devices_of(where), coordinates(where), strict=True))
        for members, _ in self.emitter.along(where, axes):
            finer = self.graph.held[node.writes[0] if node.op != "all_gather" else node.reads[0][0]]
            rank = [axis for axis in finer.flat if axis in axes]
            ordered = sorted(members, key=lambda device: [positions[device][axis] for axis in rank] or [0])
            group = self.emitter.group(ordered, node.stream)
            dtype = self._dtype(node)
            for device in (one for one in ordered if one in self.emitter.devices):
                shards = tuple(
                    self._shards(keys, target, ordered, positions, device)
                    for keys, target in zip(node.reads, node.writes, strict=True)
                )
                self.emitter.emit(device, node, COLLECTIVES[node.op], group=group, shards=shards, dtype=dtype)

    def _dtype(self, node: Node) -> str:
        """Gradients in half precision are added up in float32, and reduced so."""
        dtype = self.graph.model.weights[self.graph.held[node.writes[0]].weight].dtype
        if dtype not in HALF or all(len(keys) == 1 and keys[0] not in self.wide for keys in node.reads):
            return dtype
        self.wide.update(node.writes)
        return "float32"

    def _shards(
        self,
        keys: Sequence[ValueId],
        target: ValueId,
        members: Sequence[int],
        positions: Mapping[int, Position],
        device: int,
    ) -> Shards:
        have, want = self.graph.held[keys[0]], self.graph.held[target]
        shape = self.graph.model.weights[have.weight].shape
        finer = have if len(have.flat) > len(want.flat) else want
        coarse = want if finer is have else have
        start, end = interval(coarse, shape, positions[device])
        cuts = tuple(_shifted(interval(finer, shape, positions[member]), start) for member in members)
        whole = local_shape(have, shape, positions[device])
        return Shards(tuple(keys), target, cuts, (end - start,) if coarse.flat else whole)

    def _across_replicas(self, node: Node) -> None:
        """Submeshes that keep the same weight: all devices with the same part of it, each counting for its share of its
        replica."""
        wheres = (node.template.where, *node.template.beyond)
        count = len(wheres)
        held = [self.graph.held[key] for key in node.writes[:count]]
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for home, (one, where) in enumerate(zip(held, wheres, strict=True)):
            for device, at in zip(devices_of(where), coordinates(where), strict=True):
                groups.setdefault(tuple(at[axis] for axis in dividing(one)), []).append((home, device))
        for members in groups.values():
            if len({device for _, device in members}) < len(members):
                raise error(
                    "P0414",
                    f"weight {held[0].weight} would be kept twice on one device",
                    notes=[f"on {wheres[0]} and on {wheres[1]}"],
                    help="place both ends of tied weights on the same devices, or on different ones",
                )
            group = self.emitter.group([device for _, device in members], node.stream)
            dtype = self._dtype(node)
            for home, device in members:
                if device not in self.emitter.devices:
                    continue
                alike = sum(1 for other, _ in members if other == home)
                at = coordinates(wheres[home])[devices_of(wheres[home]).index(device)]
                shards = tuple(
                    self._whole(node.reads[w * count + home], node.writes[w * count + home], at)
                    for w in range(len(node.writes) // count)
                )
                self.emitter.emit(
                    device, node, ReduceGradients, group=group, shards=shards, dtype=dtype, share=1 / alike
                )

    def _whole(self, keys: Sequence[ValueId], target: ValueId, at: Position) -> Shards:
        held = self.graph.held[target]
        shape = self.graph.model.weights[held.weight].shape
        low, high = interval(held, shape, at)
        return Shards(tuple(keys), target, (), (high - low,) if held.flat else local_shape(held, shape, at))

    def update(self, node: Node) -> None:
        where = node.template.where
        for k, device in self.emitter.among(where):
            at = coordinates(where)[k]
            parameters = []
            for w, new in enumerate(node.writes):
                (old,), gradients = node.reads[2 * w], node.reads[2 * w + 1]
                have, want, gradient = self.graph.held[old], self.graph.held[new], self.graph.held[gradients[0]]
                parameters.append(
                    ParameterUpdate(
                        have.weight,
                        old,
                        tuple(gradients),
                        new,
                        self._part(have, want, at),
                        self._part(gradient, want, at),
                        in_pieces(want),
                    )
                )
            self.emitter.emit(device, node, Update, parameters=tuple(parameters))

    def _part(self, have: WeightLayout, want: WeightLayout, at: Position) -> Interval | None:
        """Of what a device has, the interval that an update of its part needs; None for all of it."""
        if have.flat == want.flat:
            return None
        shape = self.graph.model.weights[have.weight].shape
        return _shifted(interval(want, shape, at), interval(have, shape, at)[0])


def _shifted(one: Interval, start: int) -> Interval:
    return one[0] - start, one[1] - start
