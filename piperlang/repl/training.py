"""Training inside a session: the plan of the current script, on workers that are kept until the script changes."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import numpy as np
import torch

from piperlang.capture.program import CutProgram, capture
from piperlang.capture.user.batches import placed
from piperlang.capture.user.model_file import shipped
from piperlang.capture.user.user_code import located
from piperlang.capture.user.where import line_of_function
from piperlang.diagnostics import error
from piperlang.elaborate.resolved import resolved
from piperlang.ir.graph import Graph
from piperlang.pipeline import planned, schedule
from piperlang.progress.lines import counted
from piperlang.repl.core import SessionCore
from piperlang.repl.show import Row, Shown, html
from piperlang.repl.state import State
from piperlang.runtime.api import Trainer
from piperlang.runtime.comm.registry import chosen, for_workers
from piperlang.runtime.comm.threads import Threads
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.shapes import Mode, OtherShapes
from piperlang.runtime.driver.start import start as start_job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import StepResult, Training
from piperlang.runtime.guard.program import verify
from piperlang.runtime.optimizer.optimize import default_optimizer
from piperlang.runtime.reference.numerics import compare
from piperlang.runtime.shapes import InEvaluationMode, PlanForShape


@dataclass
class Generators:
    """The state of the random generators that data may use: a training continues with its own, whatever happens between
    two runs."""

    torch: torch.Tensor = field(default_factory=torch.get_rng_state)
    python: Any = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=np.random.get_state)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class SessionTraining:
    """The training of a session's script."""

    def __init__(self, session: SessionCore, executor: str) -> None:
        assert session.model is not None
        self.model, self.executor = session.model, executor
        self.script = resolved(session.state.directives)
        self.trainer = _trainer(session, executor)
        self.batches = self.model.batches()
        self.generators: Generators | None = None
        self.steps: list[StepResult] = []

    def continues(self, session: SessionCore, executor: str) -> bool:
        """Whether another run of the session would train the same plan in the same way."""
        return self.executor == executor and self.script == resolved(session.state.directives)

    def step(self) -> StepResult:
        with located(line_of_function(self.model.file.data)):
            done = self.trainer.job.step(next(self.batches))
        self.steps.append(done)
        return done

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Restore the generators of the data."""
        if self.generators is not None:
            self.generators.restore()
        try:
            yield
        finally:
            self.generators = Generators()

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All current weights, unsharded."""
        return self.trainer.state_dict()

    def close(self) -> None:
        self.trainer.close()

    def line(self, number: int) -> str:
        step = self.steps[number]
        rate = step.samples / step.seconds
        cost = f"{1e3 * step.seconds:.1f} ms  {step.memory / 2**20:,.0f} MiB"
        return f"step {number:4}  loss {step.loss:.6f}  {rate:,.0f} samples/s  {cost}"

    def __repr__(self) -> str:
        last = f", loss {self.losses[-1]:.6f}" if self.steps else ""
        steps, devices = counted(len(self.steps), "step"), counted(len(self.trainer.plan.devices), "device")
        return f"<training: {steps} on {devices}{last}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{n}</td><td>{step.loss:.6f}</td><td>{1e3 * step.seconds:.1f}</td></tr>"
            for n, step in list(enumerate(self.steps))[-10:]
        )
        head = f"<p>{escape(repr(self).strip('<>'))}</p>"
        return html(f"{head}{_curve(self.losses)}<table><tr><th>step</th><th>loss</th><th>ms</th></tr>{rows}</table>")


