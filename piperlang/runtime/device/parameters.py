"""Parameters and gradients: collectives in buckets, the global norm, optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import (
    GatherParameters,
    GradientNorm,
    Interval,
    ParameterUpdate,
    ReduceGradients,
    ScatterGradients,
    Shards,
    Update,
)
from piperlang.plan.sums import owner, travels_alone
from piperlang.runtime.device.values import DeviceValues, executes

ALIGNED = 64
"""Elements: where weights of one message begin, because compiled programs copy those that begin anywhere."""


@executes(GatherParameters)
def gather(device: DeviceValues, x: GatherParameters) -> None:
    """A large weight in equal shards arrives where it stays; the others share one message, and so do all whole weights
    of a device."""
    alone, owned, together = _apart(x.shards)
    for one in alone:
        part = device.values[one.sources[0]]
        whole = _again(device, one.target)
        if whole is None:
            whole = part.new_empty(one.shape)
        else:
            part = part.clone()  # it is a view of the whole, and backends differ in what they allow there
        device.comm.gather_into(x.group, whole.view(-1), part.view(-1))
        device.values[one.target] = whole
    # A message is of one dtype: torch.cat would convert.
    for dtype in dict.fromkeys(device.values[one.sources[0]].dtype for one in together):
        alike = [one for one in together if device.values[one.sources[0]].dtype == dtype]
        _gather_together(device, x.group, alike)
    for (member, _), weights in _by_owner(device, owned).items():
        _broadcast(device, x.group, member, weights)


def _by_owner(device: DeviceValues, owned: Sequence[tuple[int, Shards]]) -> dict[tuple[int, torch.dtype], list[Shards]]:
    found: dict[tuple[int, torch.dtype], list[Shards]] = {}
    for member, one in owned:
        found.setdefault((member, device.values[one.sources[0]].dtype), []).append(one)
    return found


def _broadcast(device: DeviceValues, group: int, member: int, weights: Sequence[Shards]) -> None:
    parts = [device.values[one.sources[0]].flatten() for one in weights]
    sizes = [prod(one.shape) for one in weights]
    flat = torch.cat(parts) if device.rank(group) == member else parts[0].new_empty(sum(sizes))
    device.comm.broadcast(group, flat, member)
    for one, part in zip(weights, torch.split(flat, sizes), strict=True):
        whole = _again(device, one.target)
        device.values[one.target] = part.view(one.shape) if whole is None else whole.copy_(part.view(one.shape))


def _gather_together(device: DeviceValues, group: int, together: Sequence[Shards]) -> None:
    sizes = [max(high - low for low, high in one.cuts) for one in together]
    flat = [device.values[one.sources[0]].flatten() for one in together]
    mine = torch.cat([_padded(part, size) for part, size in zip(flat, sizes, strict=True)])
    everyone = mine.new_empty(len(together[0].cuts), mine.numel())
    if mine.numel():  # all weights may be empty
        device.comm.gather_into(group, everyone.view(-1), mine)
    wholes = _joined(everyone, together, sizes)
    kept = [_again(device, one.target) for one in together]
    again = [(old, whole) for old, whole in zip(kept, wholes, strict=True) if old is not None]
    if again:
        torch._foreach_copy_([old for old, _ in again], [whole for _, whole in again])
    for one, old, whole in zip(together, kept, wholes, strict=True):
        device.values[one.target] = whole if old is None else old


def _joined(everyone: torch.Tensor, weights: Sequence[Shards], sizes: list[int]) -> list[torch.Tensor]:
    """Whole weights, from the message of every member. They are parts of one tensor, made by one copy: a GPU takes
    longer to begin that of a small weight than for the copy."""
    pieces, numbers = [], [prod(one.shape) for one in weights]
    for one, number, parts in zip(weights, numbers, torch.split(everyone, sizes, 1), strict=True):
        pieces += [part[: high - low] for part, (low, high) in zip(parts, one.cuts, strict=True)]
        pieces.append(everyone.new_empty(-number % ALIGNED))
    spaces = [number + -number % ALIGNED for number in numbers]
    joined = torch.split(torch.cat(pieces), spaces)
    return [part[:number].view(one.shape) for one, number, part in zip(weights, numbers, joined, strict=True)]


def _again(device: DeviceValues, key: ValueId) -> torch.Tensor | None:
    """The storage of a weight before its update, if it is gathered to be kept: nothing reads the old one any more."""
    old = device.before.get(key)
    return None if old is None else device.values[old]


@executes(ScatterGradients)
def scatter(device: DeviceValues, x: ScatterGradients) -> None:
    """A large gradient in equal shards is sent from where it is; the others share one message, and so do all gradients
    that one device gets whole."""
    me = device.rank(x.group)
    alone, owned, together = _apart(x.shards)
    for one in alone:
        total = device.total(one.sources)
        low, high = one.cuts[me]
        mine = total.new_empty(high - low)
        device.comm.scatter_into(x.group, mine, total.contiguous().view(-1))
        device.put(one.target, mine)
    for member in dict.fromkeys(member for member, _ in owned):
        _reduce_to(device, x.group, member, [one for its, one in owned if its == member])
    if not together:
        return
    totals = [device.total(one.sources).flatten() for one in together]
    sizes = [max(high - low for low, high in one.cuts) for one in together]
    parts = torch.cat(
        [
            _padded(total[slice(*one.cuts[rank])], size)
            for rank in range(len(together[0].cuts))
            for one, total, size in zip(together, totals, sizes, strict=True)
        ]
    )
    mine = parts.new_empty(sum(sizes))
    if mine.numel():
        device.comm.scatter_into(x.group, mine, parts)
    start = 0
    for one, size in zip(together, sizes, strict=True):
        low, high = one.cuts[me]
        device.put(one.target, mine[start : start + high - low])
        start += size


def _reduce_to(device: DeviceValues, group: int, member: int, gradients: Sequence[Shards]) -> None:
    flat = torch.cat([device.total(one.sources).flatten() for one in gradients])
    device.comm.reduce(group, flat, member)
    start = 0
    for one in gradients:
        size = prod(one.shape)
        mine = flat[start : start + size].clone() if device.rank(group) == member else flat.new_empty(0)
        device.put(one.target, mine)
        start += size


@executes(ReduceGradients)
def reduce(device: DeviceValues, x: ReduceGradients) -> None:
    totals = [device.total(one.sources) for one in x.shards]
    flat = torch.cat([total.flatten() for total in totals])
    if x.share is not None and x.share != 1.0:
        flat *= x.share
    if flat.numel():
        device.comm.all_reduce(x.group, flat)
    start = 0
    for one, total in zip(x.shards, totals, strict=True):
        device.values[one.target] = flat[start : start + total.numel()].view(total.shape)
        start += total.numel()


@executes(GradientNorm)
def norm(device: DeviceValues, x: GradientNorm) -> None:
    """What to scale all gradients by, so that their norm is at most the limit; torch's own rule."""
    parts = [_gradient_part(device.total(term.gradients), term.gradient_part) for term in x.terms if term.counts]
    total = torch.zeros(1, dtype=torch.float64, device=device.where)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        alike = [part for part in parts if part.dtype == dtype]
        norms = torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))
        total += torch.stack(norms).double().square().sum()
    if x.losses:  # not a number if one of them is none, or infinite
        total += 0.0 * torch.stack([device.values[key].detach().double().view(()) for key in x.losses]).sum()
    device.comm.all_reduce(x.group, total)
    device.norm = total.sqrt()
    if x.skips:
        device.skip = device.norm.isfinite().logical_not().float().view(())
    device.values[x.target] = None if x.limit is None else (x.limit / (device.norm + 1e-6)).clamp(max=1.0)


