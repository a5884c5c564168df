"""`--trace N`: some steps of a run are recorded, and drawn beside what was estimated for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.run_folder import write_text
from piperlang.cli.simulate import machine_of
from piperlang.diagnostics import PiperError
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.ir.graph import Graph
    from piperlang.plan.plan import Plan
    from piperlang.runtime.comm.backend import Backend

WARM_UP = 3
"""Steps before those that are recorded, if there are so many: the first ones compile, and allocate memory."""
PAGE, EVENTS = "trace.html", "trace.json"
LOST = "only this picture"


class Tracing:
    def __init__(self, wanted: int, steps: int, folder: Path) -> None:
        """`steps`: that there will be."""
        self.first = min(WARM_UP, max(0, steps - wanted))
        self.last = min(self.first + wanted, steps)
        self.folder = folder
        self.done = False

    def before(self, number: int, job: Any) -> None:
        """`number`: of the step that comes, since the job has started."""
        if number == self.first and not self.done:
            job.record([range(len(device.instructions)) for device in job.plan.devices])

    def after(self, number: int, job: Any, plan: Plan, graph: Callable[[], Graph], backend: Backend) -> None:
        """`number`: of steps since the job has started."""
        if number == self.last and not self.done:
            self.done = True
            try:
                self._write(job.record(None), plan, graph(), backend)
            except PiperError as problem:  # a run is worth more than its picture
                emit(Notice(f"the recorded steps are lost: {problem.diagnostics[0].message}", warning=True))

    def _write(self, times: Any, plan: Plan, graph: Graph, backend: Backend) -> None:
        from piperlang.runtime.driver.recording import recorded
        from piperlang.simulate.costs import MachineCosts
        from piperlang.simulate.disagree import text
        from piperlang.simulate.result import simulated
        from piperlang.view.page import page
        from piperlang.view.trace import trace

        steps = [recorded(plan, step, "recorded").timeline for step in zip(*times, strict=True)]
        if not steps:
            emit(Notice("no step was recorded: their batches have other shapes than the first one", warning=True))
            return
        typical = sorted(steps, key=lambda step: step.length)[len(steps) // 2]
        machine = machine_of(backend)
        estimated = simulated(plan, graph, MachineCosts(plan, graph, machine), title=machine.name).timeline
        estimated = replace(estimated, source=f"estimated for {machine.name}")
        write_text(self.folder / PAGE, page([typical], estimated), LOST)
        write_text(self.folder / EVENTS, trace(typical), LOST)
        for line in text(typical, estimated).splitlines():
            emit(Notice(line))
        count = counted(len(steps), "step")
        wanted = self.last - self.first
        others = f" ({wanted - len(steps)} more had batches of other shapes)" if len(steps) < wanted else ""
        emit(Notice(f"recorded {count}{others}, beside an estimate for {machine.name}: {self.folder / PAGE}, {EVENTS}"))
