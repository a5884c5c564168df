"""When a job saves checkpoints: `--save-every`, `--save-minutes`, and at its end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.report import open_script
from piperlang.cli.run_folder import NOT_WRITTEN, patiently
from piperlang.diagnostics import PiperError
from piperlang.progress import Notice, emit
from piperlang.progress.lines import counted

if TYPE_CHECKING:
    from piperlang.cli.feeding import Feeding
    from piperlang.plan.plan import Plan
    from piperlang.runtime.checkpoint.manifest import Manifest
    from piperlang.runtime.driver.checkpoints import Saved
    from piperlang.runtime.driver.training import StepResult


class Saving:
    """Called after every step."""

    def __init__(
        self,
        options: argparse.Namespace,
        job: Any,
        plan: Plan,
        folder: Path,
        settings: Mapping[str, Any],
        before: Manifest | None,
    ) -> None:
        """`settings`: what a run that is resumed is compared with. `before`: the checkpoint that it starts from."""
        from piperlang.runtime.checkpoint.store import store_of
        from piperlang.runtime.driver.checkpoints import Checkpoints, not_written

        self.run, self.every, self.minutes = folder, options.save_every, options.save_minutes
        self.start = self.step = self.saved = self.begun = before.step if before is not None else 0
        """`saved`: the step of the newest checkpoint; `begun`: of the one that is being written, or was tried last."""
        self.samples, self.skipped = (before.data.samples, before.data.skipped) if before is not None else (0, 0)
        self.last = time.monotonic()
        store = store_of(folder)
        try:
            store.tidy()
        except OSError as problem:
            raise not_written(store.folder, problem) from problem
        self.checkpoints = Checkpoints(
            job, store, options.seed, {**_about(options, plan), "settings": settings}, options.keep
        )

    @property
    def wanted(self) -> bool:
        return self.every is not None or self.minutes is not None

    def after(self, done: StepResult, fed: Feeding, last: bool) -> None:
        """After a step, whose row is written."""
        self.step += 1
        if done.skipped:
            self.skipped += 1
        else:
            self.samples += done.samples
        if self.wanted and self.step == self.start + 1:
            self.checkpoints.job.check_state()  # what cannot be saved is said now, not after hours
        self._look(self.checkpoints.finished)
        due = (self.every is not None and self.step % self.every == 0) or (
            self.minutes is not None and time.monotonic() - self.last >= 60 * self.minutes
        )
        if due or (last and self.wanted):
            self.save(fed)

    def save(self, fed: Feeding) -> None:
        """Begins a checkpoint, unless there is one of this step. One that cannot be written is told, and training goes
        on: the next one may be."""
        if self.begun == self.step:
            return
        self._look(self.checkpoints.wait)
        self.last, self.begun = time.monotonic(), self.step
        self._look(lambda: self._begin(fed))

    def finish(self, fed: Feeding) -> None:
        """A checkpoint of this step, whole on the disk."""
        self.save(fed)
        self._look(self.checkpoints.wait)
        if self.saved != self.step:
            patiently(lambda: self._save_now(fed))

    def abandon(self) -> None:
        """A worker is gone: the checkpoint that is being written is dropped, unless it is whole."""
        self._told(self.checkpoints.abandon())

    def _begin(self, fed: Feeding) -> None:
        position, trees = fed.position(self.samples, self.skipped)
        self.checkpoints.save(self.step, position, trees)

    def _save_now(self, fed: Feeding) -> None:
        self._begin(fed)
        self._told(self.checkpoints.wait())

    def _look(self, at: Callable[[], Saved | None]) -> None:
        try:
            self._told(at())
        except PiperError as problem:
            if problem.diagnostics[0].code != NOT_WRITTEN:
                raise
            (what, *_), saved = problem.diagnostics, counted(self.saved, "step")
            kept = f"the newest checkpoint is that after {saved}" if self.saved else "there is no checkpoint yet"
            emit(Notice(f"{what.message} ({what.notes[0]}): training goes on; {kept}", warning=True))

    def _told(self, done: Saved | None) -> None:
        if done is not None:
            self.saved = done.step
            waited = f"training waited {1000 * done.stalled:.0f} ms"
            emit(Notice(f"saved a checkpoint after step {done.step} in {done.seconds:.1f} s, {waited}; {done.folder}"))


def _about(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    import platform

    import torch

    from piperlang.plan.files import digest
    from piperlang.version import __version__

    source, _ = open_script(options.script)
    return {
        "script": options.script,
        "script text": source.text,
        "model": options.model,
        "plan": digest(plan),
        "devices": len(plan.devices),
        "parameters": list(options.parameters),
        "steps": options.steps,
        "command": sys.argv[1:],
        "versions": {"piperlang": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
