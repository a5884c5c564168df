"""CUDA GPUs. The host issues instructions in plan order, each on its own CUDA stream. Within a step it waits only for
the instructions that limit prefetched gathers, and for the token counts of dropless MoE.

Private API, kept in this file: `torch._C._cuda_clearCublasWorkspaces` (tried on torch 2.11)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from piperlang.plan.instructions import GatherParameters, Instruction
from piperlang.runtime.hardware.kind import DeviceKind, Failed, StepTimes, Streams

if TYPE_CHECKING:
    from piperlang.runtime.device import Device


class CudaStreams:
    def __init__(self, device: Device, execute: Callable[[Instruction], None]) -> None:
        self.values, self.execute = device, execute
        instructions = self.instructions = device.plan.instructions
        self.streams: dict[str, Any] = {
            stream: torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for stream in dict.fromkeys(i.stream for i in instructions)
        }
        waited = {i for instruction in instructions for i in instruction.waits}
        self.events: dict[int, Any] = {i: torch.cuda.Event() for i in waited}  # type: ignore[no-untyped-call]
        self.made = {key: instruction.stream for instruction in instructions for key in instruction.writes}
        self.running: dict[str, int] = {}
        self.begins: dict[int, Any] = {}
        self.ends: dict[int, Any] = {}
        """Events before and after each instruction, of steps that are recorded."""

    def step(self, times: StepTimes | None = None) -> None:
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
        for i, instruction in enumerate(self.instructions):
            self.running = {instruction.stream: i}
            stream = self.streams[instruction.stream]
            if isinstance(instruction, GatherParameters):
                # The host must not run ahead of the instructions that limit gathers: memory is allocated when an
                # instruction is issued, not when it runs.
                for earlier in instruction.waits:
                    events[earlier].synchronize()
            issued = time.perf_counter()
            with torch.cuda.stream(stream):
                for earlier in instruction.waits:
                    stream.wait_event(events[earlier])
                self._borrow(instruction, stream)
                recorded = i in chosen
                recording = _record(self.begins[i]) if recorded else 0.0
                try:
                    self.execute(instruction)
                except BaseException as problem:
                    raise Failed(instruction, problem) from problem
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

    def _borrow(self, instruction: Instruction, stream: Any) -> None:
        """Tells the allocator that this stream reads tensors of another stream, so that their memory is not reused
        before."""
        for key in self.values.reads[id(instruction)]:
            made = key.source if key.is_total and key.source is not None else key
            if self.made.get(made, instruction.stream) != instruction.stream:
                for tensor in _tensors(self.values.values.get(key)):
                    tensor.record_stream(stream)

    def close(self) -> None:
        """Also frees the cuBLAS workspaces of the streams: 32 MiB per stream on a large GPU, and the next job has its
        own streams."""
        self.streams.clear()
        torch._C._cuda_clearCublasWorkspaces()


def _timed() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _record(event: Any) -> float:
    """Seconds that it took the host, which steps that are not recorded do without."""
    began = time.perf_counter()
    event.record()
    return time.perf_counter() - began


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)


class Cuda(DeviceKind):
    name, resource, compiles, recorded_parts = "cuda", "GPU", True, 1

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

    def streams(self, device: Device, execute: Callable[[Instruction], None]) -> Streams:
        return CudaStreams(device, execute)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

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
