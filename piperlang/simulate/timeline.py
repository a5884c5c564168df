"""When each device did what, in a step that was simulated or recorded. Whatever is drawn is drawn from this."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeAlias

from piperlang.core.selector import TagValue
from piperlang.plan.instructions import COLLECTIVES

PASSES = ("F", "B", "I", "W", "R")
"""Operations that compute; R is a forward again."""

COMMUNICATION = frozenset(("send", "recv", *COLLECTIVES))

ROUNDING = 1e-9
"""A share of the step: less of it is what is left of rounding, and none."""

Place: TypeAlias = tuple[int, int]
"""Row and index of an instruction."""

Curve: TypeAlias = Sequence[tuple[float, float]]
"""(time, bytes), from each time to the next."""


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """What an instruction does; the same object wherever the same is done."""

    op: str
    name: str
    tags: Mapping[str, TagValue]
    line: str = ""
    """Of the script."""
    bytes: float = 0.0
    """That the device sends."""

    @property
    def computes(self) -> bool:
        return self.op in PASSES

    @property
    def communicates(self) -> bool:
        return self.op in COMMUNICATION


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """Something that ran."""

    row: int
    stream: str
    what: Activity
    start: float
    end: float
    waited: float = 0.0
    """At its beginning, for other devices to take part."""
    step: int = -1
    """Of the written order: passes with the same one may overlap."""


@dataclass(frozen=True)
class Timeline:
    rows: Sequence[tuple[int, ...]]
    """Devices, those in one row doing the same at the same time."""
    ran: Sequence[Ran]
    length: float
    unit: str = "s"
    """Of time: seconds, or units where costs are relative."""
    messages: Sequence[tuple[Ran, Ran]] = ()
    """What was sent, and received."""
    memory: Mapping[int, Curve] = field(default_factory=dict)
    """By row."""
    title: str = ""
    source: str = ""
    """Where its times are from: `simulated on NVIDIA H100`."""

    def of_row(self) -> list[list[Ran]]:
        return self._of_row

    @cached_property
    def _of_row(self) -> list[list[Ran]]:
        found: list[list[Ran]] = [[] for _ in self.rows]
        for one in self.ran:
            found[one.row].append(one)
        return found

    def idle(self) -> list[float]:
        """By row, the share of the step in which the device computes nothing: it waits, communicates or updates."""
        return self._idle

    @cached_property
    def _idle(self) -> list[float]:
        if not self.length:
            return [0.0] * len(self.rows)
        shares = (1 - measure(_computing(ran)) / self.length for ran in self.of_row())
        return [share if share > ROUNDING else 0.0 for share in shares]

    def idle_share(self) -> float:
        """The mean over all devices."""
        count = sum(map(len, self.rows)) or 1
        return sum(len(devices) * share for devices, share in zip(self.rows, self.idle(), strict=True)) / count

    def exposed(self) -> dict[str, float]:
        """By stream, the seconds of a step in which a device communicates there and does not compute: the most of all
        devices."""
        found: dict[str, float] = {}
        for ran in self.of_row():
            streams: dict[str, list[Ran]] = {}
            for one in ran:
                if one.what.communicates:
                    streams.setdefault(stream_name(one.stream), []).append(one)
            computing = _computing(ran)
            for stream, its in streams.items():
                found[stream] = max(found.get(stream, 0.0), self._alone(its, computing))
        return dict(sorted(found.items()))

    def exposed_at_most(self) -> float:
        """Seconds of a step in which a device communicates on some stream and does not compute: the most of all
        devices. Streams that do so at once count once, so it is not the sum of `exposed`."""
        communicating = ([one for one in ran if one.what.communicates] for ran in self.of_row())
        return max(
            (self._alone(its, _computing(ran)) for its, ran in zip(communicating, self.of_row(), strict=True)),
            default=0.0,
        )

    def _alone(self, communication: Iterable[Ran], computing: Sequence[tuple[float, float]]) -> float:
        spans = union((one.start + one.waited, one.end) for one in communication)
        found = measure(minus(spans, computing))
        return found if found > ROUNDING * self.length else 0.0


def _computing(ran: Iterable[Ran]) -> list[tuple[float, float]]:
    return union((one.start, one.end) for one in ran if one.what.computes)


class RecordedStep(NamedTuple):
    """A step of a job."""

    timeline: Timeline
    ran: Mapping[Place, Ran]
    """The instructions that were recorded."""


def numbers(devices: Sequence[int]) -> str:
    """`0-3, 8`"""
    spans: list[list[int]] = []
    for device in sorted(devices):
        if spans and spans[-1][-1] == device - 1:
            spans[-1][1:] = [device]
        else:
            spans.append([device])
    return ", ".join("-".join(map(str, span)) for span in spans)


def stream_name(stream: str) -> str:
    """As the script says it: every direction of a transfer has a stream of its own."""
    return stream.partition("<")[0].partition(">")[0]


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans, in order, that cover the same time."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def minus(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """What is in the spans, and in none of the others; both are disjoint and in order."""
    k = 0
    for start, end in spans:
        at = start
        while k < len(others) and others[k][1] <= at:
            k += 1
        j = k
        while j < len(others) and others[j][0] < end:
            if others[j][0] > at:
                yield at, others[j][0]
            at = max(at, others[j][1])
            j += 1
        if at < end:
            yield at, end


def measure(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
