"""Batches that workers load, seen from the driver: which workers load them, and whether all have loaded the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pickle import PicklingError
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piperlang.capture.batch.layout import BatchLayout
from piperlang.capture.user.seeding import GeneratorStates
from piperlang.capture.user.slices import WHOLE, Slice
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.runtime.device.failure import failed
from piperlang.runtime.driver.cluster import Cluster, pack
from piperlang.runtime.driver.loading import Loaded, Loading, Part, digests, fingerprint
from piperlang.runtime.driver.shapes import TRAIN, Mode


class NotSent(Exception):
    """What workers need to load batches cannot be sent to them: a container that cannot be pickled."""


class WorkerBatches:
    def __init__(self, cluster: Cluster, devices: Mapping[int, int], loading: Loading) -> None:
        """`devices`: the workers that read parts of batches, with their devices."""
        self.cluster, self.devices, self.loading = cluster, devices, loading
        self.line = line_of_function(loading.data)
        self.coming: Loaded | None = None
        """The batch that is loaded, and not used yet."""
        self.parts: list[Part] = []
        """Of that batch, where workers load slices."""

    def start(self, first: tuple[Any, Any], generators: GeneratorStates) -> Loaded | None:
        """None if workers have loaded `first`, and generators have these states; otherwise what a worker has loaded, or
        why it has loaded nothing."""
        try:
            packed = pack(self.loading)
        except (TypeError, AttributeError, NotImplementedError, PicklingError) as problem:
            raise NotSent(str(problem)) from problem
        found: list[Loaded] = self._call("start_loading", packed)
        self.coming = found[0]
        self.parts = [one.part for one in found if one.part is not None]
        expected = fingerprint([] if self.loading.sliced else first, generators)
        other = next((one for one in found if one.failed or one.fingerprint != expected), None)
        return other or (None if self.has_loaded(first) else found[0])

    def digest(self) -> str:
        """Of the batch that is loaded: the same for any number of workers."""
        assert self.coming is not None
        if not self.parts:
            return self.coming.fingerprint.batch
        samples = {row: one for part in self.parts for row, one in zip(part.slice.rows, part.digests, strict=True)}
        return hashlib.blake2b(b"".join(samples[row] for row in sorted(samples)), digest_size=16).hexdigest()

    def has_loaded(self, batch: tuple[Any, Any]) -> bool:
        """Whether the parts that workers have loaded are parts of this batch."""
        samples = digests(self.loading.layouts[TRAIN].leaves(batch)) if self.parts else ()
        return not any(_other(part, samples) for part in self.parts)

    def _call(self, method: str, *given: Any) -> list[Any]:
        return self.cluster.wait([self.cluster.call(i, method, *given) for i in self.devices])

    def stop(self) -> None:
        self._call("stop_loading")

    def next(self, mode: Mode = "train") -> Loaded:
        """Load the next batch. Raises what the user's code raises."""
        return self.compared_or_raised(self._call("load", mode))

    def unplanned(self) -> tuple[Any, Any]:
        """The batch, where it fits no plan."""
        workers = list(self.devices) if self.loading.sliced else list(self.devices)[:1]
        found: list[tuple[tuple[Any, Any], Slice | None]]
        found = self.cluster.wait([self.cluster.call(i, "unplanned") for i in workers])
        batch, _ = found[0]
        slices = [one for _, one in found if one is not None]
        if not slices:
            return batch
        leaves = [pytree.tree_leaves(part) for part, _ in found]
        whole = [assembled(slices, parts) for parts in zip(*leaves, strict=True)]
        inputs, target = pytree.tree_unflatten(whole, pytree.tree_structure(batch))
        return inputs, target

    def whole_values(self, layout: BatchLayout) -> dict[str, torch.Tensor]:
        """Values of the whole batch that is loaded, where no worker has all of it."""
        if layout.whole is None or not self.parts:
            return {}
        flat = [torch.empty(0)] * len(layout.shapes)
        for i, *parts in zip(layout.whole.reads, *(part.read for part in self.parts), strict=True):
            flat[i] = assembled([part.slice for part in self.parts], parts)
        return dict(zip(layout.names[len(flat) :], layout.whole.of(flat), strict=True))

    def compared_or_raised(self, found: Sequence[Loaded]) -> Loaded:
        loaded, problem = self.compared(found)
        if problem is not None:
            raise problem
        return loaded

    def compared(self, found: Sequence[Loaded]) -> tuple[Loaded, PiperError | None]:
        """What workers have loaded, which must be the same on all of them."""
        first, *others = found
        devices = list(self.devices.values())
        print(first.printed, end="")
        for device, one in zip(devices, found, strict=True):
            if one.failed is not None:
                problem = failed(f"device {device}", one.failed, None, [])
                note = "a worker loads the batches; the driver does with `--data driver`"
                notes = () if self.loading.sliced else (note,)
                return one, PiperError(*(replace(d, notes=(*d.notes, *notes)) for d in problem.diagnostics))
        self.parts = [one.part for one in found if one.part is not None]
        samples: dict[int, bytes] = {}
        for part in self.parts:
            samples = dict(zip(part.slice.rows, part.digests, strict=True)) | samples
        for device, other in zip(devices[1:], others, strict=True):
            if other.part is not None and (other.shapes != first.shapes or _other(other.part, samples)):
                shapes = f"{first.shapes} on device {devices[0]}, {other.shapes} on device {device}"
                return other, error(
                    "P0607",
                    "two workers have read different values of a sample",
                    self.line,
                    notes=[f"as parts of batches of these shapes: {shapes}"] if other.shapes != first.shapes else [],
                    help=f"make a sample depend on its index alone, or {WHOLE}",
                )
            if other.batch != first.batch:
                return other, error(
                    "P0607",
                    f"devices {devices[0]} and {device} have loaded different batches",
                    self.line,
                    help=(
                        "make `data` yield the same batches in every process: draw random numbers from torch, `random`"
                        " or NumPy, or seed your own generator; or load batches in the driver: `--data driver`"
                    ),
                )
        self.coming = max(found, key=lambda one: one.waited)
        return self.coming, None


def _other(part: Part, samples: Sequence[bytes] | Mapping[int, bytes]) -> bool:
    """Whether a worker has loaded other samples than these."""
    if part.slice.rows[-1] >= len(samples) and not isinstance(samples, Mapping):
        return True  # of a larger batch
    return any(samples[row] != one for row, one in zip(part.slice.rows, part.digests, strict=True))


def assembled(slices: Sequence[Slice], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the batch, from the samples that each worker has."""
    whole = parts[0].new_empty(slices[0].samples, *parts[0].shape[1:])
    for one, part in zip(slices, parts, strict=True):
        whole[torch.tensor(one.rows)] = part
    return whole
