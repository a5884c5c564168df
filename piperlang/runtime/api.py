"""From Python: a model, a schedule, and an object that trains it.

    trainer = piperlang.compile(make_model, "schedule.piper", loss=loss, example=(inputs, target), optimizer=optimizer)
    for batch in loader:
        print(trainer.step(batch).loss)
    torch.save(trainer.state_dict(), "weights.pt")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from piperlang.capture.program import Captured, capture
from piperlang.diagnostics import PiperError
from piperlang.ir.graph import Graph
from piperlang.plan.check import check
from piperlang.plan.instruction import Plan
from piperlang.plan.lower import lower
from piperlang.runtime.job import Job, Step, Training
from piperlang.runtime.threads import ThreadJob
from piperlang.session import schedule
from piperlang.syntax.parse import read


class Trainer:
    """A compiled schedule. Workers start with the first step and end with `close`, or with the `with` block."""

    def __init__(self, graph: Graph, captured: Captured, plan: Plan, training: Training, executor: str, address: str | None, timeout: float) -> None:
        self.graph, self.plan = graph, plan
        self._start: Callable[[], Job | ThreadJob] = lambda: self._job(captured, training, executor, address, timeout)
        self._running: Job | ThreadJob | None = None

    def _job(self, captured: Captured, training: Training, executor: str, address: str | None, timeout: float) -> Job | ThreadJob:
        dtype = self.graph.model.tensors[self.graph.model.loss].dtype
        if executor == "inline":
            return ThreadJob(self.plan, captured, training, timeout, dtype)
        return Job(self.plan, captured, training, address=address, timeout=timeout, loss_dtype=dtype)

    @property
    def job(self) -> Job | ThreadJob:
        if self._running is None:
            self._running = self._start()
        return self._running

    def step(self, batch: tuple[Any, Any]) -> Step:
        """Forward, backward and update on one global batch; the loss is that of the whole batch."""
        return self.job.step(batch)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All weights, whole, under the names of the plain model."""
        return self.job.weights()

    def close(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def compile(
    model: Callable[[], Any], script: str | Path, *, loss: Callable[[Any, Any], Any], example: tuple[Any, Any], optimizer: Callable[[Any], Any],
    lr_schedule: Callable[[Any], Any] | None = None, parameters: Mapping[str, Any] | None = None, seed: int = 0, executor: str = "ray", address: str | None = None,
    timeout: float = 300.0, masters: bool = False,
) -> Trainer:  # fmt: skip
    """Capture `model()`, apply the script, check the plan. What is wrong with any of them is a PiperError with located diagnostics."""
    if executor not in ("ray", "inline"):
        raise ValueError(f"executor is 'ray' or 'inline', not {executor!r}")
    path = Path(script)
    overrides = {name: str(value) for name, value in (parameters or {}).items()}
    program = capture(model, loss, example)
    found = schedule(program, read(path, str(path)), path, overrides)
    if found.problems:
        raise PiperError(*found.problems)
    graph = found.graph()
    plan = lower(graph)
    check(plan)
    captured = found.scheduler.schedule.captured
    assert isinstance(captured, Captured)
    return Trainer(graph, captured, plan, Training(model, optimizer, lr_schedule, seed, masters), executor, address, timeout)
