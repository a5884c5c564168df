"""What a simulated step says: its length, what devices wait for, and which lines of the script make it long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from piperlang.core.collector import uncollected
from piperlang.ir.graph import Graph
from piperlang.plan.estimate.memory import ValueSizes, over_time
from piperlang.plan.estimate.summary import bytes_text, time_text
from piperlang.plan.plan import Plan
from piperlang.simulate.costs import CostModel
from piperlang.simulate.execute import SimulatedStep, execute
from piperlang.simulate.timeline import ROUNDING, Curve, Ran, Timeline, stream_name

SEGMENTS = 8
"""Parts of the critical path that are shown: the longest."""


class Segment(NamedTuple):
    """A part of the critical path: what one stream of one device does."""

    what: str
    device: int
    line: str
    seconds: float


def simulated(
    plan: Plan,
    graph: Graph,
    costs: CostModel,
    alike: Sequence[tuple[int, ...]] | None = None,
    title: str = "",
    states: float | None = None,
) -> SimulatedStep:
    """A step in simulated time, with the memory of its devices."""
    with uncollected():
        return _simulated(plan, graph, costs, alike, title, states)


def _simulated(
    plan: Plan,
    graph: Graph,
    costs: CostModel,
    alike: Sequence[tuple[int, ...]] | None,
    title: str,
    states: float | None,
) -> SimulatedStep:
    timeline, path, lengths = _typical([execute(plan, one, alike, title) for one in costs.drawn()])
    sizes = ValueSizes(plan, graph)
    memory = {}
    ran = timeline.of_row()
    for row, device in enumerate(plan.devices):
        its = ran[row]
        # Where the host issues instructions, memory is allocated in that order.
        order = None if costs.machine.host else sorted(range(len(its)), key=lambda i: its[i].start)
        memory[row] = _curve(its, over_time(device, plan, sizes, order, states))
    return SimulatedStep(replace(timeline, memory=memory), path, lengths)


def _typical(steps: Sequence[SimulatedStep]) -> SimulatedStep:
    lengths = tuple(one.timeline.length for one in steps)
    mean = fmean(lengths)
    return min(steps, key=lambda one: abs(one.timeline.length - mean))._replace(lengths=lengths)


def _curve(ran: Sequence[Ran], sizes: Sequence[int]) -> Curve:
    """From the begin of each instruction to that of the next."""
    found: list[tuple[float, float]] = []
    for one, size in sorted(zip(ran, sizes, strict=True), key=lambda pair: pair[0].start):
        if found and found[-1][0] == one.start:
            found[-1] = (one.start, max(found[-1][1], size))
        elif not found or found[-1][1] != size:
            found.append((one.start, size))
    return found


def segments(found: SimulatedStep) -> list[Segment]:
    """The critical path in order. What is left of the step, before or between them, is the host's."""
    parts: list[Segment] = []
    at, shortest = 0.0, ROUNDING * found.timeline.length
    for one in found.path:
        begins = max(at, one.start + one.waited)
        if begins - at > shortest:
            parts.append(Segment("host", _device(found.timeline, one), "", begins - at))
        if one.end - begins > shortest:
            parts.append(Segment(_what(one), _device(found.timeline, one), one.what.line, one.end - begins))
        at = max(at, one.end)
    return parts


def _device(timeline: Timeline, one: Ran) -> int:
    return timeline.rows[one.row][0]


def _what(one: Ran) -> str:
    """`F stage=1`: what passes of all microbatches share."""
    stage = one.what.tags.get("stage")
    return one.what.op if stage is None else f"{one.what.op} stage={stage}"


def summed(parts: Sequence[Segment]) -> list[Segment]:
    """By what they do and where, the longest first."""
    total: dict[tuple[str, int, str], float] = {}
    for one in parts:
        key = (one.what, one.device, one.line)
        total[key] = total.get(key, 0.0) + one.seconds
    return [Segment(*key, seconds) for key, seconds in sorted(total.items(), key=lambda item: -item[1])]


def as_json(found: SimulatedStep, memory: float = 0.0) -> dict[str, Any]:
    """`memory`: of a device, in bytes; 0 if unknown."""
    timeline = found.timeline
    lengths = found.lengths or (timeline.length,)
    peaks = [max((size for _, size in timeline.memory.get(row, ())), default=0.0) for row in range(len(timeline.rows))]
    most = max(range(len(peaks)), key=lambda row: (peaks[row], -min(timeline.rows[row])), default=0)
    return {
        "seconds": found.seconds,
        "range": [min(lengths), max(lengths)],
        "devices": sum(map(len, timeline.rows)),
        "idle": {"mean": timeline.idle_share(), "min": min(timeline.idle()), "max": max(timeline.idle())},
        "exposed": timeline.exposed(),
        "memory": {"peak": peaks[most], "device": min(timeline.rows[most]), "of": memory or None},
        "critical_path": [one._asdict() for one in summed(segments(found))],
    }


def text(found: SimulatedStep, machine: str, memory: float = 0.0) -> str:
    data, timeline = as_json(found, memory), found.timeline
    idle, peak = data["idle"], data["memory"]
    rows = [
        ("step", f"{time_text(data['seconds'])} simulated{_range(found.lengths)}, on {machine}"),
        (
            "idle",
            f"{100 * idle['mean']:.0f}% of the step a device computes nothing"
            f" ({100 * idle['min']:.0f}% to {100 * idle['max']:.0f}%)",
        ),
    ]
    for k, (stream, seconds) in enumerate(data["exposed"].items()):
        share = 100 * seconds / (timeline.length or 1)
        rows.append(
            ("exposed" if not k else "", f"{time_text(seconds):>10}  {share:3.0f}%  of stream {stream}, at most")
        )
    over = f", more than the {bytes_text(memory)} there are" if memory and peak["peak"] > memory else ""
    rows.append(
        ("memory", f"{bytes_text(peak['peak'])} at most, on device {peak['device']}, with the states of Adam{over}")
    )
    parts = summed(segments(found))
    for k, one in enumerate(parts[:SEGMENTS]):
        share = 100 * one.seconds / (timeline.length or 1)
        line = f"  ({one.line})" if one.line else ""
        rows.append(
            (
                "path" if not k else "",
                f"{time_text(one.seconds):>10}  {share:3.0f}%  {one.what} on device {one.device}{line}",
            )
        )
    if parts[SEGMENTS:]:
        rest = sum(one.seconds for one in parts[SEGMENTS:])
        share = 100 * rest / (timeline.length or 1)
        rows.append(("", f"{time_text(rest):>10}  {share:3.0f}%  {len(parts) - SEGMENTS} more"))
    return "\n".join(f"{name:<9}{said}".rstrip() for name, said in rows) + "\n"


def _range(lengths: Sequence[float]) -> str:
    """` (160 to 190 ms in 10 steps)`"""
    if len(lengths) < 2:
        return ""
    return f" ({time_text(min(lengths))} to {time_text(max(lengths))} in {len(lengths)} steps)"


def streams(timeline: Timeline) -> list[str]:
    """In the order in which they are drawn: what computes first."""
    names = dict.fromkeys(stream_name(one.stream) for one in timeline.ran)
    return sorted(names, key=lambda name: (name != "compute", name))
