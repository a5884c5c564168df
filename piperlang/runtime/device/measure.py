"""Measures the memory of a step on a device: every storage that torch allocates, from allocation to release.

Slow, because all live storages are checked after every operator; for tests, and to check a plan's memory estimate.
Buffers inside kernels and backends are not included."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import Send
from piperlang.runtime.device import Device


@dataclass
class Measured:
    """The memory of one step."""

    start: int = 0
    """Bytes at the start of the step: weights, optimizer states, the device's part of the batch."""
    peak: int = 0
    at: int = -1
    """The instruction at the peak."""
    held: list[dict[str, int]] = field(default_factory=list)
    """After every instruction, the bytes of `weights`, `gradients` and `activations` (those saved for the backward)."""
    live: list[int] = field(default_factory=list)
    """After every instruction, all live bytes."""
    stale: list[ValueId] = field(default_factory=list)
    """Values that were still stored although no instruction reads them any more."""


class _Storages:
    """The live storages; several threads allocate them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak, self.at, self.now = 0, -1, -1

    def see(self, values: Any) -> None:
        with self.lock:
            for value in pytree.tree_leaves(values):
                if isinstance(value, torch.Tensor):
                    storage = value.untyped_storage()
                    self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
            total = self.bytes()
            if total > self.peak:
                self.peak, self.at = total, self.now

    def bytes(self) -> int:
        self.known = {key: one for key, one in self.known.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self.known.values())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, storages: _Storages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.storages.see(result)
        return result


class _Quiet:
    """Communication without the buffers of its backend: only its arguments are measured."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.comm, name)

        def unseen(*arguments: Any) -> Any:
            with _disable_current_modes():
                return method(*arguments)

        return unseen


def measured(
    device: Device, settle: Callable[[], None], step: int, feeds: dict[ValueId, torch.Tensor]
) -> tuple[float, Measured]:
    """Run a step of a device in plan order, as the host issues it on CUDA, and measure its memory. With threads, as for
    streams on CPU, instructions may run ahead and use more."""
    storages, found = _Storages(), Measured()
    device.begin(step, feeds)
    storages.see([list(device.values.values()), device.optimizers.states(), device.optimizers.updated()])
    found.start = storages.bytes()
    device.comm, comm = _Quiet(device.comm), device.comm  # type: ignore[assignment]
    for i, instruction in enumerate(device.plan.instructions):
        storages.now = i
        if isinstance(instruction, Send):
            # gloo does not report when a message has been received; in this order it has been, or is about to be
            settle()
        with _Watch(storages), torch.no_grad():
            device.execute(instruction)
        found.held.append(_held(device))
        found.live.append(storages.bytes())
        found.stale += [
            key
            for key in device.values
            if not device.left.get(key) and key not in device.kept and key not in device.permanent
        ]
    settle()
    device.comm = comm
    found.peak, found.at = storages.peak, storages.at
    return device.end(), found


def _held(device: Device) -> dict[str, int]:
    """Bytes by kind. Values that share memory with weights or the batch are not activations."""
    values = dict(device.values)
    weights = _sizes([device.kept, [value for key, value in values.items() if key.kind is Kind.WEIGHT]])
    given = weights | _sizes([values.get(key) for key, _, _ in device.plan.feeds])
    saved = _sizes([value for key, value in values.items() if key.kind in (Kind.SAVED, Kind.RESIDUALS)])
    gradients = _sizes([value for key, value in values.items() if key.kind in (Kind.WEIGHT_GRADIENT, Kind.REDUCED)])
    return {
        "weights": sum(weights.values()),
        "gradients": sum(gradients.values()),
        "activations": sum(size for storage, size in saved.items() if storage not in given),
    }


def _sizes(values: Any) -> dict[int, int]:
    return {
        value.untyped_storage()._cdata: value.untyped_storage().nbytes()
        for value in pytree.tree_leaves(values)
        if isinstance(value, torch.Tensor)
    }
