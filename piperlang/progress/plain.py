"""Plain lines, for logs and simple terminals. Nothing is ever erased."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from piperlang.progress.events import Began, Ended, Event, Notice, StepMetrics, Stepping, Stopped, Workers
from piperlang.progress.lines import Pace, beat_line, phase_line, row_line, wrapped

SILENCE = 1.8
"""Seconds without a line after which a running phase is reported again: with a tick less than two."""
STARTING = 0.5
"""Seconds that Python's start may have taken. If all phases are reported, they count as silence too."""
LONG = 2.0
"""Minimum duration in seconds of a phase that is reported where phases are not kept."""
PATIENCE = 10.0
"""Both, for progress on standard error next to the results of a command: only long phases are reported."""


@dataclass
class Running:
    """A phase that has not ended."""

    what: str
    since: float


class Watching(ABC):
    """A display with its own thread, which draws while the main thread is busy.

    The thread draws under the lock that `show` holds while it updates the state: it never draws a phase that
    has ended."""

    tick_seconds = 0.1

    def __init__(self, keeps_phases: bool) -> None:
        self.keeps_phases = keeps_phases
        """Whether all phases leave a line, or only long ones."""
        self.long = LONG
        self.lock = threading.RLock()
        self.phases: list[Running] = []
        self.pace: Pace | None = None
        self.total: int | None = None
        self.row: StepMetrics | None = None
        """The row of the last step."""
        self.kept = True
        """Whether that row has a line."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, event: Event) -> None:
        with self.lock:
            match event:
                case StepMetrics():
                    self._step(event)
                case Began(what):
                    self.phases.append(Running(what, time.monotonic()))
                    self._start()
                case Workers(ready, count):
                    if self.phases:
                        self.phases[-1].what = f"workers {ready}/{count}"
                case Ended(done, seconds):
                    if self.phases:
                        self.phases.pop()
                    if done and (self.keeps_phases or seconds >= self.long):
                        self.keep(phase_line(event), quiet=True)
                case Stepping(total, every):
                    self.pace, self.total, self.row, self.kept = Pace(total, every), total, None, True
                    self._start()
                case Stopped():
                    if self.row is not None and not self.kept:  # the last one is always kept
                        self.keep(row_line(self.row, self.width()))
                    self.pace = self.row = None
                case Notice(text):
                    self.keep(wrapped(text, self.width()))
            self.changed()

    def _step(self, row: StepMetrics) -> None:
        if self.pace is None:
            return
        self.row, self.kept = row, self.pace.keeps(row)
        if self.kept:
            self.keep(row_line(row, self.width()))

    def close(self) -> None:
        with self.lock:
            self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="piper-progress", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(self.tick_seconds):
            with self.lock:
                if self._closed.is_set():
                    return
                try:
                    self.tick(time.monotonic())
                except (OSError, ValueError):  # the reader is gone; the main thread notices too
                    return

    @abstractmethod
    def tick(self, now: float) -> None:
        """Draw updates that are due. Called by the thread, with the lock."""

    @abstractmethod
    def keep(self, text: str, quiet: bool = False) -> None:
        """Write permanent lines."""

    @abstractmethod
    def width(self) -> int | None:
        """Cells of a line, where there is a limit."""

    def changed(self) -> None:  # noqa: B027  # only some displays care
        """An event has been taken in."""


class Plain(Watching):
    def __init__(
        self,
        stream: TextIO,
        keeps_phases: bool = True,
        width: Callable[[], int | None] = lambda: None,
        dim: Callable[[str], str] = str,
    ) -> None:
        super().__init__(keeps_phases)
        self.stream, self._width, self.dim = stream, width, dim
        self.silence = SILENCE if keeps_phases else PATIENCE
        self.long = LONG if keeps_phases else PATIENCE
        self.written = time.monotonic() - (STARTING if keeps_phases else 0.0)

    def width(self) -> int | None:
        return self._width()

    def keep(self, text: str, quiet: bool = False) -> None:
        print(self.dim(text) if quiet else text, file=self.stream, flush=True)
        self.written = time.monotonic()

    def tick(self, now: float) -> None:
        if self.phases and now - self.written >= self.silence:
            running = self.phases[-1]
            self.keep(beat_line(running.what, now - running.since), quiet=True)
