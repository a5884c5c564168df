"""What every job trains, and what a step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from piperlang.capture.pass_graph import PassGraph, PassGraphs
from piperlang.ir.model import Sharding
from piperlang.plan.plan import StageProgram


class Captured(Protocol):
    @property
    def batch_names(self) -> Sequence[str]: ...

    @property
    def constants(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]: ...

    def flatten(self, batch: tuple[Any, Any]) -> list[torch.Tensor]: ...

    def check_state(self) -> None: ...

    def count(self, batch: Sequence[torch.Tensor]) -> float: ...

    def pass_graphs(self, chunk: int, samples: int, sharding: Sharding = ((), ())) -> PassGraphs: ...


@dataclass(frozen=True)
class Training:
    """What to train, in addition to the plan: functions that every worker calls."""

    make_model: Callable[[], Any]
    optimizer: Callable[[Any], Any]
    lr_schedule: Callable[[Any], Any] | None = None
    seed: int = 0
    masters: bool = False
    """Keep float32 master weights for weights in half precision. Off by default, because plain training does not have
    them."""
    loss: Callable[[Any, Any], Any] | None = None
    """For workers, where the optimizer or its schedule may change what it reads."""


@dataclass(frozen=True)
class Step:
    loss: float
    seconds: float
    memory: int
    """Of the worker that uses the most."""


def piece_of(captured: Captured, program: StageProgram) -> PassGraph:
    """The graph of a stage program. Recomputation runs the forward."""
    pieces = captured.pass_graphs(program.chunk, program.samples, program.sharding)
    piece: PassGraph = getattr(pieces, "F" if program.op == "R" else program.op)
    return piece
