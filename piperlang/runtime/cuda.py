"""Logical streams on CUDA: the host issues instructions in the order of the plan, each on its own CUDA stream. Inside a
step it waits only for what bounds gathers, and for how many rows chose which experts.

Private API, kept in this file: `torch._C._cuda_clearCublasWorkspaces` (tried on torch 2.11).
"""

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
                # The host must not run ahead of what bounds gathers: memory is given out when it issues an instruction,
                # not when that runs.
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
        """What another stream made must not be given to anybody else while this stream reads it."""
        for key in self.values.reads[id(instruction)]:
            if (
                self.made.get(key.removeprefix("sum:"), instruction.stream) != instruction.stream
            ):  # a sum is named after the first of its parts
                for tensor in _tensors(self.values.values.get(key)):
                    tensor.record_stream(stream)

    def close(self) -> None:
        """What matrix products keep for each stream goes too: 32 MiB on a large GPU, and the next job has streams of
        its own."""
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
    """Pieces compiled by Inductor, each distinct one once; not those with as many rows as choose their experts, which
    would be compiled for every number of them."""
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