@executes(Update)
def update(device: DeviceValues, x: Update) -> None:
    """In place: nothing reads the old weights any more."""
    scale = None if x.scale is None else device.values[x.scale]
    weights, gradients = [], []
    for change in x.parameters:
        gradient = device.total(change.gradients)
        if device.last_gradients is not None:
            device.last_gradients[change.old] = gradient.detach().clone()
        weights.append(updated_part(device.values[change.old], change))
        gradients.append(_gradient_part(gradient, change.gradient_part))
    if scale is not None:
        gradients = _scaled(gradients, scale)
    # Only if the optimizers cannot leave out a step themselves, the host waits for the norm.
    skip = device.skip if device.skip is None or device.optimizers.skip_on_device else None
    if skip is not None or not device.skipped:
        device.optimizers.update(device.plan.device, x.writes[0], weights, gradients, skip)
    for change, weight in zip(x.parameters, weights, strict=True):
        device.values[change.new] = weight


def _scaled(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> list[torch.Tensor]:
    """In one call for all of a dtype."""
    found: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in gradients):
        places = [i for i, one in enumerate(gradients) if one.dtype == dtype]
        products = torch._foreach_mul([gradients[i] for i in places], scale.to(dtype).view(()))
        found.update(zip(places, products, strict=True))
    return [found[i] for i in range(len(gradients))]


def updated_part(weight: torch.Tensor, change: ParameterUpdate) -> torch.Tensor:
    """The part of a kept weight that an update changes: a view."""
    return weight if change.part is None else weight.view(-1)[slice(*change.part)]


def _gradient_part(gradient: torch.Tensor, part: Interval | None) -> torch.Tensor:
    return gradient if part is None else gradient.flatten()[slice(*part)]


def _apart(shards: Sequence[Shards]) -> tuple[list[Shards], list[tuple[int, Shards]], list[Shards]]:
    """Weights with a message of their own; those that one device has whole, with its number in the group; and those
    that share one message."""
    alone = [one for one in shards if travels_alone(one)]
    owned = [(member, one) for one in shards if (member := owner(one)) is not None]
    return alone, owned, [one for one in shards if not travels_alone(one) and owner(one) is None]


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    return part if part.numel() == size else torch.cat([part, part.new_zeros(size - part.numel())])
