"""Checkpoints of small jobs, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from piperlang.runtime.checkpoint.files import Reader, verify, write_part
from piperlang.runtime.checkpoint.manifest import DataPosition, Manifest
from piperlang.runtime.checkpoint.store import store_of
from piperlang.runtime.driver.checkpoints import Checkpoints
from piperlang.runtime.driver.restoring import shapes_of
from piperlang.runtime.driver.saving import HostMemory, WrittenPart, assigned, merged, snapshot
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from tests.support.optimizer_jobs import Make, Net, Rates, batch, scheduled


def save(job: Any, run: Path, step: int, keep: int = 100) -> Path:
    """The folder of a checkpoint of a job."""
    checkpoints = Checkpoints(job, store_of(run), 0, {}, keep)
    checkpoints.save(step, DataPosition(step, 12 * step), {})
    done = checkpoints.wait()
    assert done is not None
    return done.folder


def job(script: str, make: Make, schedule: Rates = None, **more: Any) -> ThreadJob:
    _, captured, plan = scheduled(script)
    return ThreadJob(plan, captured, Training(Net, make, schedule, **more), 20.0, "float64")


def steps(job: ThreadJob, first: int, last: int) -> list[float]:
    return [job.step(batch(step)).loss for step in range(first, last)]


def contents(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a checkpoint, whole, and its containers."""
    manifest = verify(folder)
    reader = Reader(folder, manifest)
    return {str(name): reader.tensor(name) for name in manifest.tensors}, dict(manifest.trees)


def assert_same(one: Path, other: Path) -> None:
    (here, trees), (there, others) = contents(one), contents(other)
    assert here.keys() == there.keys()
    different = [
        name for name in here if here[name].dtype != there[name].dtype or not torch.equal(here[name], there[name])
    ]
    assert not different
    assert trees == others


def save_in_parts(job: ThreadJob, run: Path, step: int) -> Path:
    """A checkpoint as workers write it: a file for each device."""
    store = store_of(run)
    folder = store.begin(step)
    written = []
    for number, mine in enumerate(assigned(job.plan, job.captured.unsaved)):
        found = snapshot(job.training.devices, job.optimizers, mine, None if number else job.rest, HostMemory())
        written.append(
            WrittenPart(mine.file, write_part(folder / mine.file, found.tensors), found.written, found.trees)
        )
    manifest = Manifest(
        step,
        0,
        DataPosition(step, 12 * step),
        merged(written, shapes_of(job.plan, job.captured.unsaved)),
        {one.name: one.file for one in written},
        dict(job.rest.entries),
        {name: tree for one in written for name, tree in one.trees.items()},
    )
    return store.commit(folder, manifest)
