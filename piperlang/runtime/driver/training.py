"""What every job trains, and what a step returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from piperlang.capture.autodiff.pass_graph import PassGraph, TracedModel
from piperlang.capture.user.weight_files import StoredWeights
from piperlang.diagnostics import PiperError, error
from piperlang.plan.plan import BUNDLES, StageProgram
from piperlang.runtime.driver.restoring import Restore


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
    ema: float | None = None
    """The decay of moving averages of the weights, if they are wanted."""
    weights: StoredWeights | None = None
    """The files that `make_model` has its weights from, if it has."""
    restore: Restore | None = None
    """The checkpoint that a resumed run starts from."""


DIED, SILENT, CUT = "died", "does not answer", "cannot reach another device"


class Lost(Exception):
    """A worker that the others cannot go on with."""

    def __init__(self, worker: int, how: str = DIED, why: str = "", machine: str = "") -> None:
        """`how`: one of the above. `machine`: the one that is lost with it."""
        super().__init__(f"worker {worker} {how}")
        self.worker, self.how, self.why, self.machine = worker, how, why, machine


@dataclass(frozen=True)
class StepResult:
    loss: float
    seconds: float
    memory: int
    """Of the worker that uses the most."""
    samples: int
    """Of the batch."""
    norm: float | None = None
    """Of all gradients, where the plan computes it."""
    skipped: bool = False
    """The loss or the norm is not finite, and the step has changed nothing."""
    waited: float | None = None
    """Seconds that workers waited for their next batch, where they load batches themselves."""
    problem: PiperError | None = None
    """Why they could not load it."""
    issued: float | None = None
    """Seconds that the slowest host needed until the step was issued, where it is a CUDA graph on every device."""

    def strange(self, step: int) -> str:
        """Which of its numbers is not finite."""
        if not math.isfinite(self.loss):
            return f"the loss of step {step} is {self.loss}"
        return f"the norm of the gradients of step {step} is {self.norm}"


def not_finite(step: int, done: StepResult, others: str) -> PiperError:
    """`others`: how to go on."""
    return error(
        "P0613",
        done.strange(step),
        notes=["the step has changed no weight, no buffer and no state of the optimizer"],
        help=f"look at its batch, and at the learning rate; {others}",
    )


def piece_of(captured: TracedModel, program: StageProgram) -> PassGraph:
    """The graph of a stage program. Recomputation runs the forward; a forward for no backward saves nothing."""
    pieces = captured.pass_graphs(program.chunk, program.samples, program.sharding)
    piece: PassGraph = getattr(pieces, "F" if program.op == "R" else program.op)
    asked, made = (any(kind in BUNDLES for kind, _ in slots) for slots in (program.outputs, piece.outputs))
    return piece.unsaved() if program.op == "F" and made and not asked else piece
