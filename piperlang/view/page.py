"""Timelines as one HTML file that needs nothing else: no network, no server, no other file."""

from __future__ import annotations

import heapq
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from math import floor, log10
from pathlib import Path
from typing import Any

from piperlang.plan.estimate.summary import time_text
from piperlang.simulate.execute import SimulatedStep
from piperlang.simulate.result import Segment, segments, summed
from piperlang.simulate.timeline import Activity, Ran, Timeline, numbers, stream_name

FILES = Path(__file__).parent / "page"
DIGITS = 9
"""Of times: a step of one second is shown to the nanosecond."""
SPOKEN = 5
"""Parts of the critical path that the summary names: the longest."""


def page(
    timelines: Sequence[Timeline],
    estimated: Timeline | None = None,
    graph: str = "",
    paths: Sequence[Sequence[Ran]] = (),
) -> str:
    """Timelines with a shared time axis. `estimated` is drawn as outlines behind the first one. `graph` is an SVG image
    for a second tab. `paths` are the critical paths of the timelines, empty where unknown."""
    if len({one.unit for one in (*timelines, *([estimated] if estimated else []))}) > 1:
        raise ValueError("timelines on one page must have the same unit of time")
    style, script = ((FILES / name).read_text(encoding="utf-8") for name in ("viewer.css", "viewer.js"))
    steps = [
        SimulatedStep(one, tuple(path)) for one, path in zip(timelines, paths or [()] * len(timelines), strict=True)
    ]
    data = {
        "timelines": [_encoded(one) for one in steps],
        "estimated": _encoded(SimulatedStep(estimated, ())) if estimated is not None else None,
        "graph": graph,
    }
    parts = {
        "title": escape(_listed([one.title for one in timelines if one.title]) or "Timeline"),
        "style": style,
        "script": script,
        # Names that look like markup must not end the element they are in.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "summary": "\n".join(_summary(one) for one in steps),
        # Only this script and this style sheet may run: markup in names could not do anything even if it got through.
        "script_hash": _hash(script),
        "style_hash": _hash(style),
    }
    template = (FILES / "viewer.html").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


# ------------------------------------------------------------------------------------------------------------- data


def _encoded(step: SimulatedStep) -> dict[str, Any]:
    """Columns of numbers, times as whole ticks: 100,000 events are about 2 MB. Events are in the order of `tracks`:
    spans of events, of one lane, that do not overlap and are sorted by time."""
    timeline = step.timeline
    scale = _scale(max([timeline.length, *(one.end for one in timeline.ran)]))
    lanes: dict[tuple[int, str], list[Ran]] = {}
    for one in timeline.ran:
        lanes.setdefault((one.row, stream_name(one.stream)), []).append(one)
    ordered = sorted(lanes, key=lambda lane: (lane[0], not _computing(lanes[lane]), lane[1] != "compute", lane[1]))
    events: list[Ran] = []
    tracks: list[tuple[int, int]] = []
    for number, lane in enumerate(ordered):
        for track in _tracks(lanes[lane], scale):
            events += track
            tracks.append((number, len(events)))
    starts = [round(one.start * scale) for one in events]
    waited = [(k, round(one.waited * scale)) for k, one in enumerate(events) if one.waited > 0]
    table = _ActivityTable()
    number_of = {id(one): k for k, one in enumerate(events)}
    idle = timeline.idle()
    return {
        "title": timeline.title,
        "source": timeline.source,
        "unit": timeline.unit,
        "length": timeline.length,
        "scale": scale,
        "idle": timeline.idle_share(),
        "exposed": timeline.exposed(),
        "rows": [[numbers(devices), share] for devices, share in zip(timeline.rows, idle, strict=True)],
        "devices": [sorted(devices) for devices in timeline.rows],
        "lanes": [[row, stream, _computing(lanes[row, stream])] for row, stream in ordered],
        "tracks": tracks,
        "what": [table.number(one.what) for one in events],
        "start": starts,
        "took": [round(one.end * scale) - start for one, start in zip(events, starts, strict=True)],
        "waited": [[k for k, _ in waited], [ticks for _, ticks in waited]],
        "activities": table.rows,
        "microbatch": _microbatch_tag(table.rows),
        "messages": [number_of[id(one)] for pair in timeline.messages for one in pair],
        "path": _path(step, number_of),
        "memory": {
            row: [[round(time * scale) for time, _ in curve], [round(size) for _, size in curve]]
            for row, curve in timeline.memory.items()
            if curve
        },
    }


