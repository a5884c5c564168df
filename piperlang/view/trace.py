"""A timeline as a trace in Chrome's JSON format, which Perfetto reads: a process per device, a thread per stream,
arrows for messages, a counter for memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from piperlang.simulate.timeline import Ran, Timeline, numbers

MICROSECONDS = 1e6


def trace(timeline: Timeline) -> str:
    return json.dumps({"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms"}, separators=(",", ":"))


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    scale = MICROSECONDS if timeline.unit == "s" else 1e3  # a unit is shown as a millisecond
    threads: dict[tuple[int, str], int] = {}
    for row, devices in enumerate(timeline.rows):
        yield _about("process_name", row, 0, f"device {numbers(devices)}")
        yield {"ph": "M", "name": "process_sort_index", "pid": row, "tid": 0, "args": {"sort_index": row}}
    for one in timeline.ran:
        key = (one.row, one.stream)
        if key not in threads:
            threads[key] = len(threads) + 1
            yield _about("thread_name", one.row, threads[key], one.stream)
            order = 0 if one.what.computes else 1
            sort = {"ph": "M", "name": "thread_sort_index", "pid": one.row, "tid": threads[key]}
            yield {**sort, "args": {"sort_index": order}}
        yield _slice(one, threads[key], scale)
    for number, (sender, receiver) in enumerate(timeline.messages):
        flow = {"name": "message", "cat": "message", "id": number}
        yield _at("s", flow, sender, threads, sender.start * scale)
        yield {**_at("f", flow, receiver, threads, receiver.end * scale), "bp": "e"}
    for row, curve in timeline.memory.items():
        for time, size in curve:
            yield {"ph": "C", "name": "memory", "pid": row, "ts": time * scale, "args": {"bytes": size}}


def _slice(one: Ran, thread: int, scale: float) -> dict[str, Any]:
    about = {**one.what.tags, "bytes": one.what.bytes, "waited_us": one.waited * scale}
    if one.what.line:
        about["line"] = one.what.line
    return {
        "ph": "X",
        "name": one.what.name,
        "cat": one.what.op,
        "pid": one.row,
        "tid": thread,
        "ts": one.start * scale,
        "dur": (one.end - one.start) * scale,
        "args": about,
    }


def _about(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _at(phase: str, flow: dict[str, Any], one: Ran, threads: dict[tuple[int, str], int], time: float) -> dict[str, Any]:
    return {**flow, "ph": phase, "pid": one.row, "tid": threads[one.row, one.stream], "ts": time}
