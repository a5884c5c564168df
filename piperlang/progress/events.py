"""The progress events, and the current display."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from piperlang.interrupts import checkpoint


@dataclass(frozen=True)
class Began:
    """A phase began."""

    what: str
    """Text while it runs: `tracing model.py`."""


@dataclass(frozen=True)
class Ended:
    """The phase that began last ended."""

    done: str
    """Text of the line that is kept: `traced`. Empty if no line is kept, and if the phase failed."""
    seconds: float
    detail: str = ""
    """Its result: `87 nodes`."""


@dataclass(frozen=True)
class Workers:
    """The number of workers of a job that are ready."""

    ready: int
    count: int


@dataclass(frozen=True)
class Stepping:
    """Training steps begin."""

    total: int | None = None
    """The number of steps, if known."""
    every: int | None = None
    """Keep a row every N steps; None lets the display decide."""


@dataclass(frozen=True)
class StepMetrics:
    """A training step, as in metrics.jsonl."""

    step: int
    loss: float
    seconds: float
    samples_per_second: float
    memory_bytes: int
    validation_loss: float | None = None
    waited_for_data: float | None = None
    """Seconds, after the step, for the next batch; known where workers load batches."""
    gradient_norm: float | None = None
    """Of all gradients, before they are clipped."""
    skipped: bool | None = None
    """The loss or the norm is not finite, and the step has changed nothing."""

    def record(self) -> dict[str, Any]:
        """Without what is not known."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def json(self) -> str:
        """As a line of JSON, which has no infinity: a loss that is none of its numbers is null."""
        return json.dumps(
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in self.record().items()
            }
        )


@dataclass(frozen=True)
class Stopped:
    """Training steps ended: all of them, or by an error."""


@dataclass(frozen=True)
class Notice:
    """A line of text for the user."""

    text: str
    warning: bool = False
    """Also shown where only results are printed."""


Event = Began | Ended | Workers | Stepping | StepMetrics | Stopped | Notice


class Display(Protocol):
    def show(self, event: Event) -> None: ...


_display: Display | None = None


def current() -> Display | None:
    return _display


@dataclass
class _Standing:
    """How far this process has come, with or without a display."""

    phases: list[str] = field(default_factory=list)
    last: str = ""
    """The phase that ended last."""
    steps: int | None = None
    folder: str = ""


_standing = _Standing()


def begin() -> None:
    """A command begins: nothing is done yet."""
    global _standing
    _standing = _Standing()


def doing() -> str:
    """The phase that runs: `tracing model.py`; between two of them, the one that ended."""
    if _standing.phases:
        return _standing.phases[-1]
    if _standing.steps is not None:
        return ""
    return f"continuing after {_standing.last}" if _standing.last else "starting"


def done() -> str:
    """The steps that are done, and where they are kept: `after 12 steps; runs/both-1`."""
    if _standing.steps is None:
        return ""
    steps = f"after {_standing.steps:,} step{'' if _standing.steps == 1 else 's'}"
    return f"{steps}; {_standing.folder}" if _standing.folder else steps


def emit(event: Event) -> None:
    if isinstance(event, StepMetrics) and _standing.steps is not None:
        _standing.steps += 1
    if _display is not None:
        _display.show(event)


@contextmanager
def displayed_by(display: Display) -> Iterator[None]:
    """Events of this block go to `display`."""
    global _display
    before, _display = _display, display
    try:
        yield
    finally:
        _display = before


@dataclass
class Phase:
    detail: str = ""


@contextmanager
def phase(what: str, done: str = "") -> Iterator[Phase]:
    """A phase that may take long. The block may set `detail` of the value it receives."""
    checkpoint()
    running, started = Phase(), time.perf_counter()
    _standing.phases.append(what)
    try:
        emit(Began(what))
        try:
            yield running
        except BaseException:
            emit(Ended("", time.perf_counter() - started))
            raise
        emit(Ended(done, time.perf_counter() - started, running.detail))
    finally:
        _standing.last = _standing.phases.pop()


@contextmanager
def stepping(total: int | None, every: int | None = None, folder: str = "") -> Iterator[None]:
    """The block emits StepMetrics after every step. `folder` has what is kept of them."""
    _standing.steps, _standing.folder = 0, folder
    emit(Stepping(total, every))
    try:
        yield
    finally:
        emit(Stopped())
