"""Measures what the instructions of a plan take on workers."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import torch

from piperlang.ir.graph import Graph
from piperlang.plan.plan import Plan
from piperlang.runtime.comm.backend import Backend
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.recording import around, recorded
from piperlang.runtime.hardware.kind import StepTimes
from piperlang.simulate.profile import Profile, profile_of, undelayed
from piperlang.simulate.sharing import Sharing
from piperlang.simulate.timeline import Timeline

WARM_UP = 3
"""Steps before any is measured: the first ones compile, and allocate memory."""


class Profiled(NamedTuple):
    found: Profile
    typical: Timeline
    """A step with all its instructions, as long as those that count."""
    seconds: float
    """The mean of steps in which no instruction is recorded. Like one with them, it ends when the devices have nothing
    more to do: in training the host goes on before that."""
    recording: float
    """The same of those that are recorded for the profile."""


class MeasuredPair(NamedTuple):
    """Two steps, one after the other, so that both have had the same machine."""

    plain: float
    """Seconds of the one in which no instruction is recorded."""
    recorded: float
    times: list[StepTimes]
    """Of the other one, by device."""


def measured(job: Job, batches: Iterable[tuple[Any, Any]], steps: int) -> list[MeasuredPair]:
    """Steps recorded and not, so that what recording costs is measured beside it. Which of a pair is the first changes
    without a period, since other work on a machine may have one."""
    others = iter(batches)
    for batch in islice(others, WARM_UP):
        job.step(batch)
    nothing: list[Collection[int]] = [() for _ in job.plan.devices]
    everything: list[Collection[int]] = [range(len(device.instructions)) for device in job.plan.devices]
    plain: list[float] = []
    taken: list[tuple[float, list[StepTimes]]] = []
    for number, batch in enumerate(islice(others, 2 * steps)):
        if number.bit_count() % 2 == 0:
            plain.append(_recorded_step(job, batch, nothing)[0])
        else:
            taken.append(_recorded_step(job, batch, everything))
    return [MeasuredPair(seconds, *its) for seconds, its in zip(plain, taken, strict=False)]


def profiled(job: Job, graph: Graph, pairs: Sequence[MeasuredPair]) -> Profiled:
    """Of pairs that were measured in this job, or in others of the same plan: the shorter ones count (`undelayed`)."""
    plan = job.plan
    pairs = [pairs[i] for i in undelayed([one.plain + one.recorded for one in pairs])]
    times = [one.times for one in pairs]
    before, after = around(plan, times)
    steps = [recorded(plan, its, "recorded") for its in times]
    profile = profile_of(
        plan,
        graph,
        steps,
        _issued(plan, times),
        before,
        after,
        not job.backend.buffered,
        Sharing(*job.backend.device.sharing(len(plan.devices))) if job.cluster.local else Sharing(),
        _about(job.backend),
    )
    timelines = sorted((step.timeline for step in steps), key=lambda step: step.length)
    return Profiled(
        profile, timelines[len(timelines) // 2], fmean(one.plain for one in pairs), fmean(one.recorded for one in pairs)
    )


def _recorded_step(
    job: Job, batch: tuple[Any, Any], chosen: Sequence[Collection[int]]
) -> tuple[float, list[StepTimes]]:
    job.record(chosen)
    seconds = job.step(batch).seconds
    return seconds, [of_device[0] for of_device in job.record(None)]


def _issued(plan: Plan, steps: Sequence[Sequence[StepTimes]]) -> dict[str, list[float]]:
    """Seconds that the host needed, by kind of instruction: the mean of every step."""
    found: dict[str, list[float]] = defaultdict(list)
    for times in steps:
        of_step: dict[str, list[float]] = defaultdict(list)
        for device, its in zip(plan.devices, times, strict=True):
            for x, seconds in zip(device.instructions, its.issued, strict=True):
                if seconds:
                    of_step[x.op].append(seconds)
        for op, values in of_step.items():
            found[op].append(fmean(values))
    return found


def _about(backend: Backend) -> dict[str, Any]:
    return {
        "device": backend.device.model(),
        "backend": backend.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