def _curve(losses: list[float]) -> str:
    """The loss curve, in the color of the surrounding text."""
    if len(losses) < 2:
        return ""
    low, high = min(losses), max(losses)
    points = " ".join(
        f"{4 + 292 * i / (len(losses) - 1):.1f},{4 + 52 * (high - loss) / ((high - low) or 1):.1f}"
        for i, loss in enumerate(losses)
    )
    return (
        f'<svg width="300" height="60" role="img" aria-label="loss from {losses[0]:.4f} to {losses[-1]:.4f}">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )


def _trainer(session: SessionCore, executor: str) -> Trainer:
    """A trainer as `piperlang.compile` makes it, from a traced model."""
    model, state = session.model, session.state
    assert model is not None
    assert state.scheduler is not None
    backend = chosen(executor)
    if backend.device.name != for_workers().device.name:
        raise error(
            "P0902",
            "the model of this session is traced for CUDA, but `inline` runs on the CPU",
            help="omit `inline`, or start the session with an empty CUDA_VISIBLE_DEVICES",
        )
    graph, captured = state.graph, state.scheduler.schedule.captured
    assert isinstance(captured, CutProgram)
    plan = planned(graph, model.file.max_norm, skips=True)
    make = shipped(model.file, "model")
    assert make is not None
    training = Training(
        make,
        shipped(model.file, "optimizer") or default_optimizer,
        shipped(model.file, "lr_schedule"),
        model.seed,
        model.file.copies.masters,
        shipped(model.file, "loss"),
        model.file.ema,
        model.file.weights,
    )
    dtype = graph.model.tensors[graph.model.loss].dtype
    first = next(model.batches())

    def applied(mode: Mode, batch: tuple[Any, Any], rows: tuple[int, ...]) -> tuple[Graph, CutProgram]:
        make = InEvaluationMode(model.file.model) if mode == "evaluate" else model.file.model
        program = capture(
            make, model.file.loss, placed(batch, backend.device.name), model.seed, model.file.copies
        ).padded(rows)
        found = schedule(program, state.source, state.setting.path, state.setting.overrides)
        cut = found.captured
        assert isinstance(cut, CutProgram)
        return found.graph(), cut

    plan_for = PlanForShape(applied, plan, captured, training, model.file.max_norm, skips=True, verifies=True)

    def start() -> Job | ThreadJob:
        cluster = None if isinstance(backend, Threads) else _workers(session, len(plan.devices))
        return start_job(backend, plan, captured, training, dtype, cluster=cluster, others=OtherShapes(plan_for))

    return Trainer(graph, plan, start, lambda: verify(captured, plan, first, training), stops=True)


def _workers(session: SessionCore, count: int) -> Cluster:
    """The workers of the previous training, if there are enough: starting new ones takes longer than most
    experiments of a session."""
    there = session.workers
    if there is None or len(there.workers) < count or there.dead(0):
        if there is not None:
            there.close()
        session.screen.say(f"starting {count} worker{'s' if count != 1 else ''}")
        session.workers = Cluster(count, None, for_workers())
    assert session.workers is not None
    return session.workers


def trained(session: SessionCore, steps: int, executor: str) -> Shown:
    """`:run`: train `count` more steps."""
    say = session.screen.say
    training = session.training
    if training is not None and not training.continues(session, executor):
        say(
            "the script has changed: training starts over"
            if training.executor == executor
            else "the executor has changed: training starts over"
        )
        training.close()
        session.training = training = None
    if training is None:
        training = _started(session, executor)
    else:
        say(f"continuing after step {len(training.steps) - 1}")
    started, first = time.perf_counter(), len(training.steps)
    try:
        with _stopping() as stop, training.drawing():
            for _ in range(steps):
                training.step()
                say(training.line(len(training.steps) - 1))
                if stop.is_set():
                    break
    except BaseException:
        session.close()  # in the middle of a step: training cannot continue
        raise
    done = len(training.steps) - first
    stopped = f", stopped before step {len(training.steps)}; `:run` continues" if done < steps else ""
    devices, seconds = len(training.trainer.plan.devices), time.perf_counter() - started
    what = f"trained {done} step{'s' if done != 1 else ''} on {devices} device{'s' if devices != 1 else ''}"
    return Shown(block=f"{what} in {seconds:.1f} s{stopped}")


def _started(session: SessionCore, executor: str) -> SessionTraining:
    training = SessionTraining(session, executor)
    session.screen.say(str(training.trainer.verified))
    try:
        _ = training.trainer.job
    except BaseException:
        session.close()
        raise
    session.training = training
    return training


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """The first Ctrl-C stops after the current step; the second interrupts it."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def compared(session: SessionCore) -> Shown:
    """`:numerics`: compare the schedule with plain training in float64."""
    model = session.model
    assert model is not None
    state = State(replace(session.setting, program=model.doubled), session.statements)
    assert state.scheduler is not None
    captured = state.scheduler.schedule.captured
    assert isinstance(captured, CutProgram)
    found = compare(model.file, model.doubled.program, state.graph, captured, model.seed)  # type: ignore[arg-type]
    noisy = found.judged_by_gradient
    more = f" and {len(noisy) - 3} more" if len(noisy) > 3 else ""
    rows = [
        Row("numerics", "matches plain PyTorch" if found.ok else "DIFFERENT", "add" if found.ok else "gone"),
        Row("loss", f"{found.loss:.9g} after two steps, plain PyTorch {found.loss_reference:.9g}"),
        Row(
            "largest",
            f"gradients {found.max_grad_rel_err:.1e}, weights {found.max_weight_rel_err:.1e}"
            f" (relative{f', {found.worst}' if found.worst else ''})",
        ),
        *([Row("noise", f"{', '.join(noisy[:3])}{more}: compared by gradient")] if noisy else []),
    ]
    return Shown(tuple(rows))
