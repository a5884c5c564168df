"""Tensors on simulated devices: what each has of a value, and how values move from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import torch

from piperlang.core.placement import DEFERRED, PARTIAL, Placement
from piperlang.ir.graph import Value
from piperlang.ir.layout import Box, Layout, axes_of
from piperlang.runtime.box import take


def boxes(value: Value) -> list[Box]:
    return list(value.layout.boxes(value.tensor, value.first, value.samples, value.inner))


def move(sources: Sequence[tuple[Value, Sequence[torch.Tensor]]], target: Value) -> list[torch.Tensor]:
    """The value as `target` lies, from parts that lie otherwise: whatever the operation is called, this is what it must
    do."""
    layout = sources[0][0].layout
    parts = [
        (box, tensor, k)
        for value, tensors in sources
        for k, (box, tensor) in enumerate(zip(boxes(value), tensors, strict=True))
    ]
    kept = _kept_sums(layout, target.layout)
    groups = _sum_groups(
        layout, summed=(PARTIAL,) if DEFERRED in target.layout.placements else (PARTIAL, DEFERRED), but=kept
    )
    points = list(product(*(range(size) for _, size in axes_of(layout.where))))
    found = []
    for k, wanted in enumerate(boxes(target)):
        total: torch.Tensor | None = None
        for group in groups:
            # Its own copy first; of others, any that has it.
            alike = [
                part for part in parts if part[2] in group and all(points[part[2]][i] == points[k][i] for i in kept)
            ]
            mine = sorted(alike, key=lambda part: part[2] != k)
            piece = _assemble(wanted, [(box, tensor) for box, tensor, _ in mine])
            total = piece if total is None else total + piece
        assert total is not None
        found.append(total)
    if DEFERRED in target.layout.placements and DEFERRED not in layout.placements:
        first = _first_of_shared(target.layout)
        found = [tensor if k in first else torch.zeros_like(tensor) for k, tensor in enumerate(found)]
    return found


def _first_of_shared(layout: Layout) -> set[int]:
    points = product(*(range(size) for _, size in axes_of(layout.where)))
    return {
        k
        for k, at in enumerate(points)
        if not any(i for i, place in zip(at, layout.placements, strict=True) if place is DEFERRED)
    }


def _kept_sums(source: Layout, target: Layout) -> list[int]:
    """Axes along which a value is a sum of parts before and after: it is cut or joined, or added up along other axes,
    and each device keeps its own part."""
    if source.where != target.where:
        return []
    return [
        i
        for i, (have, want) in enumerate(zip(source.summed().placements, target.placements, strict=True))
        if have is want is PARTIAL
    ]


def _sum_groups(layout: Layout, summed: tuple[Placement, ...], but: Sequence[int] = ()) -> list[set[int]]:
    """Devices by their position along the axes that hold parts of a sum: one group for each part."""
    sizes = [size for _, size in axes_of(layout.where)]
    along = [i for i, place in enumerate(layout.placements) if place in summed and i not in but]
    groups: dict[tuple[int, ...], set[int]] = {}
    for k, at in enumerate(product(*(range(size) for size in sizes))):
        groups.setdefault(tuple(at[i] for i in along), set()).add(k)
    return list(groups.values())


def _assemble(wanted: Box, parts: Sequence[tuple[Box, torch.Tensor]]) -> torch.Tensor:
    if parts[0][0] == wanted:
        return parts[0][1]
    out = parts[0][1].new_empty([high - low for low, high in wanted])
    filled: set[Box] = set()
    covered = 0
    for box, tensor in parts:
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True))
        if any(low >= high for low, high in common) or common in filled:
            continue
        take(out, common, wanted).copy_(take(tensor, common, box))
        filled.add(common)
        covered += prod(high - low for low, high in common)
    if covered < out.numel():
        raise AssertionError(f"a device needs {wanted}, which nobody has")
    return out
