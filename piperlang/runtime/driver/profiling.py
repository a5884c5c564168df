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
from piperlang.runtime.driver.recording import around, parts, recorded
from piperlang.runtime.hardware.kind import StepTimes
from piperlang.simulate.measured import Profile, profile_of, undelayed
from piperlang.simulate.sharing import Sharing
from piperlang.simulate.timeline import Timeline

WHOLE = 3
"""Steps that are recorded with all their instructions, where the others are recorded in parts."""
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


def profiled(job: Job, graph: Graph, batches: Iterable[tuple[Any, Any]], steps: int) -> Profiled:
    """Steps recorded and not, one of each in every pair, so that what recording costs is measured beside it. Which of a
    pair is the first changes without a period, since other work on a machine may have one. The shortest pairs count
    (`undelayed`): both of its steps have had the same machine."""
    others, plan = iter(batches), job.plan
    for batch in islice(others, WARM_UP):
        job.step(batch)
    count = min(steps, job.backend.device.recorded_parts)
    divided = parts(plan, count)
    plain: list[float] = []
    taken: list[float] = []
    times: list[list[StepTimes]] = []
    for number, batch in enumerate(islice(others, 2 * steps)):
        if number.bit_count() % 2 == 0:
            plain.append(_recorded_step(job, batch, [()] * len(plan.devices))[0])
        else:
            seconds, its = _recorded_step(job, batch, divided[len(taken) % count])
            taken.append(seconds)
            times.append(its)
    whole = (
        times if count == 1 else [_recorded_step(job, batch, parts(plan, 1)[0])[1] for batch in islice(others, WHOLE)]
    )
    rounds = [range(at, at + count) for at in range(0, min(len(plain), len(taken)) - count + 1, count)]
    lengths = [sum(plain[i] + taken[i] for i in pairs) for pairs in rounds]
    chosen = [rounds[i] for i in undelayed(lengths)]
    before, after = around(plan, whole)
    profile = profile_of(
        plan,
        graph,
        [recorded(plan, times[i]) for pairs in chosen for i in pairs],
        _issued(plan, times),
        before,
        after,
        not job.backend.buffered,
        Sharing(*job.backend.device.sharing(len(plan.devices))) if job.cluster.local else Sharing(),
        _about(job.backend),
    )
    timelines = sorted((recorded(plan, step, "recorded").timeline for step in whole), key=lambda step: step.length)
    seconds, recording = (fmean(of[i] for pairs in chosen for i in pairs) for of in (plain, taken))
    return Profiled(profile, timelines[len(timelines) // 4], seconds, recording)


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
