"""Steps that workers have recorded, as timelines."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from piperlang.plan.instructions import Collective, Receive, Send
from piperlang.plan.plan import Plan
from piperlang.runtime.hardware.kind import StepTimes
from piperlang.simulate.execute import Activities
from piperlang.simulate.timeline import Place, Ran, RecordedStep, Timeline


def recorded(plan: Plan, times: Sequence[StepTimes], title: str = "") -> RecordedStep:
    """One step. Processes of one machine share a clock; those of others begin the step together, as far as is known."""
    zero = min(one.begun for one in times)
    shifts = [0.0 if abs(one.begun - zero) < one.ended - one.begun else one.begun - zero for one in times]
    activities = Activities(plan)
    ran: dict[Place, Ran] = {}
    for row, (device, its) in enumerate(zip(plan.devices, times, strict=True)):
        from_zero = zero + shifts[row]
        for i, (start, end) in sorted(its.spans.items()):
            x = device.instructions[i]
            ran[row, i] = Ran(row, x.stream, activities.of(device, x), start - from_zero, end - from_zero)
    pairs = [(sender, receiver) for sender, receiver in _messages(plan) if sender in ran and receiver in ran]
    _note_waits(plan, ran, pairs)
    timeline = Timeline(
        [(device.device,) for device in plan.devices],
        list(ran.values()),
        max(one.ended - zero - shift for one, shift in zip(times, shifts, strict=True)),
        messages=[(ran[sender], ran[receiver]) for sender, receiver in pairs],
        title=title,
    )
    return RecordedStep(timeline, ran)


def _messages(plan: Plan) -> list[tuple[Place, Place]]:
    sent: dict[tuple[int, int, int], Place] = {}
    for row, device in enumerate(plan.devices):
        for i, x in enumerate(device.instructions):
            if isinstance(x, Send):
                sent |= {(device.device, one.peer, one.tag): (row, i) for one in x.messages}
    return [
        (sent[one.peer, device.device, one.tag], (row, i))
        for row, device in enumerate(plan.devices)
        for i, x in enumerate(device.instructions)
        if isinstance(x, Receive)
        for one in x.messages
    ]


def _note_waits(plan: Plan, ran: dict[Place, Ran], pairs: Sequence[tuple[Place, Place]]) -> None:
    """A receive waits until its message is sent, a collective until its last member is there."""
    begins: dict[Place, float] = {}
    for sender, receiver in pairs:
        begins[receiver] = max(begins.get(receiver, 0.0), ran[sender].start)
    for places in _meetings(plan):
        there = [place for place in places if place in ran]
        if there:
            begins |= dict.fromkeys(there, max(ran[place].start for place in there))
    for place, begin in begins.items():
        one = ran[place]
        waited = min(max(0.0, begin - one.start), one.end - one.start)
        if waited:
            ran[place] = replace(one, waited=waited)


def _meetings(plan: Plan) -> list[list[Place]]:
    """The instructions of every collective, of all its devices."""
    found: dict[tuple[int, int], list[Place]] = defaultdict(list)
    for row, device in enumerate(plan.devices):
        count: Counter[int] = Counter()
        for i, x in enumerate(device.instructions):
            if isinstance(x, Collective):
                found[x.group, count[x.group]].append((row, i))
                count[x.group] += 1
    return list(found.values())


def around(plan: Plan, steps: Sequence[Sequence[StepTimes]]) -> tuple[float, float]:
    """Seconds of a step before the first and after the last instruction: the least of all devices, of the median
    step."""
    before, after = [], []
    for times in steps:
        ran = [one for one in times if one.spans]
        before.append(min(min(start for start, _ in one.spans.values()) - one.begun for one in ran))
        after.append(min(one.ended - max(end for _, end in one.spans.values()) for one in ran))
    return median(before), median(after)
