"""Which device gives which part of a value to which, when its layout changes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from piperlang.ir.graph import Value
from piperlang.ir.layout import Box, Layout, devices_of
from piperlang.ir.model import Tensor


class TransferPart(NamedTuple):
    source: int
    target: int
    taken: Box
    """In the source's own tensor."""
    put: Box
    """In the target's own tensor."""


def parts(have: Value, want: Value) -> tuple[TransferPart, ...]:
    """For every device that wants the value, who gives it what. Its own copy first, then its counterpart, then whoever
    has it."""
    return _parts(have.tensor, have.layout, want.layout, have.samples, have.inner, want.inner)


@lru_cache(maxsize=65536)
def _parts(
    tensor: Tensor,
    have: Layout,
    want: Layout,
    samples: int,
    inner: tuple[tuple[int, int], ...],
    wanted_inner: tuple[tuple[int, int], ...],
) -> tuple[TransferPart, ...]:
    sources = list(zip(devices_of(have.where), have.boxes(tensor, 0, samples, inner), strict=True))
    found: list[TransferPart] = []
    for k, (device, box) in enumerate(
        zip(devices_of(want.where), want.boxes(tensor, 0, samples, wanted_inner), strict=True)
    ):
        alike = len(sources) == len(devices_of(want.where))
        ranked = sorted(enumerate(sources), key=lambda item: (item[1][0] != device, not alike or item[0] != k, item[0]))
        taken: set[Box] = set()
        for _, (source, there) in ranked:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, there, strict=True))
            if any(low >= high for low, high in common) or common in taken:
                continue
            taken.add(common)
            found.append(TransferPart(source, device, _within(common, there), _within(common, box)))
            if common == box:
                break
    return tuple(found)


def _within(part: Box, whole: Box) -> Box:
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(part, whole, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


@lru_cache(maxsize=65536)
def local_shapes(
    tensor: Tensor, layout: Layout, samples: int, inner: tuple[tuple[int, int], ...]
) -> dict[int, tuple[int, ...]]:
    """What each device has of a value."""
    return {
        device: shape_of(box)
        for device, box in zip(devices_of(layout.where), layout.boxes(tensor, 0, samples, inner), strict=True)
    }
