"""Saves checkpoints of a job while it trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from piperlang.diagnostics import PiperError, error
from piperlang.runtime.checkpoint.files import Folder
from piperlang.runtime.checkpoint.manifest import DataPosition, Manifest
from piperlang.runtime.checkpoint.store import Store
from piperlang.runtime.driver.assemble import Rest
from piperlang.runtime.driver.restoring import shapes_of
from piperlang.runtime.driver.saving import WrittenPart, merged
from piperlang.runtime.driver.training import Lost

ABANDON = 5.0
"""Seconds to wait for a checkpoint when a worker is lost: a process that cannot answer any more would never end it."""


class Saves(Protocol):
    """A job whose state can be saved."""

    plan: Any
    captured: Any

    def check_state(self) -> None:
        """Raises P0610 if the state cannot be saved."""

    def snapshot(self, folder: Folder) -> None:
        """Copies the state to host memory. It is being written when this returns."""

    def written(self) -> list[WrittenPart]:
        """Waits for the files."""

    def model_entries(self) -> Rest:
        """The entries of the model's state dict."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    folder: Folder
    step: int
    stalled: float
    """Seconds that training has waited for it."""
    seconds: float
    """From its begin until it was on the disk."""


class Checkpoints:
    def __init__(self, job: Saves, store: Store[Any], seed: int, about: Mapping[str, Any], keep: int) -> None:
        self.job, self.store, self.seed, self.about, self.keep = job, store, seed, about, keep
        self.shapes = shapes_of(job.plan, job.captured.unsaved)
        self.coming: Future[Saved] | None = None

    def save(self, step: int, data: DataPosition, trees: Mapping[str, Any]) -> None:
        """Begins a checkpoint, after the one before it is written."""
        self.wait()
        started = time.perf_counter()
        try:
            folder = self.store.begin(step)
        except OSError as problem:
            raise not_written(self.store.folder, problem) from problem
        try:
            self.job.snapshot(folder)
        except BaseException:
            self.store.discard(folder)
            raise
        stalled = time.perf_counter() - started
        result: Future[Saved] = Future()
        self.coming = result

        def complete() -> None:
            try:
                target = self._commit(folder, step, data, trees)
                result.set_result(Saved(target, step, stalled, time.perf_counter() - started))
            except BaseException as problem:
                self.store.discard(folder)
                result.set_exception(problem)

        threading.Thread(target=complete, name="piperlang-checkpoint", daemon=True).start()

    def _commit(self, folder: Folder, step: int, data: DataPosition, trees: Mapping[str, Any]) -> Folder:
        written = self.job.written()
        rest = self.job.model_entries()
        weight_of = {alias: name for name, others in self.job.captured.aliases.items() for alias in others}
        entries = {entry: weight_of.get(name, name) for entry, name in rest.entries.items()}
        manifest = Manifest(
            step,
            self.seed,
            data,
            merged(written, self.shapes),
            {one.name: one.file for one in written},
            entries,
            _joined(written) | dict(trees),
            {**self.about, "configs": rest.configs, "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
        )
        target: Folder = self.store.commit(folder, manifest)
        self.store.prune(self.keep)
        return target

    def wait(self, timeout: float | None = None) -> Saved | None:
        """Waits for the checkpoint that is being written, if there is one. Raises why it could not be."""
        if self.coming is None:
            return None
        coming, self.coming = self.coming, None
        try:
            return coming.result(timeout)
        except (PiperError, TimeoutError):
            raise
        except Lost:  # the next step says so
            return None
        except Exception as problem:  # safetensors raises its own
            raise not_written(self.store.folder, problem) from problem

    def abandon(self) -> Saved | None:
        """The same, and what could not be written is forgotten."""
        try:
            return self.wait(ABANDON)
        except (PiperError, TimeoutError):
            return None

    def finished(self) -> Saved | None:
        """The checkpoint that has been written since the last call, without waiting."""
        return self.wait() if self.coming is not None and self.coming.done() else None


def _joined(written: Sequence[WrittenPart]) -> dict[str, Any]:
    """Containers that several processes have written must be the same."""
    found: dict[str, Any] = {}
    for one in written:
        for name, tree in one.trees.items():
            if found.setdefault(name, tree) != tree:
                raise error(
                    "P0610",
                    f"the {name.replace(' ', ' of ', 1)} differs between devices that have parts of it",
                    help="keep state that is the same for all elements of a weight, or has its shape",
                )
    return found


def not_written(folder: Folder, problem: BaseException) -> PiperError:
    reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
    return error(
        "P0609",
        f"cannot write a checkpoint into {folder}",
        notes=[str(reason).partition("\n")[0], "checkpoints that were written before are whole"],
        help="look at the space there, and whether it may be written; then continue: `--resume`",
    )
