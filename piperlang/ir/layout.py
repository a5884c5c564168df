"""How a tensor lies on a part of a mesh, and what turns one way of lying into another.

Along every axis of its part a tensor is whole, divided in a dim, divided in its samples, a sum of parts, or has its
rows where the experts are that they chose. Communication is what turns the producer's layout into the consumer's:
divided to whole is an all-gather, a sum to whole an all-reduce, one dim to another an all-to-all, as are rows to their
experts and back, one part of the mesh to another a send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from piperlang.elaborate.values import Slice
from piperlang.ir.model import BATCH, MEAN, SUM, WHOLE, Place, Tensor, choice_of

Box: TypeAlias = tuple[tuple[int, int], ...]
"""A part of a tensor: from and to, in every dim. Samples count from the first of the whole batch."""

SHARE = "share"
"""The gradient of a tensor without samples, along an axis that divides the batch: each device has what its samples
gave, and the sum over all of them is what counts. It may stay in these parts, since gradients of weights are added up
anyway."""


@lru_cache(maxsize=4096)
def axes_of(where: Slice) -> tuple[tuple[str, int], ...]:
    """The axes along which a part of a mesh has more than one device, outermost first."""
    picks = dict(where.picks)
    sizes = [(axis, len(picks[axis]) if axis in picks else length) for axis, length in where.mesh.axes]
    return tuple((axis, size) for axis, size in sizes if size > 1)


@lru_cache(maxsize=4096)
def devices_of(where: Slice) -> tuple[int, ...]:
    return tuple(where.devices())


@dataclass(frozen=True, slots=True)
class Layout:
    where: Slice
    places: tuple[Place, ...]
    """One for each of axes_of(where)."""
    inner: tuple[str, ...] = ()
    """Axes that divide the samples innermost: those that other chunks use to divide weights, so that exchanging stays
    within one axis."""

    def batch_axes(self) -> list[int]:
        """Positions of the axes that divide the samples, outermost first."""
        axes = axes_of(self.where)
        found = [i for i, place in enumerate(self.places) if place == BATCH]
        return sorted(found, key=lambda i: (axes[i][0] in self.inner, i))

    def finished(self) -> Layout:
        """The same with sums added up."""
        return Layout(self.where, tuple(WHOLE if place in (SUM, MEAN) else place for place in self.places), self.inner)

    def unrouted(self) -> Layout:
        """The same with rows where their samples are."""
        return _with(self, [BATCH if choice_of((place,)) else place for place in self.places])

    def separate(self) -> list[int]:
        """Of the devices that have the same samples, the first of each."""
        axes = axes_of(self.where)
        points = product(*(range(size) for _, size in axes))
        return [
            k
            for k, at in enumerate(points)
            if not any(i for i, place in zip(at, self.places, strict=True) if place != BATCH)
        ]

    def __str__(self) -> str:
        parts = [f"{axis}:{place}" for (axis, _), place in zip(axes_of(self.where), self.places, strict=True)]
        return f"{self.where}{{{', '.join(parts)}}}" if parts else str(self.where)

    def boxes(self, tensor: Tensor, first: int, count: int, inner: tuple[tuple[int, int], ...] = ()) -> Iterator[Box]:
        """What each device has of the samples first to first + count, in the order of devices_of(where); of rows that
        chose an expert, as many as it has if all experts are chosen alike.

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
                    box[tensor.batch] = _part(box[tensor.batch], at[i], axes[i][1])
                for part, of in inner:
                    box[tensor.batch] = _part(box[tensor.batch], part, of)
            for i, place in enumerate(self.places):
                if isinstance(place, int):
                    box[place] = _part(box[place], at[i], axes[i][1])
                elif tensor.batch is not None and choice_of((place,)):
                    box[tensor.batch] = _part(box[tensor.batch], at[i], axes[i][1])
            yield tuple(box)


