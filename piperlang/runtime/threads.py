"""A plan in one process: one thread per device and stream, messages through memory. For `--executor inline`, and to run
without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from piperlang.capture.differentiate import Piece
from piperlang.capture.held import hold
from piperlang.capture.seeding import seeded
from piperlang.capture.tensors import named_tensors
from piperlang.plan.instructions import Compute
from piperlang.plan.plan import Plan
from piperlang.runtime.assemble import assembled, known_to, rest_of
from piperlang.runtime.boxes import take
from piperlang.runtime.device import Device
from piperlang.runtime.failure import failed, failure_of
from piperlang.runtime.job import Captured, Step, Training
from piperlang.runtime.local import Switchboard
from piperlang.runtime.optimize import Optimizers, updated_weights
from piperlang.runtime.streams import Failed, Streams
from piperlang.runtime.worker import _resident


class ThreadJob:
    """The same interface as a Job."""

    def __init__(
        self, plan: Plan, captured: Captured, training: Training, timeout: float = 60.0, loss_dtype: str = "float32"
    ) -> None:
        self.plan, self.captured, self.timeout = plan, captured, timeout
        with seeded(training.seed):  # `data` may use the same generators, so their state is restored
            model = training.make_model()
            hold(model)
        weights = named_tensors(model) | dict(captured.constants)
        self.rest = rest_of(model, known_to(plan, captured.aliases))
        pieces, board = _pieces(plan, captured), Switchboard(plan.groups, timeout)
        devices = [
            Device(
                device,
                plan.programs,
                plan.groups,
                pieces,
                weights,
                board.join(device.device),
                torch.device("cpu"),
                training.seed,
            )
            for device in plan.devices
        ]
        updates = [update for device in devices for update in device.updates()]
        self.optimizers = Optimizers(
            model, training.optimizer, training.lr_schedule, updates, training.masters, updated_weights(plan)
        )
        for device in devices:
            device.optimizers = self.optimizers
            device.loss_dtype = getattr(torch, loss_dtype)
        self.training = _Routine(plan, captured, board, devices)
        self.evaluation: _Routine | None = None
        self.steps = 0

    def prepare(self, plan: Plan, captured: Captured) -> None:
        pieces, board = _pieces(plan, captured), Switchboard(plan.groups, self.timeout)
        devices = [
            Device(
                device,
                plan.programs,
                plan.groups,
                pieces,
                {},
                board.join(device.device),
                trained.where,
                trained.seed,
                trained.kept,
            )
            for device, trained in zip(plan.devices, self.training.devices, strict=True)
        ]
        self.evaluation = _Routine(plan, captured, board, devices)

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        assert self.evaluation is not None, "call prepare() with an evaluation plan first"
        return self.evaluation.run(self.steps, self.evaluation.checked(batch))

    def begin(self, batch: tuple[Any, Any], gradients: bool = False) -> tuple[list[torch.Tensor], bool]:
        self.captured.check_state()
        self._check_reads()
        # Copies: `data` may write the next batch into the same memory before this step has run.
        return [tensor.to("cpu", copy=True) for tensor in self.training.checked(batch)], gradients

    def _check_reads(self) -> None:
        """Code that runs between steps must leave what the optimizer reads as it is."""
        if self.optimizers.reads is not None:
            self.optimizers.reads.check()

    def finish(self, begun: tuple[list[torch.Tensor], bool]) -> Step:
        flat, gradients = begun
        self._check_reads()  # the next batch may have been made meanwhile
        started = time.perf_counter()
        for device in self.training.devices:
            device.last_gradients = {} if gradients else None
        loss = self.training.run(self.steps, flat)
        self.optimizers.advance()
        if self.optimizers.reads is not None:
            self.optimizers.reads.renew()  # the optimizer itself may change what it reads
        self.steps += 1
        return Step(loss, time.perf_counter() - started, _resident())

    def step(self, batch: tuple[Any, Any], gradients: bool = False) -> Step:
        return self.finish(self.begin(batch, gradients))

    @property
    def alive(self) -> bool:
        """Threads have all weights, whatever fails."""
        return True

    def weights(self) -> dict[str, torch.Tensor]:
        return self.rest.complete(
            assembled(self.plan, [device.kept for device in self.training.devices], self.captured.aliases)
        )

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        return [dict(device.last_gradients or {}) for device in self.training.devices]

    def close(self) -> None:
        for routine in (self.training, self.evaluation):
            if routine is not None:
                routine.close()

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(plan: Plan, captured: Captured) -> list[Piece]:
    found = []
    for program in plan.programs:
        pieces = captured.pieces(program.chunk, program.samples, program.sharding)
        found.append(getattr(pieces, "F" if program.op == "R" else program.op))
    return found


class _Routine:
    """A plan with its devices: for training or for evaluation."""

    def __init__(self, plan: Plan, captured: Captured, board: Switchboard, devices: Sequence[Device]) -> None:
        self.plan, self.captured, self.board, self.devices = plan, captured, board, devices
        self.streams = [
            Streams(device.plan.instructions, device.execute, f"{device.plan.device}:") for device in devices
        ]

    def checked(self, batch: tuple[Any, Any]) -> list[torch.Tensor]:
        return self.captured.flatten(batch)

    def run(self, step: int, flat: list[torch.Tensor]) -> float:
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
            device.begin(step, {key: take(named[name], box) for key, name, box in device.plan.feeds}, count)
        threads = [threading.Thread(target=run, args=pair) for pair in zip(self.devices, self.streams, strict=True)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: devices would wait for others that have stopped
            self.close()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if failures:
            raise self._failed(*failures[0])
        return sum(device.end() for device in self.devices)

    def close(self) -> None:
        self.board.abort()
        for streams in self.streams:
            streams.close()

    def _failed(self, device: Device, failure: Failed) -> Exception:
        instruction = failure.instruction
        line = self.plan.lines[instruction.node]
        at = f"it was running {instruction.op} of {self.plan.names[instruction.node]}" + (f" ({line})" if line else "")
        piece = device.pieces[instruction.program] if isinstance(instruction, Compute) else None
        return failed(f"device {device.plan.device}", failure_of(failure.cause), piece, [at], here=True)