def _path(step: SimulatedStep, number_of: Mapping[int, int]) -> dict[str, Any] | None:
    """The numbers of its bars in order, and its parts as `[what, device, line, time, numbers of bars]`."""
    if not step.path:
        return None
    parts = {_key(one): (one, list[int]()) for one in summed(segments(step))}
    before: tuple[Ran, ...] = ()
    for one in step.path:
        # What a bar adds to the path: its own time, and before it that of the host.
        known = len(segments(SimulatedStep(step.timeline, before)))
        for added in segments(SimulatedStep(step.timeline, (*before, one)))[known:]:
            if _key(added) in parts:
                parts[_key(added)][1].append(number_of[id(one)])
        before = (one,)
    return {
        "bars": [number_of[id(one)] for one in step.path],
        "parts": [[part.what, part.device, part.line, part.seconds, bars] for part, bars in parts.values()],
    }


def _key(part: Segment) -> tuple[str, int, str]:
    return part.what, part.device, part.line


def _scale(longest: float) -> int:
    """Ticks per unit of time."""
    return int(10 ** max(0, DIGITS - 1 - floor(log10(longest)))) if longest > 0 else 1


def _computing(ran: Iterable[Ran]) -> bool:
    return any(one.what.computes for one in ran)


def _tracks(ran: Sequence[Ran], scale: int) -> list[list[Ran]]:
    """As few as possible: in a lane, transfers of different directions overlap."""
    found: list[list[Ran]] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for one in sorted(ran, key=lambda one: (one.start, one.end)):
        start, end = round(one.start * scale), round(one.end * scale)
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(len(found))
            found.append([])
        track = heapq.heappop(free)
        found[track].append(one)
        heapq.heappush(busy, (end, track))
    return found


class _ActivityTable:
    """Distinct activities, each `[op, name, tags, line, bytes, computes]`."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self.same: dict[int, int] = {}
        self.alike: dict[tuple[object, ...], int] = {}

    def number(self, what: Activity) -> int:
        found = self.same.get(id(what))
        if found is None:
            key = (what.op, what.name, tuple(what.tags.items()), what.line, what.bytes)
            found = self.alike.setdefault(key, len(self.rows))
            if found == len(self.rows):
                self.rows.append([what.op, what.name, dict(what.tags), what.line, what.bytes, what.computes])
            self.same[id(what)] = found
        return found


def _microbatch_tag(activities: Sequence[Sequence[Any]]) -> str:
    """The tag that labels bars. Scripts choose its name: it is `mb`, or the first other tag with numbers."""
    keys = list(dict.fromkeys(key for row in activities for key, value in row[2].items() if type(value) is int))
    return "mb" if "mb" in keys else next((key for key in keys if key != "stage"), "")


# ------------------------------------------------------------------------------------------------------------- text


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _summary(step: SimulatedStep) -> str:
    """For screen readers, and for browsers without JavaScript."""
    timeline = step.timeline
    passes: dict[str, int] = {}
    for one in timeline.ran:
        passes[one.what.op] = passes.get(one.what.op, 0) + 1
    counts = ", ".join(f"{count:,} {op}" for op, count in passes.items())
    rows = [
        f"<li>Device {numbers(devices)}: {share:.1%} idle</li>"
        for devices, share in zip(timeline.rows, timeline.idle(), strict=True)
    ]
    return (
        f"<h2>{escape(timeline.title or 'Timeline')}</h2>"
        f"<p>A step{escape(f', {timeline.source},' if timeline.source else '')} takes"
        f" {_time(timeline.length, timeline.unit)} on {sum(map(len, timeline.rows)):,} devices."
        f" They are idle {timeline.idle_share():.1%} of the time on average. Operations: {escape(counts) or 'none'}."
        f"{escape(_exposed(timeline.exposed(), timeline.unit))}{escape(_spoken_path(step))}</p><ul>{''.join(rows)}</ul>"
    )


def _exposed(exposed: Mapping[str, float], unit: str) -> str:
    return "".join(
        f" Exposed communication of stream {stream}: {_time(time, unit)}." for stream, time in exposed.items()
    )


def _spoken_path(step: SimulatedStep) -> str:
    parts = summed(segments(step))[:SPOKEN]
    named = [
        f"{one.what} on device {one.device}, {_time(one.seconds, step.timeline.unit)}"
        f"{f', {one.line}' if one.line else ''}"
        for one in parts
    ]
    return f" Most of the critical path: {'; '.join(named)}." if named else ""


def _time(time: float, unit: str) -> str:
    return time_text(time) if unit == "s" else f"{time:g} {unit}"