def _part(interval: tuple[int, int], at: int, of: int) -> tuple[int, int]:
    low, high = interval
    step = (high - low) // of
    return low + at * step, low + (at + 1) * step


def moves(source: Layout, target: Layout) -> list[tuple[str, Layout]]:
    """The operations, each with the layout it leads to, that turn `source` into `target`; none if they are the same."""
    if source == target:
        return []
    if choice_of(source.places):
        return [("all_to_all", source.unrouted()), *moves(source.unrouted(), target)]
    if choice_of(target.places):
        return [*moves(source, target.unrouted()), ("all_to_all", target)]
    shares = SHARE in source.places or SHARE in target.places
    if shares and not _alike(source, target):
        # Parts of a gradient that do not match one to one: added up, moved whole, and kept by the first of those that
        # share it.
        whole = _with(source, [SUM if place == SHARE else place for place in source.places])
        there = _with(target, [WHOLE if place == SHARE else place for place in target.places])
        steps = moves(whole, there)
        return [*steps, ("share", target)] if SHARE in target.places else steps
    if source.where == target.where:
        return _within(source, target)
    steps = _within(source, _with(source, [WHOLE if place in (SUM, MEAN) else place for place in source.places]))
    return [*steps, ("p2p", target)]


def _alike(source: Layout, target: Layout) -> bool:
    """Whether devices match one to one."""
    sizes = [[size for _, size in axes_of(layout.where)] for layout in (source, target)]
    return sizes[0] == sizes[1] and source.places == target.places


def _with(layout: Layout, places: list[Place]) -> Layout:
    return Layout(layout.where, tuple(places), layout.inner)


def _within(source: Layout, target: Layout) -> list[tuple[str, Layout]]:
    steps: list[tuple[str, Layout]] = []
    now = source
    # Sums first: what follows can only move finished values.
    for i, (have, want) in enumerate(zip(source.places, target.places, strict=True)):
        if have in (SUM, MEAN) and want not in (SUM, MEAN):
            alone = sum(a != b for a, b in zip(now.places, target.places, strict=True)) == 1
            after: Place = want if have == SUM and alone and _last(target, i) else WHOLE
            now = _with(now, [after if j == i else place for j, place in enumerate(now.places)])
            steps.append(("all_reduce" if after == WHOLE else "reduce_scatter", now))
    differing = [i for i, (have, want) in enumerate(zip(now.places, target.places, strict=True)) if have != want]
    if not differing:
        return steps
    if all(now.places[i] == WHOLE for i in differing):
        return [*steps, ("slice", target)]
    if all(target.places[i] == WHOLE for i in differing):
        # Innermost axis first, so that every gather joins neighbours.
        batch = now.batch_axes()
        for i in sorted(differing, key=lambda i: (batch.index(i) if i in batch else -1, i), reverse=True):
            now = _with(now, [WHOLE if j == i else place for j, place in enumerate(now.places)])
            steps.append(("all_gather", now))
        return steps
    return [*steps, ("all_to_all", target)]


def _last(layout: Layout, axis: int) -> bool:
    """Whether dividing along this axis comes after all other division of the samples."""
    return layout.places[axis] != BATCH or layout.batch_axes()[-1] == axis


def exchanging(source: Layout, target: Layout) -> tuple[str, ...]:
    """The axes along which devices have to talk to turn one layout of a part into another; all of them where one does
    not do."""
    axes = axes_of(source.where)
    if choice_of(source.places) or choice_of(target.places):
        return tuple(
            axis for (axis, _), have, want in zip(axes, source.places, target.places, strict=True) if have != want
        )  # rows go anywhere, whichever sample they are of
    differing = [i for i, (have, want) in enumerate(zip(source.places, target.places, strict=True)) if have != want]
    simple = all(_last(layout, i) for i in differing for layout in (source, target))
    return tuple(axes[i][0] for i in differing) if simple else tuple(axis for axis, _ in axes)
