"""CUDA GPUs. The host issues instructions in plan order, each on its own CUDA stream. Within a step it waits only for
the instructions that limit prefetched gathers, and for the token counts of dropless MoE.

Private API, kept in this file: `torch._C._cuda_clearCublasWorkspaces` (tried on torch 2.11)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.plan.instructions import GatherParameters, Instruction
from piperlang.runtime.hardware.borrowed import Borrowed, Owners
from piperlang.runtime.hardware.kind import Captures, DeviceKind, Failed, StepTimes, Streams
from piperlang.runtime.hardware.step_graph import WARM_UP, NotCaptured, StepGraph, captured, divided, move_back

if TYPE_CHECKING:
    from piperlang.runtime.device import Device

POLL = 50e-6
"""Seconds between looks at whether a graph has ended."""


def priority(resources: StreamResources) -> int:
    """Of a CUDA stream: torch has 0, the lowest, and negative numbers. A captured step keeps it: torch makes graphs
    whose kernels have the priorities of the streams that they were captured on."""
    return -1 if resources.high_priority else 0


class CudaStreams:
    """Issues every instruction of a step, or replays a graph of all of them."""

    graph: StepGraph | None = None
    steps = 0
    """Issued without a graph."""

    def __init__(
        self,
        device: Device,
        execute: Callable[[Instruction], None],
        resources: Mapping[str, StreamResources],
        captures: Captures | None = None,
    ) -> None:
        self.values, self.execute, self.captures = device, execute, captures
        instructions = self.instructions = device.plan.instructions
        self.streams: dict[str, Any] = {
            stream: torch.cuda.Stream(priority=priority(resources.get(stream, DEFAULT)))  # type: ignore[no-untyped-call]
            for stream in dict.fromkeys(i.stream for i in instructions)
        }
        waited = {i for instruction in instructions for i in instruction.waits}
        self.events: dict[int, Any] = {i: torch.cuda.Event() for i in waited}  # type: ignore[no-untyped-call]
        self.running: dict[str, int] = {}
        self.begins: dict[int, Any] = {}
        self.ends: dict[int, Any] = {}
        """Events before and after each instruction, of steps that are recorded."""
        self.late: list[int] = []
        """What is issued after the graph."""

    def step(self, times: StepTimes | None = None) -> None:
        if times is None and self.captures is not None and self.values.last_gradients is None:
            self._prepare(self.captures)
            if self.graph is not None:
                self.captures.begun()
                self.graph.replay(self.values)
                self.captures.issued = time.perf_counter()
                if self.captures.limit is not None and self._is_read:
                    self._wait(self.captures, self.captures.limit)
                if self.late:
                    self._issue(self.late)
                    move_back(self.values)
                return
        self._issue(range(len(self.instructions)), times)
        self.steps += 1

    # ------------------------------------------------------------------------------------------------------- a graph

    def _prepare(self, captures: Captures) -> None:
        """A graph of the step that comes, if there can be one and there is none yet."""
        if self.graph is not None and not self.graph.refresh():
            self.graph.close()
            self.graph = None
        if self.graph is not None or self.steps < WARM_UP:
            return
        try:
            chosen, self.late = divided(self.values)
            self.graph = captured(self.values, lambda: self._captured(chosen, captures))
            self.graph.refresh()
        except NotCaptured as why:
            captures.refused = str(why)
            captures.forget()
            self.captures = None

    def _captured(self, chosen: Sequence[int], captures: Captures) -> None:
        self._issue(chosen, borrowed=Borrowed(self.instructions))
        captures.settle()

    @property
    def _is_read(self) -> bool:
        """Whether the host reads what the step leaves."""
        return bool(self.values.plan.losses) or self.values.norm is not None

    def _wait(self, captures: Captures, limit: float) -> None:
        """For the end of a graph, before the host reads what it leaves, which updates may do. Nobody else counts how
        long its communication takes."""
        end: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        end.record()
        late = time.monotonic() + limit
        while not end.query():
            captures.check()
            if time.monotonic() > late:
                raise RuntimeError(f"the step did not end within {limit:g} s, the timeout of communication")
            time.sleep(POLL)
        captures.check()

    # --------------------------------------------------------------------------------------------------- instructions

    def _issue(self, which: Sequence[int], times: StepTimes | None = None, borrowed: Borrowed | None = None) -> None:
        """`borrowed`: in a capture."""
        timed = times is not None
        start = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        start.record()
        chosen = times.chosen if times is not None else ()
        for i in chosen:
            if i not in self.ends:
                self.begins[i], self.ends[i] = _timed(), _timed()
        events = {**self.events, **{i: self.ends[i] for i in chosen}} if chosen else self.events
        for stream in self.streams.values():
            stream.wait_event(start)
        issuing, owners = frozenset(which), Owners(self.values.sums)
        for i in which:
            instruction = self.instructions[i]
            waits = [earlier for earlier in instruction.waits if earlier in issuing]
            self.running = {instruction.stream: i}
            stream = self.streams[instruction.stream]
            if isinstance(instruction, GatherParameters) and borrowed is None:
                # The host must not run ahead of the instructions that limit gathers: memory is allocated when an
                # instruction is issued, not when it runs.
                for earlier in waits:
                    events[earlier].synchronize()
            issued = time.perf_counter()
            with torch.cuda.stream(stream):
                for earlier in waits:
                    stream.wait_event(events[earlier])
                before = self._borrow(i, owners, borrowed)
                recorded = i in chosen
                recording = _record(self.begins[i]) if recorded else 0.0
                try:
                    self.execute(instruction)
                except BaseException as problem:
                    raise Failed(instruction, problem) from problem
                owners.made(instruction, self.values.values, before)
                if i in self.events:
                    events[i].record()
                elif recorded:
                    recording += _record(self.ends[i])
            if times is not None:
                times.issued[i] = time.perf_counter() - issued - recording
        current = torch.cuda.current_stream()
        for stream in self.streams.values():
            current.wait_stream(stream)
        self.running = {}
        if times is not None:
            torch.cuda.synchronize()
            for i in chosen:
                first, last = start.elapsed_time(self.begins[i]), start.elapsed_time(self.ends[i])
                times.spans[i] = started + first / 1e3, started + last / 1e3

    def _borrow(self, i: int, owners: Owners, borrowed: Borrowed | None) -> set[int]:
        """Before instruction i is issued, on the current stream. Returns the addresses of what is there."""
        x = self.instructions[i]
        values, reads = self.values.values, self.values.reads[id(x)]
        its = owners.borrowed(x, values, reads)
        if borrowed is not None:
            borrowed.issue(i, its)
        else:
            for _, tensor in its:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())
        return owners.before(x, values, reads)

    def close(self) -> None:
        """Also frees the cuBLAS workspaces of the streams: 32 MiB per stream on a large GPU, and the next job has its
        own streams."""
        if self.graph is not None:
            self.graph.close()
            self.graph = None
        self.streams.clear()
        torch._C._cuda_clearCublasWorkspaces()


def _timed() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _record(event: Any) -> float:
    """Seconds that it took the host, which steps that are not recorded do without."""
    began = time.perf_counter()
    event.record()
    return time.perf_counter() - began


class Cuda(DeviceKind):
    name, resource, compiles, graphs = "cuda", "GPU", True, True

    def available(self) -> bool:
        return torch.cuda.is_available()

    def model(self) -> str:
        return torch.cuda.get_device_name() if self.available() else ""

    def claim(self, rank: int) -> torch.device:
        """Ranks share GPUs if there are fewer GPUs than ranks."""
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def sharing(self, ranks: int) -> tuple[int, int]:
        count = torch.cuda.device_count()
        return (count, 1) if 0 < count < ranks else (0, 1)

    def streams(
        self,
        device: Device,
        execute: Callable[[Instruction], None],
        resources: Mapping[str, StreamResources],
        captures: Captures | None = None,
    ) -> Streams:
        return CudaStreams(device, execute, resources, captures)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def keep_memory(self, keeps: bool) -> None:
        pass  # torch's allocator does

    def memory(self) -> int:
        """The peak of torch's allocator."""
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> dict[str, int]:
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        found = {name: int(stats[f"{name}_bytes.all.peak"]) for name in ("allocated", "active", "reserved")}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return found
