"""Which part of a weight a device has: a box where dims are divided, and of that a flat interval where ZeRO divides
further."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from piperlang.core.mesh import Submesh
from piperlang.ir.graph import WeightLayout
from piperlang.ir.layout import Box, axes_of


@lru_cache(maxsize=4096)
def coordinates(where: Submesh) -> tuple[Mapping[str, int], ...]:
    """For every device of a part, its position along each axis."""
    axes = axes_of(where)
    return tuple(
        dict(zip((axis for axis, _ in axes), at, strict=True)) for at in product(*(range(size) for _, size in axes))
    )


def along(where: Submesh, axes: Collection[str]) -> Iterable[list[int]]:
    """Groups of devices of a part that differ only along some axes; by their number in the part."""
    found: dict[tuple[int, ...], list[int]] = {}
    for k, at in enumerate(coordinates(where)):
        found.setdefault(tuple(i for axis, i in at.items() if axis not in axes), []).append(k)
    return found.values()


def local_box(held: WeightLayout, shape: Sequence[int], at: Mapping[str, int]) -> Box:
    """What a device has of a weight that is divided in dims."""
    box = [(0, size) for size in shape]
    for (axis, size), place in zip(axes_of(held.where), held.placements, strict=True):
        place.narrow(box, None, at[axis], size)
    return tuple(box)


def local_shape(held: WeightLayout, shape: Sequence[int], at: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(high - low for low, high in local_box(held, shape, at))


def flat_part(held: WeightLayout, at: Mapping[str, int], length: int) -> tuple[int, int]:
    """Of `length` elements, from and to where a device has them; the last parts may be shorter, or empty. Where one
    device has all of them, those before it have none at the start, and those after it none at the end."""
    sizes, owners = dict(axes_of(held.where)), dict(held.owners)
    low, high = 0, length
    for axis in held.flat:
        if axis in owners:
            low, high = (high if at[axis] > owners[axis] else low), (low if at[axis] < owners[axis] else high)
            continue
        step = -(-(high - low) // sizes[axis])
        low = min(high, low + at[axis] * step)
        high = min(high, low + step)
    return low, high


def interval(held: WeightLayout, shape: Sequence[int], at: Mapping[str, int]) -> tuple[int, int]:
    """The flat interval, of all that the device's box holds."""
    return flat_part(held, at, prod(local_shape(held, shape, at)))


def dividing(held: WeightLayout) -> list[str]:
    """The axes along which devices have different parts."""
    return [axis for (axis, _), place in zip(axes_of(held.where), held.placements, strict=True) if place.shards] + list(
        held.flat
    )


def in_pieces(held: WeightLayout) -> bool:
    """Whether no device has the whole weight."""
    return not dict(held.owners).keys() >= set(dividing(held))
