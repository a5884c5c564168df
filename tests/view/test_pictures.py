"""Timelines as SVG pictures and as traces for Perfetto."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from piperlang.simulate.timeline import Activity, Ran, Timeline, minus, numbers, union
from piperlang.simulate.unit import simulate
from piperlang.view.gantt import gantt
from piperlang.view.trace import trace
from tests.support.schedules import SCHEDULES

SVG = "{http://www.w3.org/2000/svg}"


def two() -> Timeline:
    """A pass and a message on each of two devices."""
    forward = Activity("F", "F[stage=0]", {"stage": 0, "pass": "F", "mb": 0}, "a.piper:3")
    backward = Activity("B", "<script>&", {"stage": 1, "pass": "B", "mb": 0})
    sent, received = Activity("send", "send", {"stage": 0}, bytes=100.0), Activity("recv", "recv", {"stage": 0})
    ran = (
        Ran(0, "compute", forward, 0.0, 2.0),
        Ran(0, "comm>", sent, 2.0, 3.0),
        Ran(1, "comm<0", received, 0.0, 3.0, waited=2.0),
        Ran(1, "compute", backward, 3.0, 4.0),
    )
    return Timeline([(0,), (1,)], ran, 4.0, messages=[(ran[1], ran[2])], memory={0: [(0.0, 10.0), (2.0, 5.0)]})


def test_idle_and_exposed() -> None:
    found = two()
    assert found.idle() == [0.5, 0.75]
    assert found.idle_share() == 0.625
    assert found.exposed() == {"comm": 1.0}  # waiting is no communication
    assert numbers([4, 0, 1, 2]) == "0-2, 4"
    assert list(minus([(0, 10)], union([(2, 3), (2.5, 5), (9, 12)]))) == [(0, 2), (5, 9)]


@pytest.mark.parametrize("name", ["one_f_one_b", "dualpipe", "zbv"])
def test_widths_are_durations(name: str) -> None:
    timeline = simulate(SCHEDULES[name].lanes(4, 8))
    root = ElementTree.fromstring(gantt(timeline, name))
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert len(bars) == len(timeline.ran)
    units = {
        round(float(bar.get("width", 0)) + 0.6, 1) / (one.end - one.start)
        for bar, one in zip(bars, _drawn(timeline), strict=True)
    }
    assert max(units) - min(units) < 0.2
    text = "".join(root.itertext())
    assert f"{timeline.length:g} units" in text
    assert f"{timeline.idle_share():.1%} idle" in text
    right = max(float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars)
    assert right <= float(root.get("width", 0))


def _drawn(timeline: Timeline) -> list[Ran]:
    return [one for row in timeline.of_row() for one in row]


def test_many_devices_and_long_steps_stay_small() -> None:
    timeline = simulate(SCHEDULES["one_f_one_b"].lanes(64, 256))
    picture = gantt(timeline)
    assert "and 32 more rows" in picture
    assert len(picture) < 3_000_000


def test_names_are_no_markup() -> None:
    picture = gantt(replace(two(), title="</svg><script>"))
    ElementTree.fromstring(picture)
    assert "<script" not in picture


def test_a_trace() -> None:
    events = json.loads(trace(two()))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"device 0", "device 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert [(event["ts"], event["dur"]) for event in slices] == [(0, 2e6), (2e6, 1e6), (0, 3e6), (3e6, 1e6)]
    assert slices[0]["args"] == {"stage": 0, "pass": "F", "mb": 0, "bytes": 0, "waited_us": 0, "line": "a.piper:3"}
    start, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert start["id"] == end["id"]
    assert (start["tid"], end["tid"]) == (slices[1]["tid"], slices[2]["tid"])
    assert slices[1]["ts"] <= start["ts"] <= slices[1]["ts"] + slices[1]["dur"]
    assert [event["args"]["bytes"] for event in events if event["ph"] == "C"] == [10, 5]
    assert len({(event["pid"], event["tid"]) for event in slices}) == 4
    assert not re.search("NaN|Infinity", trace(two()))
