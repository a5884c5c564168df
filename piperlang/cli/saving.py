"""When a job saves checkpoints: `--save-every`, `--save-minutes`, and at its end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from piperlang.cli.report import open_script
from piperlang.progress import Notice, emit

if TYPE_CHECKING:
    from piperlang.cli.feeding import Feeding
    from piperlang.plan.plan import Plan
    from piperlang.runtime.checkpoint.manifest import Manifest
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
        from piperlang.runtime.checkpoint.store import Store
        from piperlang.runtime.driver.checkpoints import Checkpoints

        self.run, self.every, self.minutes = folder, options.save_every, options.save_minutes
        self.start = self.step = self.saved = before.step if before is not None else 0
        """`saved`: the step of the newest checkpoint."""
        self.samples, self.skipped = (before.data.samples, before.data.skipped) if before is not None else (0, 0)
        self.last = time.monotonic()
        store = Store(folder)
        store.tidy()
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
        self._told(self.checkpoints.finished())
        due = (self.every is not None and self.step % self.every == 0) or (
            self.minutes is not None and time.monotonic() - self.last >= 60 * self.minutes
        )
        if due or (last and self.wanted):
            self.save(fed)

    def save(self, fed: Feeding) -> None:
        """Begins a checkpoint, unless there is one of this step."""
        if self.saved == self.step:
            return
        self._told(self.checkpoints.wait())
        self.last = time.monotonic()
        position, trees = fed.position(self.samples, self.skipped)
        self.checkpoints.save(self.step, position, trees)
        self.saved = self.step

    def finish(self) -> None:
        """Waits for the checkpoint that is being written."""
        self._told(self.checkpoints.wait())

    def abandon(self) -> None:
        """A worker is gone: the checkpoint that is being written is dropped, unless it is whole."""
        self._told(self.checkpoints.abandon())

    def _told(self, done: Any) -> None:
        if done is not None:
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
