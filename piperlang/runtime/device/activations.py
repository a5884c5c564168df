"""Activations: point-to-point transfers, collectives, token routing, local copies, host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Combine,
    Copy,
    Dispatch,
    ExchangeSplits,
    Fetch,
    LocalCopy,
    Offload,
    Receive,
    Send,
)
from piperlang.runtime.box import take
from piperlang.runtime.device.splits import Splits, leaving
from piperlang.runtime.device.values import DeviceValues, executes

# ------------------------------------------------------------------------------------------------------- point to point


@executes(Send)
def send(device: DeviceValues, x: Send) -> None:
    value = _signal(device) if x.value is None else device.values[x.value]
    for one in x.messages:
        part = value if one.box is None else take(value, one.box)
        device.comm.send(one.peer, one.tag, part.contiguous(), x.stream)


def _signal(device: DeviceValues) -> torch.Tensor:
    """The message without data: the receiver may go on."""
    return torch.ones(1, dtype=torch.uint8, device=device.where)


@executes(Receive)
def recv(device: DeviceValues, x: Receive) -> None:
    out = torch.empty(x.shape, dtype=getattr(torch, x.dtype), device=device.where)
    for one in x.messages:
        if one.box is None:
            device.comm.recv(one.peer, one.tag, out, x.stream)
        else:
            part = out.new_empty(one.shape)
            device.comm.recv(one.peer, one.tag, part, x.stream)
            take(out, one.box).copy_(part)
    _copy_local(device, out, x.local)
    device.put(x.target, out)


@executes(Copy)
def copy(device: DeviceValues, x: Copy) -> None:
    out = torch.zeros(x.shape, dtype=getattr(torch, x.dtype), device=device.where)
    _copy_local(device, out, x.copies)
    device.put(x.target, out)


def _copy_local(device: DeviceValues, out: torch.Tensor, copies: Sequence[LocalCopy]) -> None:
    for one in copies:
        take(out, one.put).copy_(take(device.values[one.source], one.taken))


# ---------------------------------------------------------------------------------------------------------- collectives


@executes(AllReduce)
def all_reduce(device: DeviceValues, x: AllReduce) -> None:
    value = device.values[x.source].clone(memory_format=torch.contiguous_format)
    device.comm.all_reduce(x.group, value)
    device.put(x.target, value if x.keep is None else take(value, x.keep).contiguous())


@executes(AllToAll)
def all_to_all(device: DeviceValues, x: AllToAll) -> None:
    value = device.values[x.source]
    members = device.groups[x.group].members
    give = torch.cat([take(value, one.box).reshape(-1) for one in x.give]) if x.give else value.new_empty(0)
    given, taken = (
        [sum(torch.Size(one.shape).numel() for one in blocks if one.peer == member) for member in members]
        for blocks in (x.give, x.take)
    )
    arrived = value.new_empty(sum(taken))
    device.comm.exchange(x.group, give, given, arrived, taken)
    out = value.new_empty(x.shape)
    at = 0
    for one in x.take:
        size = torch.Size(one.shape).numel()
        take(out, one.box).copy_(arrived[at : at + size].view(one.shape))
        at += size
    device.put(x.target, out)


# --------------------------------------------------------------------------------------------------- tokens and experts


@executes(ExchangeSplits)
def exchange_splits(device: DeviceValues, x: ExchangeSplits) -> None:
    """Ranks exchange token counts, then the expert indices. On CUDA the host waits here, once for all dispatches and
    combines that follow."""
    chosen, ranks = device.values[x.source], len(device.groups[x.group].members)
    parts = leaving(chosen, x.experts, ranks)
    give = [len(part) for part in parts]
    told = chosen.new_tensor(give)
    counts = torch.empty_like(told)
    device.comm.exchange(x.group, told, [1] * ranks, counts, [1] * ranks)
    splits = Splits(torch.cat(parts), give, counts.tolist())
    first = device.rank(x.group) * (x.experts // ranks)
    device.put(x.target, _exchanged(device, x.group, chosen[splits.order], splits.give, splits.take) - first)
    device.put(x.splits, splits)


@executes(Dispatch)
def dispatch(device: DeviceValues, x: Dispatch) -> None:
    value, splits = device.values[x.source], device.values[x.splits]
    device.put(x.target, _exchanged(device, x.group, value[splits.order], splits.give, splits.take))


@executes(Combine)
def combine(device: DeviceValues, x: Combine) -> None:
    value, splits = device.values[x.source], device.values[x.splits]
    back = _exchanged(device, x.group, value, splits.take, splits.give)
    device.put(x.target, torch.empty_like(back).index_copy_(0, splits.order, back))


def _exchanged(
    device: DeviceValues, group: int, tokens: torch.Tensor, give: list[int], take: list[int]
) -> torch.Tensor:
    """Tokens after an all-to-all: `give[k]` go to member k, `take[k]` come from it."""
    size = torch.Size(tokens.shape[1:]).numel()
    arrived = tokens.new_empty(sum(take), *tokens.shape[1:])
    flat = tokens.contiguous().view(-1)
    device.comm.exchange(group, flat, [size * n for n in give], arrived.view(-1), [size * n for n in take])
    return arrived


# ---------------------------------------------------------------------------------------------------------- host memory


@executes(Offload)
def offload(device: DeviceValues, x: Offload) -> None:
    host = torch.device("cpu")
    device.values[x.target] = {slot: _to(value, host) for slot, value in device.values[x.source].items()}


@executes(Fetch)
def fetch(device: DeviceValues, x: Fetch) -> None:
    device.values[x.target] = {slot: _to(value, device.where) for slot, value in device.values[x.source].items()}


def _to(value: Any, where: torch.device) -> Any:
    """Activations may be tuples of tensors."""
    if isinstance(value, tuple | list):
        return [_to(part, where) for part in value]
    return value.to(where)
