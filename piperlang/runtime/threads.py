"""A plan on one process: a thread for every device and stream, messages through memory. For `--executor inline`, and where no Ray is wanted."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.utils import _pytree as pytree

from piperlang.diagnostics import PiperError, error
from piperlang.plan.instruction import Plan
from piperlang.runtime.assemble import assembled
from piperlang.runtime.boxes import take
from piperlang.runtime.execute import Device
from piperlang.runtime.job import Captured, Step, Training
from piperlang.runtime.local import Switchboard
from piperlang.runtime.optimize import Optimizers
from piperlang.runtime.streams import Failed, Streams
from piperlang.runtime.worker import _resident


class ThreadJob:
    """The same interface as a Job."""

    def __init__(self, plan: Plan, captured: Captured, training: Training, timeout: float = 60.0, loss_dtype: str = "float32") -> None:
        self.plan, self.captured = plan, captured
        torch.manual_seed(training.seed)
        model = training.make_model()
        weights = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        pieces = []
        for kind in plan.kinds:
            found = captured.pieces(kind["chunk"], kind["samples"], kind["arranged"])
            pieces.append(getattr(found, "F" if kind["op"] == "R" else kind["op"]))
        board = self.board = Switchboard(plan.groups, timeout)
        self.devices = [
            Device(device, plan.kinds, pieces, weights, Optimizers(training.optimizer, training.lr_schedule, training.masters), board.join(device.device), torch.device("cpu"), training.seed)
            for device in plan.devices
        ]
        for device in self.devices:
            device.loss_dtype = getattr(torch, loss_dtype)
        self.streams = [Streams(device.plan.instructions, device.execute, f"{device.plan.device}:") for device in self.devices]
        self.steps = 0

    def begin(self, batch: tuple[Any, Any], gradients: bool = False) -> tuple[list[torch.Tensor], bool]:
        flat = pytree.tree_leaves(batch)
        self.captured.check_batch(flat)
        return flat, gradients

    def finish(self, begun: tuple[list[torch.Tensor], bool]) -> Step:
        flat, gradients = begun
        started = time.perf_counter()
        named = dict(zip(self.captured.batch_names, flat, strict=True))
        count = self.captured.count(flat)
        failures: list[tuple[Device, Failed]] = []

        def run(device: Device, streams: Streams) -> None:
            try:
                with torch.no_grad():
                    streams.step()
            except Failed as failure:
                failures.append((device, failure))
                self.board.abort()

        for device in self.devices:
            device.begin(self.steps, {key: take(named[name], box) for key, name, box in device.plan.feeds}, count)
            device.last_gradients = {} if gradients else None
        threads = [threading.Thread(target=run, args=pair) for pair in zip(self.devices, self.streams, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise self._failed(*failures[0])
        self.steps += 1
        return Step(sum(device.end() for device in self.devices), time.perf_counter() - started, _resident())

    def step(self, batch: tuple[Any, Any], gradients: bool = False) -> Step:
        return self.finish(self.begin(batch, gradients))

    def _failed(self, device: Device, failure: Failed) -> Exception:
        if isinstance(failure.cause, PiperError):
            return failure.cause
        node = failure.instruction.node
        line = self.plan.lines[node]
        notes = [str(failure), f"it was at {failure.instruction.do} of {self.plan.names[node]}" + (f" ({line})" if line else "")]
        return error("P0604", f"device {device.plan.device} failed", notes=notes, help="the model's own code raised it: run the model without a schedule to see whether it does so too")

    def weights(self) -> dict[str, torch.Tensor]:
        return assembled(self.plan, [device.kept for device in self.devices], self.captured.aliases)

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [dict(device.last_gradients or {}) for device in self.devices]

    def close(self) -> None:
        for streams in self.streams:
            streams.close()

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
