"""Logical streams on CUDA: the host issues instructions in plan order, each on its own CUDA stream. Within a step it
waits only for the instructions that limit prefetched gathers, and for the token counts of dropless MoE.

Private API, kept in this file: `torch._C._cuda_clearCublasWorkspaces` (tried on torch 2.11)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from piperlang.capture.differentiate import Piece
from piperlang.plan.instructions import GatherParameters, Instruction
from piperlang.plan.plan import StageProgram
from piperlang.runtime.device import Device
from piperlang.runtime.streams import Failed


class CudaStreams:
    """The same interface as Streams."""

    values: Device

    def __init__(
        self, instructions: Sequence[Instruction], execute: Callable[[Instruction], None], name: str = ""
    ) -> None:
        self.instructions, self.execute = instructions, execute
        self.streams: dict[str, Any] = {
            stream: torch.cuda.Stream()  # type: ignore[no-untyped-call]
            for stream in dict.fromkeys(i.stream for i in instructions)
        }
        waited = {i for instruction in instructions for i in instruction.waits}
        self.events: dict[int, Any] = {i: torch.cuda.Event() for i in waited}  # type: ignore[no-untyped-call]
        self.made = {key: instruction.stream for instruction in instructions for key in instruction.writes}
        self.running: dict[str, int] = {}

    def step(self) -> None:
        start = torch.cuda.Event()  # type: ignore[no-untyped-call]
        start.record()
        for stream in self.streams.values():
            stream.wait_event(start)
        for i, instruction in enumerate(self.instructions):
            self.running = {instruction.stream: i}
            stream = self.streams[instruction.stream]
            if isinstance(instruction, GatherParameters):
                # The host must not run ahead of the instructions that limit gathers: memory is allocated when an
                # instruction is issued, not when it runs.
                for earlier in instruction.waits:
                    self.events[earlier].synchronize()
            with torch.cuda.stream(stream):
                for earlier in instruction.waits:
                    stream.wait_event(self.events[earlier])
                self._borrow(instruction, stream)
                try:
                    self.execute(instruction)
                except BaseException as problem:
                    raise Failed(instruction, problem) from problem
                if i in self.events:
                    self.events[i].record()
        current = torch.cuda.current_stream()
        for stream in self.streams.values():
            current.wait_stream(stream)
        self.running = {}

    def _borrow(self, instruction: Instruction, stream: Any) -> None:
        """Tells the allocator that this stream reads tensors of another stream, so that their memory is not reused
        before."""
        for key in self.values.reads[id(instruction)]:
            if (
                self.made.get(key.removeprefix("sum:"), instruction.stream) != instruction.stream
            ):  # a sum has the name of its first operand
                for tensor in _tensors(self.values.values.get(key)):
                    tensor.record_stream(stream)

    def close(self) -> None:
        """Also frees the cuBLAS workspaces of the streams: 32 MiB per stream on a large GPU, and the next job has its
        own streams."""
        self.streams.clear()
        torch._C._cuda_clearCublasWorkspaces()


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


def compiled(pieces: Sequence[Piece | None], programs: Sequence[StageProgram]) -> list[Piece | None]:
    """The stage programs compiled by Inductor, each distinct one once. Those with routed tokens are not compiled,
    because they would be compiled again for every number of tokens."""
    known: dict[int, Piece] = {}
    found: list[Piece | None] = []
    for piece, program in zip(pieces, programs, strict=True):
        if program.routed:
            found.append(piece)
            continue
        if piece is not None and id(piece) not in known:
            known[id(piece)] = replace(piece, module=torch.compile(piece.module, fullgraph=True, dynamic=False))  # type: ignore[arg-type]
        found.append(known[id(piece)] if piece is not None else None)
    return found
