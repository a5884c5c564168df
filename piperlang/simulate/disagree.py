"""Where an estimated step and a measured one differ."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from piperlang.plan.estimate.summary import time_text
from piperlang.simulate.timeline import Ran, Timeline


class Difference(NamedTuple):
    what: str
    measured: float
    """Seconds of a step, of the device that needs the most."""
    estimated: float


def differences(measured: Timeline, estimated: Timeline) -> list[Difference]:
    """By kind of instruction, the largest difference first."""
    first, second = _totals(measured), _totals(estimated)
    found = [Difference(what, first.get(what, 0.0), second.get(what, 0.0)) for what in {**first, **second}]
    return sorted(found, key=lambda one: -abs(one.measured - one.estimated))


def _totals(timeline: Timeline) -> dict[str, float]:
    """What instructions take themselves, without waiting for other devices."""
    found: dict[str, float] = {}
    for ran in timeline.of_row():
        here: dict[str, float] = defaultdict(float)
        for one in ran:
            here[_kind(one)] += one.end - one.start - one.waited
        for what, seconds in here.items():
            found[what] = max(found.get(what, 0.0), seconds)
    return found


def _kind(one: Ran) -> str:
    stage = one.what.tags.get("stage")
    return one.what.op if stage is None or not one.what.computes else f"{one.what.op} stage={stage}"


def text(measured: Timeline, estimated: Timeline, count: int = 5) -> str:
    share = 100 * (estimated.length / measured.length - 1)
    lines = [
        f"step     {time_text(measured.length)} measured, {time_text(estimated.length)} estimated ({share:+.1f}%)",
        f"idle     {100 * measured.idle_share():.0f}% measured, {100 * estimated.idle_share():.0f}% estimated",
    ]
    for k, one in enumerate(differences(measured, estimated)[:count]):
        name = "differ" if not k else ""
        lines.append(f"{name:<9}{one.what}: {time_text(one.measured)} measured, {time_text(one.estimated)} estimated")
    return "\n".join(lines) + "\n"
