"""The elements that a dropout keeps, as one operator.

It is one operator instead of the dozen that compute it, because a sharded chunk must be able to tell it which part of
the whole tensor a device has: the mask hashes positions in the unsharded tensor, so it does not depend on the sharding.

`rng` is an int64 tensor of [seed and step mixed, index of the first sample here, coordinate of this device along the
chunk's first shard axis, along its second, ...]. A chunk that is not sharded reads only the first two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_BITS = 24
_SCHEMA = "(Tensor like, Tensor rng, int operator, float p, int samples, int[] divided=[]) -> Tensor"


@torch.library.custom_op("piper::keep", mutates_args=(), schema=_SCHEMA)
def keep(
    like: torch.Tensor, rng: torch.Tensor, operator: int, p: float, samples: int, divided: Sequence[int] = ()
) -> torch.Tensor:
    """True where an element of `like` is kept. `divided`: (dim, index into `rng` of the coordinate, size of the axis),
    flattened; outer axes first."""
    return uniform(like, rng, operator, samples, divided) >= p


@keep.register_fake
def _(
    like: torch.Tensor, rng: torch.Tensor, operator: int, p: float, samples: int, divided: Sequence[int] = ()
) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.bool, device=like.device)


def uniform(
    like: torch.Tensor, rng: torch.Tensor, operator: int, samples: int, divided: Sequence[int] = ()
) -> torch.Tensor:
    """Uniform numbers in [0, 1) in the shape of `like`, the local part of a tensor whose first dimension is the batch
    dimension."""
    at, numel = _positions(like, rng, divided)
    x = (at + rng[1] * (numel // samples)) * -7046029254386353131 + (rng[0] + signed(operator * 6364136223846793005))
    for multiplier in (-4658895280553007687, -7723592293110705685, 2862933555777941757):
        x = (x ^ (x >> 31)) * multiplier
    found: torch.Tensor = ((x >> (64 - _BITS)) & (2**_BITS - 1)).to(torch.float32) * 2.0**-_BITS
    return found


def _positions(like: torch.Tensor, rng: torch.Tensor, divided: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The row-major index of each element in the unsharded tensor, and the number of elements of that tensor."""
    starts: list[torch.Tensor | int] = [0] * like.dim()
    sizes = list(like.shape)
    for dim, index, size in reversed(list(_triples(divided))):  # the innermost axis has the smallest shards
        starts[dim] = starts[dim] + rng[index] * sizes[dim]
        sizes[dim] *= size
    at = torch.zeros((), dtype=torch.int64, device=like.device)
    stride = 1
    for dim in reversed(range(like.dim())):
        along = torch.arange(like.shape[dim], dtype=torch.int64, device=like.device) + starts[dim]
        at = at + (along * stride).view(-1, *[1] * (like.dim() - dim - 1))
        stride *= sizes[dim]
    return at, stride


def _triples(divided: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(divided[::3], divided[1::3], divided[2::3], strict=True)


def signed(x: int) -> int:
    """The integer wrapped to int64."""
    return (x + 2**63) % 2**64 - 2**63
