"""Placements: how a tensor is distributed along one axis of a mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from piperlang.core.interned import Interned

Interval: TypeAlias = tuple[int, int]
"""From the first element to the one after the last."""


@dataclass(frozen=True, slots=True, eq=False)
class Placement(Interned):
    shards: ClassVar[bool] = False
    """Whether devices along the axis have different elements."""

    def narrow(self, box: list[Interval], batch: int | None, at: int, of: int) -> None:
        """Narrow the box of a tensor, whose samples are in dimension `batch`, to what device `at` of `of` has."""


def slice_of(interval: Interval, at: int, of: int) -> Interval:
    low, high = interval
    step = (high - low) // of
    return low + at * step, low + (at + 1) * step


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(Placement):
    """Every device has the whole tensor."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Placement):
    """A dimension is divided evenly."""

    dim: int

    shards: ClassVar[bool] = True

    def narrow(self, box: list[Interval], batch: int | None, at: int, of: int) -> None:
        box[self.dim] = slice_of(box[self.dim], at, of)

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True, slots=True, eq=False)
class Batch(Placement):
    """The samples are divided evenly, in whichever dimension of the tensor they are. A tensor without samples is the
    same on every device. Several axes divide samples in an order of their own, which a layout knows (ir/layout.py)."""

    shards: ClassVar[bool] = True

    def __str__(self) -> str:
        return "batch"


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Placement):
    """Every device has a term of a sum."""

    def __str__(self) -> str:
        return "partial"


@dataclass(frozen=True, slots=True, eq=False)
class Deferred(Placement):
    """A term of a gradient that need not be reduced: the gradient of a tensor without samples, along an axis that
    divides the batch. The gradients of weights that follow from it are summed anyway."""

    def __str__(self) -> str:
        return "deferred"


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched(Placement):
    """Tokens are on the device of their expert; how many a device has depends on the data. Tokens that follow different
    expert indices are placed differently."""

    indices: str = ""
    """The tensor of expert indices; empty for those of the chunk itself."""
    experts: int = 0

    shards: ClassVar[bool] = True

    def narrow(self, box: list[Interval], batch: int | None, at: int, of: int) -> None:
        """As if all experts had as many tokens."""
        if batch is not None:
            box[batch] = slice_of(box[batch], at, of)

    def __str__(self) -> str:
        return f"dispatched({self.indices}, {self.experts})" if self.indices else "dispatched"


REPLICATE, BATCH, PARTIAL, DEFERRED, DISPATCHED = Replicate(), Batch(), Partial(), Deferred(), Dispatched()


def dispatched(placements: Iterable[Placement]) -> Dispatched | None:
    """The placement of routed tokens among placements, if there is one."""
    return next((one for one in placements if isinstance(one, Dispatched)), None)


_FIXED = {str(one): one for one in (REPLICATE, BATCH, PARTIAL, DEFERRED, DISPATCHED)}
_SHARD = re.compile(r"shard\((\d+)\)")


def parse(text: str) -> Placement | None:
    """The placement that a saved plan names; None for any other text. Plans name placements within a chunk, which do
    not say whose expert indices are followed."""
    shard = _SHARD.fullmatch(text)
    return Shard(int(shard[1])) if shard else _FIXED.get(text)
