"""Parts of tensors by index: what a device has of a weight, and how parts of one layout are read in another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from piperlang.ir.layout import Box
from piperlang.runtime.box import take

MOST_BOXES = 4096
"""Of one weight: more than devices that shard it in its dims."""


class IndexRange(NamedTuple):
    """A box of a tensor and, where ZeRO shards further, an interval of the flattened box."""

    box: Box
    interval: tuple[int, int] | None = None

    @classmethod
    def normal(cls, box: Box, interval: tuple[int, int] | None) -> IndexRange:
        """An interval that is all of the box is none."""
        box = tuple((low, high) for low, high in box)
        return cls(box, None if interval == (0, volume(box)) else interval)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> IndexRange:
        return cls(tuple((0, size) for size in shape))

    @property
    def numel(self) -> int:
        return volume(self.box) if self.interval is None else self.interval[1] - self.interval[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return extents(self.box) if self.interval is None else (self.numel,)

    def __str__(self) -> str:
        box = "[" + ", ".join(f"{low}:{high}" for low, high in self.box) + "]"
        return box if self.interval is None else f"{box}.flat[{self.interval[0]}:{self.interval[1]}]"


def volume(box: Box) -> int:
    return prod(extents(box))


def extents(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def tiles(ranges: Sequence[IndexRange], shape: Sequence[int]) -> bool:
    """Whether ranges are all of a tensor, and no element is in two of them. Boxes that overlap must be the same box,
    divided into intervals; so a count is enough, once nothing overlaps."""
    intervals: dict[Box, list[tuple[int, int]]] = {}
    for one in ranges:
        inside = len(one.box) == len(shape) and all(
            0 <= low <= high <= n for (low, high), n in zip(one.box, shape, strict=True)
        )
        low, high = one.interval or (0, volume(one.box))
        if not inside or not 0 <= low <= high <= volume(one.box):
            return False
        intervals.setdefault(one.box, []).append((low, high))
    boxes = list(intervals)
    if len(boxes) > MOST_BOXES or any(_overlap(a, b) is not None for i, a in enumerate(boxes) for b in boxes[:i]):
        return False
    for its in intervals.values():
        its.sort()
        if any(left[1] > right[0] for left, right in pairwise(its)):
            return False
    return sum(one.numel for one in ranges) == prod(shape)


def chosen(boxes: Sequence[Box], shape: Sequence[int]) -> list[Box]:
    """Of the boxes that devices have of a weight, some that are all of it and do not overlap: a weight may be whole on
    one device and sharded on others."""
    distinct = sorted(dict.fromkeys(boxes), key=volume, reverse=True)

    def search(taken: list[Box], left: int, start: int) -> list[Box] | None:
        if left == 0:
            return taken
        for i in range(start, len(distinct)):
            one = distinct[i]
            if 0 < volume(one) <= left and all(_overlap(one, other) is None for other in taken):
                found = search([*taken, one], left - volume(one), i + 1)
                if found is not None:
                    return found
        return None

    found = search([], prod(shape), 0)
    assert found is not None, f"the devices do not have all of a weight of shape {shape}: {distinct}"
    return found


def read(wanted: IndexRange, stored: Sequence[IndexRange], tensors: Iterator[torch.Tensor]) -> torch.Tensor:
    """A range of a tensor, from ranges that are all of it. `tensors` has those of `needed(wanted, stored)`."""
    box: torch.Tensor | None = None
    for one, part in zip(needed(wanted, stored), tensors, strict=True):
        if one == wanted:
            return part.view(wanted.shape)
        if box is None:
            box = part.new_empty(extents(wanted.box))
        shared = _overlap(wanted.box, one.box)
        assert shared is not None
        if one.interval is None:
            take(box, shared, wanted.box).copy_(take(part.view(extents(one.box)), shared, one.box))
        else:
            _copy_interval(box, wanted.box, part, one, shared)
    if box is None:
        raise AssertionError(f"no part of {wanted} is stored")
    return box if wanted.interval is None else box.reshape(-1)[slice(*wanted.interval)]


def needed(wanted: IndexRange, stored: Sequence[IndexRange]) -> list[IndexRange]:
    """The stored ranges that have elements of a range; the same range alone, if it is one of them."""
    if wanted in stored:
        return [wanted]
    return [
        one
        for one in stored
        if one.numel
        and _overlap(wanted.box, one.box) is not None
        and (wanted.box != one.box or _meet(wanted.interval, one.interval))
    ]


def _copy_interval(box: torch.Tensor, own: Box, part: torch.Tensor, stored: IndexRange, shared: Box) -> None:
    """Copies what an interval of a flattened box has of another box."""
    assert stored.interval is not None
    low, high = stored.interval
    if stored.box == own:
        box.view(-1)[low:high] = part
        return
    # Of the stored box only the rows that the interval touches become memory.
    row = prod(extents(stored.box)[1:])
    first, last = low // row, -(-high // row)
    rows = part.new_empty((last - first) * row)
    rows[low - first * row : high - first * row] = part
    there = torch.zeros(rows.shape, dtype=torch.bool)
    there[low - first * row : high - first * row] = True
    origin = ((stored.box[0][0] + first, stored.box[0][0] + last), *stored.box[1:])
    shared_rows = _overlap(shared, origin)
    if shared_rows is not None:
        mask = take(there.view(extents(origin)), shared_rows, origin)
        target = take(box, shared_rows, own)
        target[mask] = take(rows.view(extents(origin)), shared_rows, origin)[mask]


def _overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing. A tensor without dims is one element."""
    found = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return found if all(low < high for low, high in found) else None


def _meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    return a is None or b is None or max(a[0], b[0]) < min(a[1], b[1])
