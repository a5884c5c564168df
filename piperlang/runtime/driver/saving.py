"""What processes write of a checkpoint: each the parts that it was given, copied to host memory first, so that training
goes on while a thread writes them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from piperlang.plan.instructions import Update
from piperlang.plan.plan import Plan
from piperlang.runtime.checkpoint.files import Folder, write_part
from piperlang.runtime.checkpoint.manifest import Piece, StoredFile, StoredTensor, TensorId
from piperlang.runtime.checkpoint.ranges import IndexRange, chosen
from piperlang.runtime.device import Device
from piperlang.runtime.driver.assemble import Rest
from piperlang.runtime.optimizer.optimize import Optimizers
from piperlang.runtime.optimizer.saved import SavedTensor, saved

Parts = frozenset[tuple[str, IndexRange]]


@dataclass(frozen=True)
class Assigned:
    """What one process saves."""

    file: str
    weights: Parts = frozenset()
    updates: Parts = frozenset()
    """Parts of weights whose optimizer state is saved: ZeRO shards updates further than weights."""


class WrittenTensor(NamedTuple):
    """A part of a tensor that a process has written."""

    name: TensorId
    dtype: str
    range: IndexRange
    like: bool
    key: str


@dataclass(frozen=True)
class WrittenPart:
    """What one process has written."""

    name: str
    file: StoredFile
    tensors: Sequence[WrittenTensor]
    trees: Mapping[str, Any]


# ------------------------------------------------------------------------------------------------- who saves what


def assigned(plan: Plan, constants: Collection[str], together: bool = False) -> list[Assigned]:
    """For every device of a plan, what it saves: not `constants`, which belong to the program and may be others when
    the model file has changed. Of devices that have the same, the one that saves the least so far.
    `together`: all devices are in one process, which saves everything."""
    kept: dict[str, dict[IndexRange, list[int]]] = {}
    updated: dict[str, dict[IndexRange, list[int]]] = {}
    for rank, device in enumerate(plan.devices):
        for shard in device.weights.values():
            if shard.weight not in constants:
                at = IndexRange.normal(shard.box, shard.interval)
                kept.setdefault(shard.weight, {}).setdefault(at, []).append(rank)
        for instruction in device.instructions:
            for change in instruction.parameters if isinstance(instruction, Update) else ():
                shard = device.weights[change.old]
                at = IndexRange.normal(shard.box, shard.updated(change.part))
                updated.setdefault(change.weight, {}).setdefault(at, []).append(rank)
    busy = [0] * len(plan.devices)
    weights, updates = ([set[tuple[str, IndexRange]]() for _ in plan.devices] for _ in range(2))
    for owners, mine in ((kept, weights), (updated, updates)):
        for name, ranges in owners.items():
            shape = shape_of(kept[name])
            boxes = chosen([at.box for at in ranges if at.numel], shape)
            for at, ranks in ranges.items():
                if at.box in boxes and at.numel:
                    rank = 0 if together else min(ranks, key=lambda one: (busy[one], one))
                    busy[rank] += at.numel
                    mine[rank].add((name, at))
    return [
        Assigned(f"part-{rank:05}.safetensors", frozenset(weights[rank]), frozenset(updates[rank]))
        for rank in range(1 if together else len(plan.devices))
    ]


def shape_of(ranges: Collection[IndexRange]) -> tuple[int, ...]:
    """The shape of a weight that is there in these parts."""
    boxes = [one.box for one in ranges]
    return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))


# --------------------------------------------------------------------------------------------------- in one process


@dataclass
class Snapshot:
    """A copy in host memory of what a process saves."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    written: list[WrittenTensor] = field(default_factory=list)
    trees: dict[str, Any] = field(default_factory=dict)

    def copy(self, tensors: Sequence[SavedTensor], room: HostMemory) -> None:
        """Always copies: the next step writes into the tensors."""
        found = [one.tensor.detach() for one in tensors]
        for one, tensor, copy in zip(tensors, found, room.like(found), strict=True):
            key = f"{one.name} {one.range}"
            self.tensors[key] = copy.copy_(tensor, non_blocking=True)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.written.append(WrittenTensor(one.name, dtype, one.range, one.like, key))
        if any(tensor.is_cuda for tensor in found):
            torch.cuda.synchronize()


