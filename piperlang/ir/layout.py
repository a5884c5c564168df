"""Layouts: the placements of a tensor on a submesh, and what each device has of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from piperlang.core.hashed import Hashed
from piperlang.core.mesh import Submesh
from piperlang.core.placement import BATCH, DEFERRED, PARTIAL, REPLICATE, Dispatched, Placement, slice_of
from piperlang.ir.model import Tensor

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A part of a tensor: from and to, in every dim. Samples count from the first of the whole batch."""


@lru_cache(maxsize=4096)
def axes_of(where: Submesh) -> tuple[tuple[str, int], ...]:
    """The axes along which a submesh has more than one device, outermost first."""
    picks = dict(where.picks)
    sizes = [(axis, len(picks[axis]) if axis in picks else length) for axis, length in where.mesh.axes]
    return tuple((axis, size) for axis, size in sizes if size > 1)


@lru_cache(maxsize=4096)
def devices_of(where: Submesh) -> tuple[int, ...]:
    return tuple(where.devices())


@lru_cache(maxsize=4096)
def same_devices(one: Submesh, other: Submesh) -> bool:
    """Whether two submeshes, of one mesh or of two, have the same devices, in whatever order."""
    return set(devices_of(one)) == set(devices_of(other))


@dataclass(frozen=True, slots=True)
class Layout(Hashed):
    where: Submesh
    placements: tuple[Placement, ...]
    """One for each of axes_of(where)."""
    inner: tuple[str, ...] = ()
    """Axes that divide the samples innermost: those that other chunks use to divide weights, so that exchanging stays
    within one axis."""

    __hash__ = Hashed.__hash__

    def batch_axes(self) -> list[int]:
        """Positions of the axes that divide the samples, outermost first."""
        axes = axes_of(self.where)
        found = [i for i, place in enumerate(self.placements) if place is BATCH]
        return sorted(found, key=lambda i: (axes[i][0] in self.inner, i))

    def placed(self, placements: Sequence[Placement]) -> Layout:
        """The same with other placements."""
        return Layout(self.where, tuple(placements), self.inner)

    def finished(self) -> Layout:
        """The same with sums added up."""
        return self.placed([REPLICATE if place is PARTIAL else place for place in self.placements])

    def summed(self) -> Layout:
        """The same with terms of a gradient that need not be reduced as terms of any other sum."""
        return self.placed([PARTIAL if place is DEFERRED else place for place in self.placements])

    def unrouted(self) -> Layout:
        """The same with routed tokens where their samples are."""
        return self.placed([BATCH if isinstance(place, Dispatched) else place for place in self.placements])

    def separate(self) -> list[int]:
        """Of the devices that have the same samples, the first of each."""
        axes = axes_of(self.where)
        points = product(*(range(size) for _, size in axes))
        return [
            k
            for k, at in enumerate(points)
            if not any(i for i, place in zip(at, self.placements, strict=True) if place is not BATCH)
        ]

    def __str__(self) -> str:
        parts = [f"{axis}:{place}" for (axis, _), place in zip(axes_of(self.where), self.placements, strict=True)]
        return f"{self.where}{{{', '.join(parts)}}}" if parts else str(self.where)

    def boxes(self, tensor: Tensor, first: int, count: int, inner: tuple[tuple[int, int], ...] = ()) -> Iterator[Box]:
        """What each device has of the samples first to first + count, in the order of devices_of(where); of routed
        tokens, as many as it has if experts are balanced.

        `inner`: of what a device has, only this part of so many."""
        axes = axes_of(self.where)
        whole = [
            (0, b) if i != tensor.batch else (a * first, a * (first + count)) for i, (a, b) in enumerate(tensor.dims)
        ]
        if tensor.batch is None:
            whole = [(0, size) for size in tensor.shape(0)]
        batch = self.batch_axes()
        for at in product(*(range(size) for _, size in axes)):
            box = list(whole)
            if tensor.batch is not None:
                for i in batch:
                    box[tensor.batch] = slice_of(box[tensor.batch], at[i], axes[i][1])
                for part, of in inner:
                    box[tensor.batch] = slice_of(box[tensor.batch], part, of)
            for i, place in enumerate(self.placements):
                place.narrow(box, tensor.batch, at[i], axes[i][1])
            yield tuple(box)
