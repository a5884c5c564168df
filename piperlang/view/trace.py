"""A timeline as a trace in Chrome's JSON format, which Perfetto reads: a process per device, a thread per stream,
arrows for messages, a counter for memory.

Times are whole nanoseconds, as in Perfetto's own tables: it rounds begin and duration each on its own otherwise, and
drops a slice that then begins before the one in front of it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from piperlang.simulate.timeline import Ran, Timeline, numbers

SECOND, UNIT = 10**9, 10**6
"""In nanoseconds. A unit is shown as a millisecond."""


class Thread(NamedTuple):
    process: int
    number: int
    name: str
    computes: bool


class Ticks(NamedTuple):
    """Whole nanoseconds."""

    start: int
    end: int


def trace(timeline: Timeline) -> str:
    return json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    scale = SECOND if timeline.unit == "s" else UNIT
    spans = {one: Ticks(round(one.start * scale), round(one.end * scale)) for one in timeline.ran}
    processes = [devices[0] for devices in timeline.rows]
    threads = _threads(spans, processes)
    for row, devices in enumerate(timeline.rows):
        yield from _about("process", {"pid": processes[row]}, f"device {numbers(devices)}", row)
    for thread in sorted(set(threads.values()), key=lambda thread: thread.number):
        yield from _about("thread", _of(thread), thread.name, 0 if thread.computes else 1)
    for one, span in spans.items():
        yield _slice(one, threads[one], span, round(one.waited * scale))
    for number, (sender, receiver) in enumerate(timeline.messages):
        yield from _arrow(number, spans[sender], threads[sender], spans[receiver], threads[receiver])
    for row, curve in timeline.memory.items():
        for time, size in curve:
            at = _microseconds(round(time * scale))
            yield {"ph": "C", "name": "memory", "pid": processes[row], "ts": at, "args": {"bytes": size}}


def _threads(spans: Mapping[Ran, Ticks], processes: Sequence[int]) -> dict[Ran, Thread]:
    """One per stream of a device, what computes first: Perfetto shows them in the order of their numbers. It takes a
    thread with the number of a process for its main thread, so none has one."""
    tracks = _tracks(spans)
    computes: dict[_Track, bool] = {}
    for one, track in tracks.items():
        computes[track] = computes.get(track, False) or one.what.computes
    found = {}
    ordered = sorted(computes, key=lambda track: (track.row, not computes[track], track))
    for number, track in enumerate(ordered, max(processes, default=0) + 1):
        name = track.stream if not track.number else f"{track.stream} ({track.number + 1})"
        found[track] = Thread(processes[track.row], number, name, computes[track])
    return {one: found[track] for one, track in tracks.items()}


class _Track(NamedTuple):
    row: int
    stream: str
    number: int


def _tracks(spans: Mapping[Ran, Ticks]) -> dict[Ran, _Track]:
    """Perfetto drops a slice that overlaps another one of its thread. Where those of a stream do, as recorded ones may,
    the stream has several tracks: each takes the first that is free."""
    found = {}
    busy: dict[tuple[int, str], list[int]] = {}
    """Until when the tracks of a stream are."""
    for one, span in sorted(spans.items(), key=lambda item: item[1]):
        its = busy.setdefault((one.row, one.stream), [])
        k = next((k for k, end in enumerate(its) if end <= span.start), len(its))
        its[k : k + 1] = [span.end]
        found[one] = _Track(one.row, one.stream, k)
    return found


def _slice(one: Ran, thread: Thread, span: Ticks, waited: int) -> dict[str, Any]:
    about = {**one.what.tags, "bytes": one.what.bytes, "waited_us": _microseconds(waited)}
    if one.what.line:
        about["line"] = one.what.line
    return {
        "ph": "X",
        "name": one.what.name,
        "cat": one.what.op,
        **_of(thread),
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end - span.start),
        "args": about,
    }


def _arrow(number: int, sent: Ticks, sender: Thread, received: Ticks, receiver: Thread) -> Iterator[dict[str, Any]]:
    """Perfetto binds each end to the slice that is open at its time, the innermost one, and points from the slice that
    begins first to the other one. A receive is often posted before the send begins, so the arrow ends at a mark of its
    own at the end of the receive: just before it, as the next slice may begin there. Where clocks differ, a recorded
    receive may end before the send begins."""
    flow = {"name": "message", "cat": "message", "id": number}
    arrival = {**_of(receiver), "ts": _microseconds(max(sent.start, received.start, received.end - 1))}
    yield {**flow, "ph": "s", **_of(sender), "ts": _microseconds(sent.start)}
    yield {"ph": "i", "s": "t", "name": "arrival", "cat": "message", **arrival}
    yield {**flow, "ph": "f", "bp": "e", **arrival}


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _of(thread: Thread) -> dict[str, int]:
    return {"pid": thread.process, "tid": thread.number}


def _about(what: str, of: dict[str, int], name: str, order: int) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": f"{what}_name", **of, "args": {"name": name}}
    yield {"ph": "M", "name": f"{what}_sort_index", **of, "args": {"sort_index": order}}