class HostMemory:
    """For the snapshots of one process. It is kept from one to the next: to pin memory, which makes copies from a GPU
    many times faster, takes longer than to use it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for all of them, contiguous, next to each other."""
        sizes = [-(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED for tensor in tensors]
        if self.memory.numel() < sum(sizes):
            self.memory = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is made
            self.memory = _pinned(sum(sizes), any(tensor.is_cuda for tensor in tensors))
        starts = [0, *accumulate(sizes)]
        return [
            self.memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=False)
        ]


ALIGNED = 64


def _pinned(size: int, pin: bool) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    except RuntimeError:  # the system limits memory that is pinned
        return torch.empty(size, dtype=torch.uint8)


def snapshot(
    devices: Sequence[Device], optimizers: Optimizers, mine: Assigned, rest: Rest | None, room: HostMemory
) -> Snapshot:
    """`rest`: of the model, in the process that has it."""
    found = Snapshot()
    tensors = list(_tensors(devices, optimizers, mine, found.trees))
    for name, value in (rest.others if rest is not None else {}).items():
        if isinstance(value, torch.Tensor):
            tensors.append(SavedTensor(TensorId("rest", name), value, IndexRange.whole(value.shape), like=False))
    found.copy(tensors, room)
    return found


def check_state(devices: Sequence[Device], optimizers: Optimizers, mine: Assigned) -> None:
    """Raises P0610 if something cannot be saved."""
    for _ in _tensors(devices, optimizers, mine, {}):
        pass


def _tensors(
    devices: Sequence[Device], optimizers: Optimizers, mine: Assigned, trees: dict[str, Any]
) -> Iterator[SavedTensor]:
    left = set(mine.weights)
    for device in devices:
        for key, shard in device.plan.weights.items():
            at = IndexRange.normal(shard.box, shard.interval)
            if (shard.weight, at) in left:
                left.discard((shard.weight, at))
                yield SavedTensor(TensorId("weight", shard.weight), device.kept[key].view(at.shape), at)
    assert not left, f"devices do not have {left}"
    yield from saved(optimizers, lambda weight, at: (weight, at) in mine.updates, trees)


class Writer:
    """Writes snapshots of one process, one at a time, in a thread."""

    def __init__(self) -> None:
        self.result: Future[WrittenPart] | None = None
        self.room = HostMemory()

    def write(self, folder: Folder, mine: Assigned, found: Snapshot) -> None:
        assert self.result is None or self.result.done(), "a checkpoint is being written"
        result: Future[WrittenPart] = Future()
        self.result = result

        def run() -> None:
            try:
                file = write_part(folder / mine.file, found.tensors)
                result.set_result(WrittenPart(mine.file, file, found.written, found.trees))
            except BaseException as problem:
                result.set_exception(problem)

        # Not an executor: Python would wait for its threads when the process is to end.
        threading.Thread(target=run, name="piperlang-checkpoint", daemon=True).start()

    def written(self) -> WrittenPart:
        """Waits for the file."""
        assert self.result is not None
        return self.result.result()


# ------------------------------------------------------------------------------------------------------- the whole


def merged(written: Sequence[WrittenPart], shapes: Mapping[str, tuple[int, ...]]) -> dict[TensorId, StoredTensor]:
    """All tensors of a checkpoint. `shapes`: of the weights."""
    found: dict[TensorId, tuple[str, tuple[int, ...], list[Piece]]] = {}
    for one in written:
        for tensor in one.tensors:
            shape = shapes[tensor.name.name] if tensor.like else tensor.range.shape
            dtype, _, pieces = found.setdefault(tensor.name, (tensor.dtype, shape, []))
            assert dtype == tensor.dtype, f"{tensor.name} is of types {dtype} and {tensor.dtype}"
            pieces.append(Piece(tensor.range, one.name, tensor.key))
    return {name: StoredTensor(dtype, shape, tuple(pieces)) for name, (dtype, shape, pieces) in found.items()}
