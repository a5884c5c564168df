"""Batches that workers load, seen from the driver: which workers load them, and whether all have loaded the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pickle import PicklingError
from typing import Any

from piperlang.capture.user.seeding import GeneratorStates
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.runtime.device.failure import failed
from piperlang.runtime.driver.cluster import Cluster, pack
from piperlang.runtime.driver.loading import Loaded, Loading, fingerprint
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

    def start(self, first: tuple[Any, Any], generators: GeneratorStates) -> Loaded | None:
        """None if workers have loaded `first`, and generators have these states; otherwise what a worker has loaded, or
        why it has loaded nothing."""
        try:
            packed = pack(self.loading)
        except (TypeError, AttributeError, NotImplementedError, PicklingError) as problem:
            raise NotSent(str(problem)) from problem
        found = self._call("start_loading", packed)
        expected = fingerprint(self.loading.layouts[TRAIN].flatten(first), generators)
        self.coming = found[0]
        return next((one for one in found if one.failed is not None or one.fingerprint != expected), None)

    def _call(self, method: str, *given: Any) -> list[Any]:
        return self.cluster.wait([self.cluster.call(i, method, *given) for i in self.devices])

    def stop(self) -> None:
        self._call("stop_loading")

    def next(self, mode: Mode = "train") -> Loaded:
        """Load the next batch. Raises what the user's code raises."""
        return self.compared_or_raised(self._call("load", mode))

    def unplanned(self) -> tuple[Any, Any]:
        """The batch, where it fits no plan."""
        (found,) = self.cluster.wait([self.cluster.call(next(iter(self.devices)), "unplanned")])
        batch: tuple[Any, Any] = found
        return batch

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
                return one, PiperError(*(replace(d, notes=(*d.notes, note)) for d in problem.diagnostics))
        for device, other in zip(devices[1:], others, strict=True):
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
