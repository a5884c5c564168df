"""The Python API: compiles a model and a schedule into an object that trains the model.

trainer = piperlang.compile(make_model, "schedule.piper", loss=loss, example=(inputs, target), optimizer=optimizer)
for batch in loader:
    print(trainer.step(batch).loss)
print(trainer.evaluate(other_batch))
torch.save(trainer.state_dict(), "weights.pt")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from piperlang.capture.program import CutProgram, capture
from piperlang.capture.user.batches import detached, paired, placed, wrong_batch
from piperlang.capture.user.precision import TRUE, InPrecision, loss_in, wrong_precision
from piperlang.capture.user.user_code import (
    UserFunction,
    Wrong,
    located,
    located_at_call,
    mistake,
    not_a_function,
    wrong_ema,
    wrong_max_norm,
    wrong_signature,
)
from piperlang.capture.user.weight_files import FromFiles, StoredWeights, wrong_weights
from piperlang.capture.user.where import here
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.ir.graph import Graph
from piperlang.ir.model import Copies
from piperlang.pipeline import planned, schedule
from piperlang.plan.plan import Plan
from piperlang.progress import Display, Notice, StepMetrics, Stepping, Stopped, current, displayed_by, phase
from piperlang.progress.lines import counted
from piperlang.progress.notebook import notebook
from piperlang.progress.plain import Plain
from piperlang.runtime.comm.registry import chosen
from piperlang.runtime.driver.shapes import MOST, Mode, OtherShapes
from piperlang.runtime.driver.start import start as start_job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import StepResult, Training, not_finite
from piperlang.runtime.guard.program import Verified
from piperlang.runtime.guard.program import verify as compare_with_eager
from piperlang.runtime.shapes import InEvaluationMode, PlanForShape
from piperlang.syntax.parse import read

if TYPE_CHECKING:
    from piperlang.runtime.driver.job import Job


class Trainer:
    """A compiled schedule. Workers start with the first step and stop with `close`, or at the end of the `with`
    block."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        start: Callable[[], Job | ThreadJob],
        verify: Callable[[], Verified],
        display: Display | None = None,
        stops: bool = False,
    ) -> None:
        """`stops`: a step that was skipped raises."""
        self.graph, self.plan, self.steps, self._stops = graph, plan, 0, stops
        self._start, self._verify, self._display = start, verify, display
        self._running: Job | ThreadJob | None = None

    @property
    def job(self) -> Job | ThreadJob:
        if self._running is None:
            _ = self.verified  # do not train a program that differs from the model
            count = len(self.plan.devices)
            with _shown(self._display), phase(f"starting {count} workers", f"workers {count}/{count}"):
                self._running = self._start()
            self._tell(Stepping())
        return self._running

    @cached_property
    def verified(self) -> Verified:
        """The comparison of the captured program with the eager model. The first step runs it, too."""
        with _shown(self._display), phase("verifying against eager PyTorch"):
            found = self._verify()
        self._tell(Notice(str(found)))
        return found

    def step(self, batch: Any) -> StepResult:
        """Forward, backward and update on one global batch: a pair (input, target), or a dict, which is both. Returns
        the loss of the whole batch."""
        with located_at_call(), _shown(self._display):
            done = self.job.step(_checked(batch))
            if done.skipped and self._stops:
                raise not_finite(self.steps, done, '`on_nan="skip"` returns instead, `on_nan="continue"` trains on')
        self._tell(StepMetrics(self.steps, done.loss, done.seconds, done.samples / done.seconds, done.memory))
        self.steps += 1
        return done

    def _tell(self, event: Notice | StepMetrics | Stepping | Stopped) -> None:
        """Sends an event to the display of this trainer only: a command's display counts its own steps."""
        if self._display is not None:
            self._display.show(event)

    def evaluate(self, batch: Any) -> float:
        """The loss of a batch with the model in evaluation mode; nothing is trained. The first call traces the model in
        that mode."""
        with located_at_call(), _shown(self._display):
            return self.job.evaluate(_checked(batch))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights, unsharded, under the names of the plain model."""
        return self.job.weights()

    def averages(self) -> dict[str, torch.Tensor]:
        """The same with the moving averages of the weights (`ema`)."""
        return self.job.weights(averaged=True)

    def close(self) -> None:
        if self._running is not None:
            self._tell(Stopped())
            self._running.close()
            self._running = None
        if isinstance(self._display, Plain):
            self._display.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile(
    model: Callable[[], Any],
    script: str | Path,
    *,
    loss: Callable[[Any, Any], Any],
    example: Any,
    optimizer: Callable[[Any], Any],
    lr_schedule: Callable[[Any], Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    seed: int = 0,
    executor: str = "ray",
    address: str | None = None,
    timeout: float = 300.0,
    masters: bool = False,
    max_norm: float | None = None,
    precision: str | None = None,
    backend: str | None = None,
    cuda: bool | None = None,
    compiles: bool | None = None,
    cuda_graphs: bool | None = None,
    verify: bool = True,
    progress: bool | None = None,
    shapes: int = MOST,
    ema: float | None = None,
    initial_weights: str | Path | None = None,
    on_nan: str = "stop",
) -> Trainer:
    """Capture `model()`, apply the script, check the plan. Every mistake is a PiperError with located diagnostics.

    `masters` keeps float32 master weights for weights in half precision, `max_norm` clips gradients by their global
    norm, `precision` is "bf16-mixed" or "bf16-true". `ema`: the decay of moving averages of the weights, which
    `trainer.averages()` gives. `initial_weights`: a file or folder of safetensors that the model starts from. `on_nan`:
    what `trainer.step` does if the loss or the norm of the gradients is not finite: "stop" raises, and "skip" returns,
    before anything is updated; "continue" updates.

    `backend` is that of `--backend`; `cuda` chooses between nccl and gloo. By default CUDA is used where it is
    available, chunks are compiled there (`compiles`), and steps are CUDA graphs (`cuda_graphs`). `verify`: before the
    first step the captured program is compared with the eager model on slices of `example`; the result is
    `trainer.verified`.
    `progress`: show progress, on standard error or in the notebook; by default it is shown in notebooks only. `shapes`:
    batches of other shapes than `example` are traced and planned when they come, up to this number of shapes."""
    if executor not in ("ray", "inline"):
        raise ValueError(f"executor must be 'ray' or 'inline', not {executor!r}")
    if on_nan not in ("stop", "skip", "continue"):
        raise ValueError(f"on_nan must be 'stop', 'skip' or 'continue', not {on_nan!r}")
    example = paired(example)
    _check_arguments(
        {"model": model, "loss": loss, "optimizer": optimizer, "lr_schedule": lr_schedule},
        (
            wrong_batch(example, "`example`"),
            wrong_max_norm(max_norm),
            wrong_precision(precision),
            wrong_ema(ema),
            wrong_weights(initial_weights),
        ),
    )
    stored = None if initial_weights is None else StoredWeights(Path(initial_weights).resolve())
    if stored is not None:
        model = FromFiles(model, stored)
    if precision is not None:
        model, loss, masters = InPrecision(model, precision), loss_in(loss, precision), masters or precision == TRUE
    example = detached(example)
    model, optimizer = UserFunction(model, "model"), UserFunction(optimizer, "optimizer")
    lr_schedule = UserFunction(lr_schedule, "lr_schedule") if lr_schedule is not None else None
    display, skips = _display(progress), on_nan != "continue"
    path = Path(script)
    if backend is None and cuda is not None and executor == "ray":
        backend = "nccl" if cuda else "gloo"
    runs_on = chosen(executor, backend)
    overrides = {name: str(value) for name, value in (parameters or {}).items()}

    def applied(mode: Mode, batch: tuple[Any, Any], rows: tuple[int, ...] = ()) -> tuple[Graph, CutProgram]:
        with phase("tracing the model", "traced") as tracing:
            make = InEvaluationMode(model) if mode == "evaluate" else model
            program = capture(
                make, loss, placed(batch, runs_on.device.name), seed, Copies(masters, ema is not None)
            ).padded(rows)
            tracing.detail = f"{len(program.sizes.small.graph.nodes):,} nodes"
        with phase(f"applying {path.name}"):
            found = schedule(program, read(path, str(path)), path, overrides)
        if found.problems:
            raise PiperError(*found.problems)
        captured = found.captured
        assert isinstance(captured, CutProgram)
        return found.graph(), captured

    with _shown(display):
        graph, captured = applied("train", example)
        with phase("planning", "planned") as planning:
            plan = planned(graph, max_norm, skips)
            planning.detail = counted(len(plan.devices), "device")
    training, dtype = (
        Training(model, optimizer, lr_schedule, seed, masters, loss, ema, stored),
        graph.model.tensors[graph.model.loss].dtype,
    )

    others = OtherShapes(PlanForShape(applied, plan, captured, training, max_norm, skips, verify), shapes)

    def start() -> Job | ThreadJob:
        return start_job(
            runs_on,
            plan,
            captured,
            training,
            dtype,
            timeout=timeout,
            address=address,
            compiles=compiles,
            graphs=cuda_graphs,
            others=others,
        )

    def verified() -> Verified:
        return compare_with_eager(captured, plan, example, training) if verify else Verified(skipped="verify=False")

    return Trainer(graph, plan, start, verified, display, stops=on_nan == "stop")


def _display(progress: bool | None) -> Display | None:
    """The progress display of a trainer, unless a command that uses the trainer already has one."""
    if progress is False or current() is not None:
        return None
    return notebook() or (Plain(sys.stderr) if progress else None)


def _shown(display: Display | None) -> AbstractContextManager[None]:
    return displayed_by(display) if display is not None else nullcontext()


def _checked(batch: Any) -> Any:
    batch = paired(batch)
    wrong = wrong_batch(batch, "the batch")
    if wrong is not None:
        raise PiperError(mistake("P0801", wrong))
    return batch


def _check_arguments(functions: Mapping[str, Any], wrongs: Sequence[Wrong | None]) -> None:
    """Diagnostics for all arguments that cannot be used, at the line of the function or of the call."""
    problems: list[Diagnostic] = []
    for name, function in functions.items():
        if name == "lr_schedule" and function is None:
            continue
        wrong = not_a_function(name, function)
        problem = mistake("P0801", wrong) if wrong else wrong_signature(name, function)
        problems += [problem] if problem else []
    problems += [mistake("P0801", wrong) for wrong in wrongs if wrong]
    if problems:
        with located(here()):
            raise PiperError(*problems)
