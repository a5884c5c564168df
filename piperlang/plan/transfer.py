"""Which device gives which part of a value to which, when its layout changes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple, TypeAlias

from piperlang.core.mesh import Mesh, Submesh
from piperlang.core.placement import DEFERRED, PARTIAL
from piperlang.ir.graph import Value
from piperlang.ir.layout import Box, Layout, axes_of, devices_of
from piperlang.ir.model import Tensor
from piperlang.source import Source

NOWHERE = Source("", "").span(0, 0)
Term: TypeAlias = tuple[int, ...]


class TransferPart(NamedTuple):
    source: int
    target: int
    taken: Box
    """In the source's own tensor."""
    put: Box
    """In the target's own tensor."""


def parts(have: Value, want: Value) -> tuple[TransferPart, ...]:
    """For every device that wants the value, who gives it what. Its own copy first, then its counterpart, then whoever
    has it. Of a sum whose terms stay apart, only those that have the same term: were each to take any, one would count
    twice and another would be lost."""
    same = have.tensor if not have.tensor.name else replace(have.tensor, name="")  # however it is called
    return _parts(same, have.layout, want.layout, have.samples, have.inner, want.inner)


def _anywhere(layout: Layout) -> Layout:
    """The same on the first devices of a mesh."""
    mesh = Mesh("", axes_of(layout.where), NOWHERE)
    return Layout(Submesh(mesh), layout.placements, layout.inner)


@lru_cache(maxsize=65536)
def _parts(
    tensor: Tensor,
    have: Layout,
    want: Layout,
    samples: int,
    inner: tuple[tuple[int, int], ...],
    wanted_inner: tuple[tuple[int, int], ...],
) -> tuple[TransferPart, ...]:
    here, there = _anywhere(have), _anywhere(want)
    if have.where == want.where and have != here:
        # Stages of a pipeline move their values alike, each among its own devices.
        where = devices_of(have.where)
        alike = _parts(tensor, here, there, samples, inner, wanted_inner)
        return tuple(TransferPart(where[x.source], where[x.target], x.taken, x.put) for x in alike)
    sources = list(zip(devices_of(have.where), have.boxes(tensor, 0, samples, inner), strict=True))
    terms, wanted_terms = (_terms(have, want, layout) for layout in (have, want))
    having: dict[Term, list[tuple[int, Box]]] = {}
    own: dict[tuple[int, Term], tuple[int, Box]] = {}
    for term, one in zip(terms, sources, strict=True):
        having.setdefault(term, []).append(one)
        own[one[0], term] = one
    count = len(wanted_terms)
    found: list[TransferPart] = []
    for k, (device, box) in enumerate(
        zip(devices_of(want.where), want.boxes(tensor, 0, samples, wanted_inner), strict=True)
    ):
        term = wanted_terms[k]
        # Itself first, then its counterpart, then the others: where it comes twice, nothing is left to take.
        first = [own[device, term]] if (device, term) in own else []
        first += [sources[k]] if len(sources) == count else []
        taken: set[Box] = set()
        for source, part in chain(first, having[term]):
            common = _common(box, part)
            if common is None or common in taken:
                continue
            taken.add(common)
            found.append(TransferPart(source, device, _within(common, part), _within(common, box)))
            if common == box:
                break
    return tuple(found)


def _terms(have: Layout, want: Layout, layout: Layout) -> list[Term]:
    """For every device of a layout, which term of a sum it has: its coordinates along the axes where the value is a sum
    before and after."""
    sums = [
        i
        for i, (before, after) in enumerate(zip(have.placements, want.placements, strict=False))
        if before is after and before in (PARTIAL, DEFERRED)
    ]
    points = product(*(range(size) for _, size in axes_of(layout.where)))
    return [tuple(at[i] for i in sums) for at in points]


def _common(one: Box, other: Box) -> Box | None:
    """What is in both; a loop, because it is called for every pair of devices."""
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        low, high = a if a > c else c, b if b < d else d
        if low >= high:
            return None
        found.append((low, high))
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
