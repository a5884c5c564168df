"""The CPU. Each logical stream is a thread, so that communication and compute, or two compute streams, run
concurrently."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from piperlang.core.streams import StreamResources
from piperlang.plan.instructions import Instruction
from piperlang.runtime.hardware import heap
from piperlang.runtime.hardware.kind import Captures, DeviceKind, Failed, StepTimes, Streams

if TYPE_CHECKING:
    from piperlang.runtime.device import Device


class CpuStreams:
    def __init__(
        self, instructions: Sequence[Instruction], execute: Callable[[Instruction], None], name: str = ""
    ) -> None:
        self.instructions, self.execute = instructions, execute
        self.lists: dict[str, list[int]] = {}
        for i, instruction in enumerate(instructions):
            self.lists.setdefault(instruction.stream, []).append(i)
        waited = {i for instruction in instructions for i in instruction.waits}
        self.done = {i: threading.Event() for i in waited}
        # The caller's thread runs the longest stream, mostly compute: the others cost a thread switch each.
        self.main = (
            max(self.lists, key=lambda stream: (stream == "compute", len(self.lists[stream]))) if self.lists else ""
        )
        self.running: dict[str, int] = {}
        self.failure: Failed | None = None
        self.failing = threading.Lock()
        self.stopping = False
        self.times: StepTimes | None = None
        self.starts = {stream: threading.Semaphore(0) for stream in self.lists if stream != self.main}
        self.finished = threading.Semaphore(0)
        self.threads = [
            threading.Thread(target=self._serve, args=(stream,), name=f"{name}{stream}", daemon=True)
            for stream in self.starts
        ]
        for thread in self.threads:
            thread.start()

    def step(self, times: StepTimes | None = None) -> None:
        self.times = times
        for event in self.done.values():
            event.clear()
        for start in self.starts.values():
            start.release()
        if self.main:
            self._run(self.main)
        for _ in self.starts:
            # A stream may wait long for a device after an instruction has failed here: the step is over then.
            while not self._over and not self.finished.acquire(timeout=0.05):
                pass
        if self.failure is not None:
            raise self.failure

    @property
    def _over(self) -> bool:
        """Whether the step is over."""
        return self.failure is not None or self.stopping

    def _serve(self, stream: str) -> None:
        while True:
            self.starts[stream].acquire()
            if self.stopping:
                return
            self._run(stream)
            self.finished.release()

    def _run(self, stream: str) -> None:
        instructions, done, times = self.instructions, self.done, self.times
        for i in self.lists[stream]:
            instruction = instructions[i]
            self.running[stream] = i
            for earlier in instruction.waits:
                done[earlier].wait()
            if self._over:
                return
            began = time.perf_counter()
            try:
                self.execute(instruction)
            except BaseException as problem:
                self._fail(Failed(instruction, problem))
                return
            if times is not None and i in times.chosen:
                times.spans[i] = began, time.perf_counter()
            event = done.get(i)
            if event is not None:
                event.set()
        self.running.pop(stream, None)

    def _fail(self, failure: Failed) -> None:
        with self.failing:
            if self.failure is None:
                self.failure = failure
        self._wake()

    def _wake(self) -> None:
        """Wake up all waits for other streams."""
        for event in self.done.values():
            event.set()

    def close(self) -> None:
        """Also works in the middle of a step, which is abandoned after the running instructions."""
        self.stopping = True
        self._wake()
        for start in self.starts.values():
            start.release()
        for thread in self.threads:
            thread.join(timeout=1)


class Cpu(DeviceKind):
    name, resource, compiles, graphs = "cpu", "CPU", False, False

    def available(self) -> bool:
        return True

    def model(self) -> str:
        return platform.processor() or platform.machine()

    def claim(self, rank: int) -> torch.device:
        return torch.device("cpu")

    def sharing(self, ranks: int) -> tuple[int, int]:
        """Passes run on one thread each, wherever the system puts them."""
        cores = len(os.sched_getaffinity(0))
        return (1, cores) if cores < ranks else (0, 1)

    def streams(
        self,
        device: Device,
        execute: Callable[[Instruction], None],
        resources: Mapping[str, StreamResources],
        captures: Captures | None = None,
    ) -> Streams:
        return CpuStreams(device.plan.instructions, execute, f"{device.plan.device}:")

    def synchronize(self) -> None:
        pass  # the host computes: what it has issued is done

    def keep_memory(self, keeps: bool) -> None:
        heap.keep(keeps)

    def memory(self) -> int:
        """Resident memory of this process."""
        with Path("/proc/self/statm").open() as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
