"""Weights in the graph: their replicas and shards, and all-gathers before use where they are sharded.

Their gradients are in gradients.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from piperlang.build.keep import Run, Runs
from piperlang.build.nodes import Nodes
from piperlang.build.sites import Site, Sites
from piperlang.core.mesh import Submesh
from piperlang.core.placement import PARTIAL, REPLICATE, Placement
from piperlang.core.value_id import Kind, Point, ValueId
from piperlang.diagnostics import Label, PiperError, error
from piperlang.ir.graph import NodeTemplate, Steps, WeightLayout
from piperlang.ir.layout import axes_of
from piperlang.ir.model import Change, Model


@dataclass(eq=False)
class Replica:
    """A weight on one submesh, shared by the chunks there."""

    weight: str
    site: Site
    """The first chunk there that reads it."""
    placements: tuple[Placement, ...]
    summed: tuple[str, ...]
    """Axes along which gradients have to be added up."""
    levels: dict[str, int]
    owners: dict[str, int]
    """Along axes that give every weight to one device: the coordinate of that device."""
    number: int
    gradients: list[ValueId] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)

    @property
    def where(self) -> Submesh:
        return self.site.where

    def __post_init__(self) -> None:
        self.key = ValueId(Kind.WEIGHT, self.weight, (self.number,))
        self.in_parts = bool(self.flat(3))

    def flat(self, level: int) -> tuple[str, ...]:
        """Axes that divide what belongs to a level of ZeRO; deeper levels outermost, so that parts of parts are
        contiguous."""
        axes = [axis for axis, has in self.levels.items() if has >= level]
        return tuple(sorted(axes, key=lambda axis: -self.levels[axis]))

    def held(self, level: int) -> WeightLayout:
        return self.divided(self.flat(level))

    def divided(self, flat: tuple[str, ...]) -> WeightLayout:
        """The weight, or its gradient, divided along these axes."""
        owners = tuple((axis, self.owners[axis]) for axis in flat if axis in self.owners)
        return WeightLayout(self.weight, self.where, self.placements, flat, owners)


@dataclass(eq=False)
class _Gather:
    node: int
    site: Site
    readers: list[int] = field(default_factory=list)

    @property
    def distance(self) -> int:
        return 1 + max((use.prefetch for use in self.site.uses.values() if use.level == 3), default=1)


class Weights:
    def __init__(self, model: Model, sites: Sites, nodes: Nodes) -> None:
        self.model, self.sites, self.nodes = model, sites, nodes
        self.replicas: dict[tuple[str, Submesh], Replica] = {}
        self.counts: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._loads: dict[Submesh, Counter[int]] = {}
        """Bytes of the weights that belong to each of the devices among which they are shared."""
        self._templates: dict[tuple[int, Submesh, str], NodeTemplate] = {}
        self.gathers: dict[Run, _Gather] = {}
        self.changing = {chunk.weights[change.weight] for chunk in model.chunks for change in chunk.changes}
        """Buffers that the model changes."""
        self.changes: dict[ValueId, ValueId] = {}
        """What each of them is called once it has changed."""
        for chunk in model.chunks:
            for site in sites.of[chunk.number]:
                for i, name in enumerate(chunk.weights):
                    self._settle(site, i, name)
        self.runs = Runs(sites.schedule, sites)

    def _settle(self, site: Site, i: int, name: str) -> None:
        places = site.layouts["weight", i].placements
        axes = axes_of(site.where)
        trained = self.model.weights[name].trained
        grads = site.layouts["grad_weight", i].placements
        summed = tuple(axis for (axis, _), place in zip(axes, grads, strict=True) if place is PARTIAL and trained)
        # ZeRO shards parameters. A buffer may change in training and not in evaluation, which both keep it alike.
        buffer = self.model.weights[name].buffer
        levels = {axis: use.level for axis, use in site.uses.items() if use.level and not buffer}
        replica = self.replicas.get((name, site.where))
        if replica is None:
            # Numbered for each weight by itself: evaluation, whose chunks read other weights, must call the same ones
            # by the same names.
            number = self.counts[name] = self.counts.get(name, -1) + 1
            owners = self._owned(site, name, levels)
            replica = self.replicas[name, site.where] = Replica(name, site, places, summed, levels, owners, number)
            self.nodes.held[replica.key] = replica.held(3)
        elif (replica.placements, replica.summed, replica.levels, replica.owners) != (
            places,
            summed,
            levels,
            self._owned(site, name, levels),
        ):
            raise two_ways(name, replica.site, site)

    def _owned(self, site: Site, name: str, levels: Mapping[str, int]) -> dict[str, int]:
        """The device that a weight belongs to, along axes that do not divide it further: the one with the fewest bytes
        so far. All replicas of a tied weight belong to devices with the same number."""
        sizes = {axis: size for axis, size in axes_of(site.where) if axis in levels and site.uses[axis].by_weight}
        if not sizes:
            return {}
        if name not in self._owners:
            loads = self._loads.setdefault(site.where, Counter())
            self._owners[name] = min(range(prod(sizes.values())), key=lambda number: loads[number])
            loads[self._owners[name]] += self.model.weights[name].bytes
        number, found = self._owners[name], {}
        for axis, size in sizes.items():
            number, found[axis] = divmod(number, size)
        return found

    # ---------------------------------------------------------------------------------------------------- reading

    def key(self, site: Site, i: int, phase: str, point: Point) -> ValueId:
        """The weight as a pass of a chunk reads it: where it is kept in parts, gathered for that pass."""
        replica = self.replicas[site.chunk.weights[i], site.where]
        if not replica.in_parts:
            return replica.key
        run = self.runs.of(site, phase, point)
        if run not in self.gathers:
            self.gathers[run] = _Gather(self._gather(site, run), site)
        return self._gathered_key(replica, site, run)

    def _gathered_key(self, replica: Replica, site: Site, run: Run) -> ValueId:
        return ValueId(Kind.WEIGHT, replica.weight, (replica.number, site.chunk.number), run.point, f":{run.phase}")

    def _gather(self, site: Site, run: Run) -> int:
        chunk = site.chunk
        slots = {slot: None for op, made in chunk.passes.items() if op in run.programs for slot in made.inputs}
        replicas = [
            replica
            for replica in dict.fromkeys(
                self.replicas[chunk.weights[i], site.where] for kind, i in slots if kind == "weight"
            )
            if replica.in_parts
        ]
        writes = tuple(self._gathered_key(replica, site, run) for replica in replicas)
        for replica, key in zip(replicas, writes, strict=True):
            self.nodes.held[key] = WeightLayout(replica.weight, replica.where, replica.placements, ())
        template = self._template(site, run.phase, replicas[0])
        node = self.nodes.add(template, run.point, tuple((replica.key,) for replica in replicas), writes)
        # A selector that names the gather of any of these passes means this one.
        for _, phase, point in run.passes:
            self._template(site, phase, replicas[0]).points[point] = node
        return node

    def _template(self, site: Site, phase: str, replica: Replica) -> NodeTemplate:
        known = (site.chunk.number, site.where, phase)
        if known not in self._templates:
            axes = replica.flat(3)
            self._templates[known] = self.nodes.template(
                NodeTemplate(
                    "all_gather",
                    site.chunk.tags,
                    site.where,
                    site.dims,
                    site.chunk.number,
                    "F" if phase == "R" else phase,
                    axes=axes,
                    by=site.uses[axes[0]].directive,
                )
            )
        return self._templates[known]

    def read_by(self, site: Site, phase: str, point: Point, node: int) -> None:
        """Note who reads which weights: an update comes after all of them."""
        gather = self.gathers.get(self.runs.of(site, phase, point)) if self.gathers else None
        if gather is not None:
            gather.readers.append(node)
        for kind, i in site.chunk.passes["F" if phase == "R" else phase].inputs:
            if kind == "weight":
                replica = self.replicas[site.chunk.weights[i], site.where]
                replica.readers.append(gather.node if gather is not None and replica.in_parts else node)

    def gradient(self, site: Site, i: int, point: Point) -> ValueId:
        replica = self.replicas[site.chunk.weights[i], site.where]
        key = ValueId(Kind.WEIGHT_GRADIENT, replica.weight, (site.chunk.number, i), point)
        replica.gradients.append(key)
        self.nodes.held[key] = WeightLayout(replica.weight, replica.where, replica.placements, ())
        return key

    # ------------------------------------------------------------------------------------------------- changing

    def changed(self, site: Site, change: Change, point: Point) -> ValueId:
        """The new value of a buffer, as the forward of a chunk computes it. That of the first microbatch is kept."""
        replica = self.replicas[site.chunk.weights[change.weight], site.where]
        if not change.free and site.local_samples != self.model.samples:
            raise _cannot_change(
                replica.weight,
                site,
                "its new value depends on the samples, and no device sees all of them at once",
                "do not divide the batch of this chunk, or use a layer that keeps no statistics, such as LayerNorm or"
                " GroupNorm",
            )
        if not _whole(replica, site, change):
            raise _cannot_change(
                replica.weight,
                site,
                "`shard` divides what it depends on",
                "give this part a tag of its own, which is not divided",
            )
        if point != site.points[0]:
            return replica.key.at(point).updated
        key = replica.key.updated
        self.nodes.held[key] = replica.held(3)
        self.changes[replica.key] = key
        return key

    def refuse_unchanged(self) -> None:
        """A buffer that changes must change wherever it is kept."""
        for replica in self.replicas.values():
            if replica.weight in self.changing and replica.key not in self.changes:
                raise _cannot_change(
                    replica.weight,
                    replica.site,
                    "chunks on other devices change it",
                    "read and change it in one chunk, and pass its value on as an activation",
                )

    def prefetch(self, orders: Sequence[Steps], turns: Mapping[int, int]) -> None:
        """Weights are not gathered earlier than so many gathers ahead, or they would all be whole at once. `turns`:
        when passes come that no order names, where that is not as they were made."""
        by_reader = {reader: gather for gather in self.gathers.values() for reader in gather.readers}
        ordered: set[int] = set()
        for order in orders:
            ordered |= self._in_order(order, by_reader)
        by_part: dict[tuple[Submesh, Point, bool], list[_Gather]] = {}
        forwards = {
            (template.chunk, template.where): template for template in self.nodes.templates if template.op == "F"
        }
        for gather in sorted(self.gathers.values(), key=lambda gather: turns.get(gather.readers[0], 0)):
            if gather.node in ordered:
                continue
            node = self.nodes.nodes[gather.readers[0]]
            template = node.template
            line = by_part.setdefault((gather.site.where, node.point, template.phase == "F"), [])
            if len(line) >= gather.distance:
                self.nodes.before(gather.node, line[-gather.distance].readers[-1])
            elif template.op != "F":
                # The first gathers of a backward wait for the forward of their own chunk.
                self.nodes.before(gather.node, forwards[template.chunk, template.where].points[node.point])
            line.append(gather)

    def _in_order(self, order: Steps, by_reader: Mapping[int, _Gather]) -> set[int]:
        """One line of gathers through the steps of an order: the chunks of a step as they follow each other. What a
        step joins with `&` has a line of its own for forwards and one for the rest. Gives the gathers found."""
        lines: dict[bool, list[int]] = {}
        longest = max((gather.distance for gather in by_reader.values()), default=1)
        read: dict[int, int] = {}
        """The latest reader of every gather."""
        for group in order.groups:
            fresh: dict[bool, list[_Gather]] = {}
            again: dict[int, int] = {}
            for reader in sorted(
                (node for node in group if node in by_reader), key=lambda node: position(self.nodes, node)
            ):
                gather = by_reader[reader]
                its = fresh.setdefault(self.nodes.nodes[reader].template.phase == "F", [])
                again[gather.node] = reader
                if gather.node not in read and not any(gather in gathers for gathers in fresh.values()):
                    its.append(gather)
            if not fresh:
                continue
            before, lines = lines, {}
            for forward, gathers in fresh.items():
                line = list(before.get(forward) or next(iter(before.values()), []))
                for gather in gathers:
                    if len(line) >= gather.distance:
                        earlier = line[-gather.distance]
                        self.nodes.before(gather.node, read[earlier] if earlier in read else again[earlier])
                    line.append(gather.node)
                lines[forward] = line[-longest:]
            read |= again
        return set(read)


def position(nodes: Nodes, node: int) -> tuple[Point, int, str]:
    """Among the passes of a step: chunks are numbered as they follow each other; backwards go the other way, and an I
    before its W."""
    template = nodes.nodes[node].template
    assert template.chunk is not None
    return (
        nodes.nodes[node].point,
        template.chunk if template.op == "F" else -template.chunk,
        "" if template.op == "R" else template.op,
    )


def _whole(replica: Replica, site: Site, change: Change) -> bool:
    """Whether no axis that divides the chunk's weights divides the buffer or what it becomes."""
    axes = {divide.axis for divide in site.divides}
    places = [
        *zip(axes_of(site.where), replica.placements, strict=True),
        *zip(axes_of(site.where), site.layouts["output", change.output].placements, strict=True),
    ]
    return all(place is REPLICATE for (axis, _), place in places if axis in axes)


def _cannot_change(weight: str, site: Site, why: str, help: str) -> PiperError:
    spans = [use.directive.span for use in site.uses.values()] or ([site.by.span] if site.by else [])
    return error(
        "P0803",
        f"the model changes buffer {weight}, which this schedule cannot follow",
        spans[-1] if spans else None,
        f"{site.chunk} changes it",
        notes=[why],
        help=help,
    )


def two_ways(name: str, first: Site, second: Site) -> PiperError:
    spans = [use.directive.span for site in (first, second) for use in site.uses.values()]
    return error(
        "P0414",
        f"weight {name} would be sharded in two ways",
        spans[-1] if spans else None,
        f"{second.chunk} reads it too",
        also=[Label(spans[0], f"here for {first.chunk}")] if len(spans) > 1 else [],
        notes=[f"read in {', '.join(site.chunk.modules) or 'the model itself'}" for site in (first, second)],
        help="a tied weight needs the same `replicate` and `shard` at both ends",
    )
