"""Collectives that redistribute a tensor from one layout to another.

Shard to Replicate is an all-gather, Partial to Replicate an all-reduce, Partial to Shard a reduce-scatter, one
dimension to another an all-to-all, as are dispatch to experts and combine. One submesh to another is an all-to-all
where both are the same devices, as two meshes over all of them are, and otherwise a send."""

from __future__ import annotations

from piperlang.core.placement import BATCH, DEFERRED, PARTIAL, REPLICATE, Placement, dispatched
from piperlang.ir.graph import Value
from piperlang.ir.layout import Layout, axes_of, devices_of, same_devices


def moves(source: Layout, target: Layout) -> list[tuple[str, Layout]]:
    """The operations, each with the layout it leads to, that turn `source` into `target`; none if they are the same."""
    if source == target:
        return []
    if dispatched(source.placements):
        return [("all_to_all", source.unrouted()), *moves(source.unrouted(), target)]
    if dispatched(target.placements):
        return [*moves(source, target.unrouted()), ("all_to_all", target)]
    shares = DEFERRED in source.placements or DEFERRED in target.placements
    if shares and not alike(source, target):
        # Parts of a gradient that do not match one to one: added up, moved whole, and kept by the first of those that
        # share it.
        there = target.placed([REPLICATE if place is DEFERRED else place for place in target.placements])
        steps = moves(source.summed(), there)
        return [*steps, ("share", target)] if DEFERRED in target.placements else steps
    if source.where == target.where:
        return _within(source, target)
    steps = _within(source, source.placed([REPLICATE if place is PARTIAL else place for place in source.placements]))
    return [*steps, ("all_to_all" if same_devices(source.where, target.where) else "p2p", target)]


def alike(source: Layout, target: Layout) -> bool:
    """Whether every device of one has a counterpart in the other that has the same part."""
    sizes = [[size for _, size in axes_of(layout.where)] for layout in (source, target)]
    return sizes[0] == sizes[1] and source.placements == target.placements


def in_place(value: Value, target: Layout) -> bool:
    """Whether another view of the same devices gives each what it has: then nothing has to be done."""
    source = value.layout
    if source.where == target.where or devices_of(source.where) != devices_of(target.where):
        return False
    if dispatched((*source.placements, *target.placements)):
        return False
    if any(place in (PARTIAL, DEFERRED) for place in (*source.placements, *target.placements)):
        return alike(source, target)
    boxes = [layout.boxes(value.tensor, 0, value.samples, value.inner) for layout in (source, target)]
    return list(boxes[0]) == list(boxes[1])


def _within(source: Layout, target: Layout) -> list[tuple[str, Layout]]:
    steps: list[tuple[str, Layout]] = []
    now = source
    # Sums first: what follows can only move finished values.
    for i, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if have is PARTIAL and want is not PARTIAL:
            alone = sum(a != b for a, b in zip(now.placements, target.placements, strict=True)) == 1
            after: Placement = want if alone and _last(target, i) else REPLICATE
            now = now.placed([after if j == i else place for j, place in enumerate(now.placements)])
            steps.append(("all_reduce" if after is REPLICATE else "reduce_scatter", now))
    differing = [
        i for i, (have, want) in enumerate(zip(now.placements, target.placements, strict=True)) if have != want
    ]
    if not differing:
        return steps
    if all(now.placements[i] is REPLICATE for i in differing):
        return [*steps, ("slice", target)]
    if all(target.placements[i] is REPLICATE for i in differing):
        # Innermost axis first, so that every gather joins neighbours.
        batch = now.batch_axes()
        for i in sorted(differing, key=lambda i: (batch.index(i) if i in batch else -1, i), reverse=True):
            now = now.placed([REPLICATE if j == i else place for j, place in enumerate(now.placements)])
            steps.append(("all_gather", now))
        return steps
    return [*steps, ("all_to_all", target)]


def _last(layout: Layout, axis: int) -> bool:
    """Whether dividing along this axis comes after all other division of the samples."""
    return layout.placements[axis] is not BATCH or layout.batch_axes()[-1] == axis


def exchanging(source: Layout, target: Layout) -> tuple[str, ...]:
    """The axes along which devices have to talk to turn one layout of a part into another; all of them where one does
    not do."""
    axes, source = axes_of(source.where), source.summed()
    if dispatched(source.placements) or dispatched(target.placements):
        return tuple(
            axis
            for (axis, _), have, want in zip(axes, source.placements, target.placements, strict=True)
            if have != want
        )  # rows go anywhere, whichever sample they are of
    differing = [
        i for i, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)) if have != want
    ]
    simple = all(_last(layout, i) for i in differing for layout in (source, target))
    return tuple(axes[i][0] for i in differing) if simple else tuple(axis for axis, _ in axes)
