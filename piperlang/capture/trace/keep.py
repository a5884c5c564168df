"""Random numbers by position: the elements that a dropout keeps, and uniform numbers, each as one operator.

A mask is one operator instead of the dozen that compute it, because a sharded chunk must be able to tell it which part
of the whole tensor a device has: it hashes positions in the unsharded tensor, so it does not depend on the sharding.

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
    return _uniform(rng, operator, like.shape, samples, divided) >= p


@keep.register_fake
def _(
    like: torch.Tensor, rng: torch.Tensor, operator: int, p: float, samples: int, divided: Sequence[int] = ()
) -> torch.Tensor:
    return torch.empty(like.shape, dtype=torch.bool, device=like.device)


@torch.library.custom_op(
    "piper::uniform", mutates_args=(), schema="(Tensor rng, int operator, int[] shape, int samples) -> Tensor"
)
def uniform(rng: torch.Tensor, operator: int, shape: Sequence[int], samples: int) -> torch.Tensor:
    """Uniform numbers in [0, 1). Where the first dimension is that of the batch, every sample has its own; otherwise
    all parts of a batch have the same."""
    return _uniform(rng, operator, shape, samples if is_batch(shape, samples) else 0)


@uniform.register_fake
def _(rng: torch.Tensor, operator: int, shape: Sequence[int], samples: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=rng.device)


def is_batch(shape: Sequence[int], samples: int) -> bool:
    """Whether the first dimension may be that of the batch."""
    return bool(shape) and shape[0] % samples == 0 and shape[0] > 0


def _uniform(
    rng: torch.Tensor, operator: int, shape: Sequence[int], samples: int, divided: Sequence[int] = ()
) -> torch.Tensor:
    """Uniform numbers for the local part of a tensor. `samples`: of its first dimension; 0 if that is another."""
    at, numel = _positions(shape, rng, divided)
    if samples:
        at = at + rng[1] * (numel // samples)
    x = at * -7046029254386353131 + (rng[0] + signed(operator * 6364136223846793005))
    for multiplier in (-4658895280553007687, -7723592293110705685, 2862933555777941757):
        x = (x ^ (x >> 31)) * multiplier
    found: torch.Tensor = ((x >> (64 - _BITS)) & (2**_BITS - 1)).to(torch.float32) * 2.0**-_BITS
    return found


def _positions(shape: Sequence[int], rng: torch.Tensor, divided: Sequence[int]) -> tuple[torch.Tensor, int]:
    """The row-major index of each element in the unsharded tensor, and the number of elements of that tensor."""
    starts: list[torch.Tensor | int] = [0] * len(shape)
    sizes = list(shape)
    for dim, index, size in reversed(list(_triples(divided))):  # the innermost axis has the smallest shards
        starts[dim] = starts[dim] + rng[index] * sizes[dim]
        sizes[dim] *= size
    at = torch.zeros((), dtype=torch.int64, device=rng.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(shape[dim], dtype=torch.int64, device=rng.device) + starts[dim]
        at = at + (along * stride).view(-1, *[1] * (len(shape) - dim - 1))
        stride *= sizes[dim]
    return at, stride


def _triples(divided: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return zip(divided[::3], divided[1::3], divided[2::3], strict=True)


def signed(x: int) -> int:
    """The integer wrapped to int64."""
    return (x + 2**63) % 2**64 - 2**63
