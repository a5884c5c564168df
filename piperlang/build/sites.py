"""Where each chunk runs, for which microbatches, and the layouts of its tensors there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from piperlang.build.schedule import ALONE, Schedule, Use
from piperlang.core.mesh import Submesh
from piperlang.core.placement import BATCH, DEFERRED, DISPATCHED, PARTIAL, REPLICATE, Dispatched, Placement, dispatched
from piperlang.core.value_id import Point
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.ir.layout import Layout, axes_of
from piperlang.ir.model import Chunk, Divide, Sharding, Slot


@dataclass(frozen=True, eq=False)
class Site:
    """A chunk on one submesh."""

    chunk: Chunk
    group: Tagset
    where: Submesh
    dims: tuple[str, ...]
    """Splits of the batch, then those of the chunk alone."""
    outer: int
    """How many of them split the batch."""
    counts: tuple[int, ...]
    samples: int
    """In each microbatch, on all devices and over all parts of inner splits."""
    degree: int
    points: tuple[Point, ...]
    layouts: Mapping[Slot, Layout]
    uses: Mapping[str, Use]
    sharding: Sharding
    inner_axes: tuple[str, ...]
    by: Directive | None
    """Who placed it."""

    def first(self, point: Point) -> int:
        """The first sample of a microbatch."""
        index = 0
        for at, count in zip(point[: self.outer], self.counts, strict=False):
            index = index * count + at
        return index * self.samples

    def inner(self, point: Point) -> tuple[tuple[int, int], ...]:
        return tuple(zip(point[self.outer :], self.counts[self.outer :], strict=True))

    @property
    def divides(self) -> tuple[Divide, ...]:
        return self.sharding[0]

    @property
    def spread(self) -> Layout:
        """The layout of samples."""
        divided = [axis in self.uses and self.uses[axis].divides_batch for axis, _ in axes_of(self.where)]
        return Layout(self.where, tuple(BATCH if yes else REPLICATE for yes in divided), self.inner_axes)

    @property
    def local_samples(self) -> int:
        """On one device, in one microbatch."""
        return self.samples // self.degree // prod(self.counts[self.outer :])


class Sites:
    """All sites of a schedule, made in the order of the program so that each knows how its inputs arrive."""

    def __init__(self, schedule: Schedule, sketch: bool) -> None:
        self.schedule, self.model, self.sketch = schedule, schedule.model, sketch
        self.maker = {name: (chunk.number, j) for chunk in self.model.chunks for j, name in enumerate(chunk.outputs)}
        self.inner_axes = tuple(
            sorted(
                {axis for uses in schedule.uses.values() for (_, axis), use in uses.items() if not use.divides_batch}
            )
        )
        self.of: list[list[Site]] = []
        self._at: list[dict[Point, Site]] = []
        for chunk in self.model.chunks:
            self._add(chunk)

    def at(self, chunk: int, point: Point) -> Site:
        sites = self.of[chunk]
        return sites[0] if len(sites) == 1 else self._at[chunk][point]

    def _add(self, chunk: Chunk) -> None:
        group = chunk.tagset
        splits = self.schedule.splits(group)
        outer = sum(s.selector is None for s in splits)
        dims, counts = tuple(s.name for s in splits), tuple(s.count for s in splits)
        samples = self.model.samples // prod(counts[:outer])
        whole = [
            self._sampled(name, count) if i < outer else range(count)
            for i, (name, count) in enumerate(zip(dims, counts, strict=True))
        ]
        sites, at = [], {}
        places = self.schedule.places(group)
        for where, placement in places:
            box = dict(placement.box) if placement else {}
            ranges = [
                [i for i in every if i in box[name]] if name in box else every
                for name, every in zip(dims, whole, strict=True)
            ]
            sites.append(
                self._site(
                    chunk,
                    group,
                    where,
                    dims,
                    outer,
                    counts,
                    samples,
                    tuple(product(*ranges)),
                    placement.directive if placement else None,
                )
            )
        if len(places) != 1 or (places[0][1] and places[0][1].box):
            at = {point: site for site in sites for point in site.points}
            # What the script has not placed so far is left where everything starts.
            rest = tuple(point for point in product(*whole) if point not in at)
            if rest:
                sites.append(self._site(chunk, group, ALONE, dims, outer, counts, samples, rest))
                at |= dict.fromkeys(rest, sites[-1])
        self.of.append(sites)
        self._at.append(at)

    def _sampled(self, name: str, count: int) -> Sequence[int]:
        """All microbatches of a split; in a sketch, the first of each set of them that is placed separately."""
        if not self.sketch:
            return range(count)
        return sorted({0} | {min(these) for these in self.schedule.apart(name)})

    def _site(
        self,
        chunk: Chunk,
        group: Tagset,
        where: Submesh,
        dims: tuple[str, ...],
        outer: int,
        counts: tuple[int, ...],
        samples: int,
        points: tuple[Point, ...],
        by: Directive | None = None,
    ) -> Site:
        uses = {axis: use for axis, _ in axes_of(where) if (use := self.schedule.use(group, where, axis))}
        divides = tuple(
            Divide(axis, size, uses[axis].style)
            for axis, size in axes_of(where)
            if axis in uses and not uses[axis].divides_batch
        )
        degree = self.schedule.degree(group, where)
        local: Mapping[Slot, tuple[Placement, ...]] = {}
        sharding: Sharding = (divides, ())
        if divides and self.model.divider is not None:
            each = max(1, samples // degree // prod(counts[outer:]))
            sharding = (divides, self._arriving(chunk, where, divides))
            try:
                local = self.model.divider.divided(chunk.number, each, sharding)
            except PiperError as problem:
                asked = uses[divides[0].axis].directive
                raise PiperError(
                    *(
                        replace(x, message=f"{chunk}: {x.message}", span=asked.span).within(asked.trail)
                        for x in problem.diagnostics
                    )
                ) from None
        layouts = {slot: self._layout(chunk, where, slot, uses, divides, local) for slot in _slots(chunk)}
        self._check_loss(chunk, uses, divides, layouts)
        if len(counts) > outer and any(dispatched(layout.placements) for layout in layouts.values()):
            raise _split_again(chunk, self.schedule.splits(group)[outer])
        return Site(
            chunk,
            group,
            where,
            dims,
            outer,
            counts,
            samples,
            degree,
            points,
            layouts,
            uses,
            sharding,
            self.inner_axes,
            by,
        )

    def _check_loss(
        self, chunk: Chunk, uses: Mapping[str, Use], divides: tuple[Divide, ...], layouts: Mapping[Slot, Layout]
    ) -> None:
        """Devices that share the features of a sample must all have its whole loss: one of them tells it."""
        if self.model.loss not in chunk.outputs:
            return
        layout = layouts["output", chunk.outputs.index(self.model.loss)]
        axes = [axis for axis, _ in axes_of(layout.where)]
        for divide in divides:
            if layout.placements[axes.index(divide.axis)] is not REPLICATE:
                by = uses[divide.axis].directive
                raise error(
                    "P0411",
                    f"{chunk}: each device along {divide.axis} would have a part of the loss",
                    by.span,
                    f"shards what the loss reads, with style={divide.style}",
                    notes=["the loss is computed from whole samples"],
                    help="tag what comes last in the model, or the loss itself, and `replicate` its chunk over"
                    f" {divide.axis}",
                )

    def _arriving(
        self, chunk: Chunk, where: Submesh, divides: tuple[Divide, ...]
    ) -> tuple[tuple[Slot, tuple[Placement, ...]], ...]:
        """The placements of inputs along the axes that shard this chunk, if their producers are on the same devices."""
        axes = [axis for axis, _ in axes_of(where)]
        found: dict[Slot, tuple[Placement, ...]] = {}
        for i, name in enumerate(chunk.inputs):
            number, j = self.maker[name]
            layout = self.of[number][0].layouts["output", j]
            if layout.where == where and dispatched(layout.placements) in (None, chunk.dispatch):
                places = [layout.placements[axes.index(divide.axis)] for divide in divides]
                found["input", i] = tuple(DISPATCHED if isinstance(place, Dispatched) else place for place in places)
        return tuple(found.items())

    def _layout(
        self,
        chunk: Chunk,
        where: Submesh,
        slot: Slot,
        uses: Mapping[str, Use],
        divides: tuple[Divide, ...],
        local: Mapping[Slot, tuple[Placement, ...]],
    ) -> Layout:
        kind, i = slot
        names = {"input": chunk.inputs, "output": chunk.outputs, "batch": chunk.batch}
        of = kind.removeprefix("grad_")
        tensor = self.model.tensors[names[of][i]] if of in names else None
        batched = tensor is not None and tensor.batch is not None
        dividing = [divide.axis for divide in divides]
        places: list[Placement] = []
        for axis, _ in axes_of(where):
            use = uses.get(axis)
            if use is None:
                places.append(REPLICATE)  # not used so far: all devices along it do the same
            elif not use.divides_batch:
                place = local[slot][dividing.index(axis)] if slot in local else REPLICATE
                places.append(chunk.dispatch if place is DISPATCHED and chunk.dispatch else place)
            elif kind == "grad_weight":
                places.append(PARTIAL)
            elif kind == "weight":
                places.append(REPLICATE)
            elif tensor is not None and tensor.summed:
                places.append(PARTIAL if kind in ("output", "grad_input") else REPLICATE)
            else:
                places.append(BATCH if batched else DEFERRED if kind.startswith("grad_") else REPLICATE)
        return Layout(where, tuple(places), self.inner_axes)


def _split_again(chunk: Chunk, by: Directive) -> PiperError:
    return error(
        "P0411",
        f"{chunk} cannot be split: its tokens are dispatched to experts",
        by.span,
        "splits it",
        notes=["samples are split before their tokens are dispatched"],
        help="split the batch, or shard the experts of another chunk",
    )


def _slots(chunk: Chunk) -> list[Slot]:
    found: list[Slot] = [("batch", i) for i in range(len(chunk.batch))]
    for kind, names in (("input", chunk.inputs), ("output", chunk.outputs), ("weight", chunk.weights)):
        found += [(kind, i) for i in range(len(names))] + [(f"grad_{kind}", i) for i in range(len(names))]
    return found
