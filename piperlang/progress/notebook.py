"""In a notebook: one output below the cell, which is updated in place.

No thread is used: output of another thread may appear below another cell. A phase is shown as soon as it begins.
"""

from __future__ import annotations

import html
import sys
import time
from importlib import import_module
from typing import Any

from piperlang.progress.events import Began, Ended, Event, Notice, StepMetrics, Stepping, Stopped, Workers
from piperlang.progress.lines import Pace, phase_line, row_line

INTERVAL = 0.25
"""Seconds between two updates by steps."""


def notebook() -> Notebook | None:
    """A display, if this process is a notebook kernel."""
    ipython: Any = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return Notebook(shell) if hasattr(shell, "kernel") else None


class Notebook:
    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cell: object = None
        """The cell whose output is updated; the next cell with events gets its own output."""
        self.output: Any = None
        self.lines: list[str] = []
        self.phases: list[str] = []
        self.pace: Pace | None = None
        self.row: StepMetrics | None = None
        """The row of the last step, if it has no line."""
        self.updated = 0.0
        shell.events.register("post_run_cell", self.finish)

    def show(self, event: Event) -> None:
        if self.shell.execution_count != self.cell:
            self.cell, self.output, self.lines = self.shell.execution_count, None, []
        match event:
            case StepMetrics():
                self._step(event)
                return
            case Began(what):
                self.phases.append(f"{what} ...")
            case Workers(ready, count):
                if self.phases:
                    self.phases[-1] = f"workers {ready}/{count} ..."
            case Ended(done):
                if self.phases:
                    self.phases.pop()
                self.lines += [phase_line(event)] if done else []
            case Stepping(total, every):
                self.pace = Pace(total, every)
            case Stopped():
                self.lines += [row_line(self.row)] if self.row is not None else []
                self.pace = self.row = None
            case Notice(text):
                self.lines.append(text)
        self._update()

    def _step(self, row: StepMetrics) -> None:
        self.pace = self.pace or Pace(None, None)
        kept = self.pace.keeps(row)
        self.lines += [row_line(row)] if kept else []
        self.row = None if kept else row
        if kept or time.monotonic() - self.updated >= INTERVAL:
            self._update()

    def finish(self, _: object = None) -> None:
        """At the end of a cell: show the row of its last step, which may have come too soon after an update."""
        if self.row is not None:
            self.lines.append(row_line(self.row))
            self.row = None
            self._update()

    def _update(self) -> None:
        self.updated = time.monotonic()
        last = self.phases[-1:] or ([row_line(self.row)] if self.row is not None else [])
        text = "\n".join([*self.lines, *last])
        bundle = {"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>"}
        if self.output is not None:
            self.output.update(bundle, raw=True)
        elif text:
            display: Any = import_module("IPython.display").display
            self.output = display(bundle, raw=True, display_id=True)
