"""Passes of stage programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import Backward, Compute, Forward, InputGradient, Recompute, WeightGradient
from piperlang.plan.plan import StageProgram
from piperlang.runtime.device.values import DeviceValues, executes


@executes(Forward, Backward, InputGradient, WeightGradient, Recompute)
def compute(device: DeviceValues, x: Compute) -> None:
    program, piece = device.programs[x.program], device.pieces[x.program]
    given: dict[Any, Any] = {}
    for slot, keys in zip(program.inputs, x.inputs, strict=True):
        name = slot[0]
        if name in ("saved", "kept"):
            given.update(device.values[keys[0]])
        elif name == "grad_output":
            given[slot] = _gradient(device, slot[1], keys, x, program)
        elif name == "rng":
            given[slot] = device.random_state(x.first_sample, x.coordinates)
        else:
            given[slot] = device.values[keys[0]]
    taken = [given[slot] for slot in piece.inputs]
    given.clear()
    device.release(x)
    others = [device.values[key] for key in device.reads[id(x)] if key in device.values]
    _store(device, x, program, dict(zip(piece.outputs, piece.call(taken), strict=True)), others)


def _gradient(
    device: DeviceValues, output: int, keys: Sequence[ValueId], x: Compute, program: StageProgram
) -> torch.Tensor:
    if output == program.loss:
        assert x.loss_share is not None
        # Not `torch.tensor`, which copies from the host: on CUDA it would wait for all that its stream has to do.
        return torch.full((), x.loss_share, device=device.where, dtype=device.loss_dtype)
    if not keys:
        zero = next(zero for zero in x.zeros if zero.output == output)
        return torch.zeros(zero.shape, dtype=getattr(torch, zero.dtype), device=device.where)
    total: torch.Tensor = device.values[keys[0]]
    for key in keys[1:]:
        total = total + device.values[key]
    return total


def _store(device: DeviceValues, x: Compute, program: StageProgram, gave: dict[Any, Any], others: list[Any]) -> None:
    """`others`: tensors that the pass has read, and something else will."""
    saved = {slot: value for slot, value in gave.items() if slot[0] == "saved"}
    kept = {slot: value for slot, value in gave.items() if slot[0] == "kept"}
    slots = [] if program.op == "R" else [slot for slot in program.outputs if slot[0] not in ("saved", "kept")]
    device.add([(key, gave.pop(slot)) for slot, key in zip(slots, x.outputs, strict=False) if device.is_added(key)])
    begins = any(key in device.sums for slot, key in zip(slots, x.outputs, strict=False) if slot in gave)
    memory = Counter(map(_memory, _tensors((others, gave)))) if begins else {}
    for slot, key in zip(slots, x.outputs, strict=False):
        if slot in gave and key in device.sums:
            # A gradient that begins a sum is freed at once: all of them, and their sums in float32, are much memory.
            value = gave.pop(slot)
            device.put(key, value, memory[_memory(value)] > 1)
        elif slot in gave:
            device.put(key, gave[slot])
    bundles = [saved] if program.op in ("F", "R") else [kept] if kept else []
    for key, bundle in zip(x.outputs[len(slots) :], bundles, strict=False):
        device.put(key, bundle)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]


def _memory(value: torch.Tensor) -> int:
    """Equal for tensors of one storage. Those of a pass share none of it with weight gradients as they were traced, but
    a compiler may give one tensor for two equal results."""
    return value.untyped_storage().data_ptr()
