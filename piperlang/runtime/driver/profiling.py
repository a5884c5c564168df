"""Measures what the instructions of a plan take on workers."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch

from piperlang.ir.graph import Graph
from piperlang.plan.plan import Plan
from piperlang.runtime.comm.backend import Backend
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.recording import around, recorded
from piperlang.runtime.hardware.kind import StepTimes
from piperlang.simulate.measured import Profile, profile
from piperlang.simulate.timeline import Timeline

WARM_UP = 3
"""Steps before any is measured: the first ones compile, and allocate memory."""


class Profiled(NamedTuple):
    found: Profile
    steps: list[Timeline]
    seconds: float
    """Of the median step, without recording."""
    recording: float
    """Of the median step that is recorded."""

    @property
    def typical(self) -> Timeline:
        """The recorded step of median length."""
        return sorted(self.steps, key=lambda step: step.length)[len(self.steps) // 2]


def profiled(job: Job, graph: Graph, batches: Iterable[tuple[Any, Any]], steps: int) -> Profiled:
    """Steps in turns, recorded and not, so that what recording costs is measured beside it."""
    others = iter(batches)
    for batch in islice(others, WARM_UP):
        job.step(batch)
    plain: list[float] = []
    taken: list[float] = []
    times: list[list[StepTimes]] = []
    for number, batch in enumerate(islice(others, 2 * steps)):
        records = number % 2 == 1
        job.record(records)
        (taken if records else plain).append(job.step(batch).seconds)
        if records:
            times.append([of_device[0] for of_device in job.record(False)])
    timelines = [recorded(job.plan, step, "recorded") for step in times]
    before, after = around(job.plan, times)
    found = profile(
        job.plan,
        graph,
        timelines,
        _issued(job.plan, times),
        before,
        after,
        not job.backend.buffered,
        _about(job.backend),
    )
    return Profiled(found, timelines, median(plain), median(taken))


def _issued(plan: Plan, steps: Sequence[Sequence[StepTimes]]) -> dict[str, list[float]]:
    """Seconds that the host needed, by kind of instruction."""
    found: dict[str, list[float]] = defaultdict(list)
    for times in steps:
        for device, its in zip(plan.devices, times, strict=True):
            for x, seconds in zip(device.instructions, its.issued, strict=True):
                if seconds:
                    found[x.op].append(seconds)
    return found


def _about(backend: Backend) -> dict[str, Any]:
    kind = backend.device.name
    return {
        "device": torch.cuda.get_device_name() if kind == "cuda" else platform.processor() or platform.machine(),
        "backend": backend.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
