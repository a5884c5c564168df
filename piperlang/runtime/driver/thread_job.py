"""A plan in one process: one thread per device and stream. This is `--executor inline`, which needs no Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piperlang.capture.autodiff.pass_graph import PassGraph, TracedModel
from piperlang.capture.user.held import hold
from piperlang.capture.user.seeding import seeded
from piperlang.capture.user.tensors import named_tensors
from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import Compute
from piperlang.plan.plan import Plan
from piperlang.runtime.box import take
from piperlang.runtime.checkpoint.files import Folder
from piperlang.runtime.comm.threads import BACKEND, Switchboard, Threads
from piperlang.runtime.device import Device
from piperlang.runtime.device.failure import failed, failure_of
from piperlang.runtime.driver import restoring
from piperlang.runtime.driver.assemble import Rest, assembled, known_to, rest_of
from piperlang.runtime.driver.saving import Writer, WrittenPart, assigned, check_state, snapshot
from piperlang.runtime.driver.shapes import TRAIN, OtherShapes, PlansByShape, RunKey
from piperlang.runtime.driver.training import StepResult, Training, piece_of
from piperlang.runtime.hardware.kind import DeviceKind, Failed, Streams
from piperlang.runtime.optimizer import saved
from piperlang.runtime.optimizer.average import no_averages, set_averages
from piperlang.runtime.optimizer.optimize import Optimizers, updated_weights


class ThreadJob:
    """The same interface as a Job."""

    def __init__(
        self,
        plan: Plan,
        captured: TracedModel,
        training: Training,
        timeout: float = 60.0,
        loss_dtype: str = "float32",
        backend: Threads = BACKEND,
        others: OtherShapes | None = None,
    ) -> None:
        self.plan, self.captured, self.timeout, self.backend = plan, captured, timeout, backend
        self.restartable, self.lost = False, False  # no thread dies alone
        with seeded(training.seed):  # `data` may use the same generators, so their state is restored
            model = training.make_model()
            hold(model)
        weights: Mapping[str, torch.Tensor] = named_tensors(model) | dict(captured.constants)
        restore = training.restore
        kept: list[dict[ValueId, torch.Tensor] | None] = [None] * len(plan.devices)
        if restore is not None:
            kept = [
                restoring.kept(device, weights, restore.reader, backend.device.claim(rank))
                for rank, device in enumerate(plan.devices)
            ]
            weights = restoring.Restored(weights, restore.reader)
        self.rest = rest_of(model, weights, known_to(plan, captured.aliases))
        pieces, board = _pieces(plan, captured), backend.switchboard(plan.groups, timeout)
        devices = [
            Device(
                device,
                plan.programs,
                plan.groups,
                pieces,
                weights,
                board.join(device.device),
                backend.device.claim(rank),
                training.seed,
                kept[rank],
            )
            for rank, device in enumerate(plan.devices)
        ]
        updates = [update for device in devices for update in device.updates()]
        self.optimizers = Optimizers(
            model,
            training.optimizer,
            training.lr_schedule,
            updates,
            training.masters,
            updated_weights(plan),
            training.ema,
        )
        for device in devices:
            device.optimizers = self.optimizers
            device.loss_dtype = getattr(torch, loss_dtype)
        self.training = _PlanRun(plan, captured, board, devices, backend.device)
        self.shapes = PlansByShape(others, self._prepared)
        self.shapes.plans[TRAIN] = self.training
        self.steps, self.last, self.writer = 0, self.training, Writer()
        if restore is not None:
            self.steps = restore.step
            saved.restore(self.optimizers, restore.reader, restore.new_options)

    def _prepared(self, key: RunKey, plan: Plan, captured: TracedModel) -> _PlanRun:
        """Sets up another plan on the same weights."""
        pieces, board = _pieces(plan, captured), self.backend.switchboard(plan.groups, self.timeout)
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
        for device in devices:
            device.optimizers = self.optimizers
            device.loss_dtype = self.training.devices[0].loss_dtype
        return _PlanRun(plan, captured, board, devices, self.backend.device)

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        """The loss of a batch in evaluation mode."""
        run = self.shapes[self.shapes.fitting("evaluate", batch)]
        return run.run(self.steps, run.captured.layout.flatten(batch))

    def begin(self, batch: tuple[Any, Any], gradients: bool = False) -> _Begun:
        for _, one in self.shapes.of("train"):
            one.captured.check_state()
        self._check_reads()
        run = self.shapes[self.shapes.fitting("train", batch)]
        # Copies: `data` may write the next batch into the same memory before this step has run.
        flat = [tensor.to("cpu", copy=True) for tensor in run.captured.layout.flatten(batch)]
        return _Begun(run, flat, gradients)

    def _check_reads(self) -> None:
        """Code that runs between steps must leave what the optimizer reads as it is."""
        for reads in self.optimizers.reads:
            reads.check()

    def finish(self, begun: _Begun) -> StepResult:
        run, flat, gradients = begun
        self._check_reads()  # the next batch may have been made meanwhile
        started = time.perf_counter()
        self.last = run
        for device in run.devices:
            device.last_gradients = {} if gradients else None
        loss = run.run(self.steps, flat)
        skipped = any(device.skipped for device in run.devices)
        norm = next((float(device.norm) for device in run.devices if device.norm is not None), None)
        self.optimizers.advance(skipped)
        for reads in self.optimizers.reads:
            reads.renew()  # the optimizer itself may change what it reads
        self.steps += 1
        seconds, memory = time.perf_counter() - started, self.backend.device.memory()
        return StepResult(loss, seconds, memory, run.plan.counted, norm, skipped)

    def step(self, batch: tuple[Any, Any], gradients: bool = False) -> StepResult:
        return self.finish(self.begin(batch, gradients))

    @property
    def alive(self) -> bool:
        """Threads have all weights, whatever fails."""
        return True

    def weights(self, averaged: bool = False) -> dict[str, torch.Tensor]:
        """All weights, unsharded, as they are now, or their moving averages."""
        whole = assembled(self.plan, [device.kept for device in self.training.devices], self.captured.aliases)
        if averaged and self.optimizers.averages is None:
            raise no_averages()
        if averaged:
            set_averages(whole, self.optimizers.averaged())
        return self.rest.complete(whole)

    def check_state(self) -> None:
        """Raises P0610 if the state of training cannot be saved."""
        (mine,) = assigned(self.plan, self.captured.unsaved, together=True)
        check_state(self.training.devices, self.optimizers, mine)

    def snapshot(self, folder: Folder) -> None:
        """Copies the state of training, which is then written into the folder."""
        (mine,) = assigned(self.plan, self.captured.unsaved, together=True)
        found = snapshot(self.training.devices, self.optimizers, mine, self.rest, self.writer.room)
        self.writer.write(folder, mine, found)

    def written(self) -> list[WrittenPart]:
        """Waits for the file. Steps may run meanwhile."""
        return [self.writer.written()]

    def check_folder(self, folder: Path) -> None:
        """This process writes everything."""

    def model_entries(self) -> Rest:
        return self.rest

    def gradients(self) -> list[dict[ValueId, torch.Tensor]]:
        return [dict(device.last_gradients or {}) for device in self.last.devices]

    def close(self) -> None:
        for run in self.shapes.plans.values():
            run.close()

    def __enter__(self) -> ThreadJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pieces(plan: Plan, captured: TracedModel) -> list[PassGraph]:
    return [piece_of(captured, program) for program in plan.programs]


class _Begun(NamedTuple):
    """A step that has its batch."""

    run: _PlanRun
    flat: list[torch.Tensor]
    gradients: bool


class _PlanRun:
    """A plan with its devices: for training or for evaluation."""

    def __init__(
        self, plan: Plan, captured: TracedModel, board: Switchboard, devices: Sequence[Device], kind: DeviceKind
    ) -> None:
        self.plan, self.captured, self.board, self.devices = plan, captured, board, devices
        self.streams = [kind.streams(device, device.execute, plan.streams) for device in devices]

    def run(self, step: int, flat: list[torch.Tensor]) -> float:
        named = dict(zip(self.captured.layout.names, flat, strict=True))
        failures: list[tuple[Device, Failed]] = []

        def run(device: Device, streams: Streams) -> None:
            try:
                with torch.no_grad():
                    streams.step()
            except Failed as failure:
                failures.append((device, failure))
                self.board.abort()

        for device in self.devices:
            device.begin(step, {key: take(named[name], box) for key, name, box in device.plan.feeds})
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
        at = f"it was running {instruction.op} of {self.plan.nodes[instruction.node]}"
        piece = device.pieces[instruction.program] if isinstance(instruction, Compute) else None
        return failed(f"device {device.plan.device}", failure_of(failure.cause), piece, [at], here=True)
