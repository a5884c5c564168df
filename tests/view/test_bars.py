"""Timelines as text, with true durations."""

from __future__ import annotations

import re
from dataclasses import replace
from time import process_time

import pytest

from piperlang.diagnostics.render import Paint
from piperlang.simulate.timeline import Activity, Ran, Timeline
from piperlang.simulate.unit import simulate
from piperlang.view.bars import ASCII, LINES, MOST_LINES, bars, glyphs
from tests.support.schedules import SCHEDULES

PLAIN = Paint()


def two() -> Timeline:
    """Passes on two devices, a message from one to the other that is received early, an update."""
    forward, backward = (Activity(op, op, {"stage": 0, "pass": op, "mb": 3}) for op in "FB")
    send, receive = Activity("send", "send", {"mb": 3}), Activity("recv", "recv", {"mb": 3})
    ran = [
        Ran(0, "compute", forward, 0.0, 0.002),
        Ran(0, "comm>", send, 0.002, 0.0035),
        Ran(0, "compute", Activity("update", "update", {}), 0.008, 0.010),
        Ran(1, "comm<0", receive, 0.0, 0.0035, waited=0.002),
        Ran(1, "compute", backward, 0.0035, 0.0095),
    ]
    return Timeline([(0, 1, 2, 8), (3,)], ran, 0.010, title="two")


NARROW = """\
             |0        |5 ms      | idle
device 0-2.. |F3==............----|  80%
        comm |    ---             |
    device 3 |.......B3==========.|  40%
        comm |    ---             |
a column is 500 us
"""


def test_width_is_time() -> None:
    assert bars(two(), 40, PLAIN) == NARROW


@pytest.mark.parametrize("width", [40, 80, 200])
def test_widths(width: int) -> None:
    lines = bars(two(), width, PLAIN, LINES).splitlines()
    drawn = lines[:-1]
    assert max(map(len, drawn)) == width
    columns = len(lines[1].split("|")[1])
    cells = [line.split("|")[1] for line in drawn[1:]]
    assert all(len(one) == columns for one in cells)
    for text, label, start, end in (
        (cells[0], "F3", 0.0, 0.2),
        (cells[1], "send3", 0.2, 0.35),
        (cells[2], "B3", 0.35, 0.95),
        (cells[3], "recv3", 0.2, 0.35),
    ):
        bar = re.search(r"[^. ]+", text)
        assert bar is not None
        assert abs(bar.start() - start * columns) <= 0.5
        assert abs(bar.end() - end * columns) <= 0.5
        assert bar[0].startswith(label) or bar.end() - bar.start() < len(label)


def test_times_stand_where_they_are() -> None:
    ruler, first = bars(two(), 120, PLAIN).splitlines()[:2]
    begin, columns = first.index("|") + 1, len(first.split("|")[1])
    at = {match[1]: match.start() + 1 - begin for match in re.finditer(r"\|(\d[\d.]*(?: \ws)?)", ruler)}
    assert at["0"] == 0
    assert at["4 ms"] == round(0.4 * columns)
    assert len(at) >= 5


def test_what_is_short_is_not_lost() -> None:
    """A column shows what takes most of it. What has no column moves nothing."""
    forward, backward, update = (Activity(op, op, {"mb": 0}) for op in ("F", "B", "update"))
    ran = [
        Ran(0, "compute", backward, 0.0, 0.4),
        Ran(0, "compute", forward, 0.4, 0.403),  # beside a longer one
        Ran(0, "compute", backward, 0.403, 0.5),
        Ran(0, "compute", forward, 0.6, 0.601),  # alone
        Ran(0, "compute", forward, 0.601, 0.602),
        Ran(0, "compute", update, 0.8, 0.8),
    ]
    line, about = bars(Timeline([(0,)], ran, 1.0), 100 + len("device 0 || 100%"), PLAIN).splitlines()[1:]
    assert line == f"device 0 |B0{'=' * 38}B0{'=' * 8}{'.' * 10}f{'.' * 19}'{'.' * 19}|  50%"
    assert about == "a column is 10.0 ms; a small letter or ' takes less than half of it; 2 shorter bars do not show"


def test_colours() -> None:
    text = bars(two(), 80, Paint(True), LINES)
    assert "\x1b[7;34mF3" in text  # of the grid
    assert "\x1b[7;32mB3" in text
    assert "\x1b[2msend3" in text
    assert re.sub("\x1b\\[[\\d;]*m", "", text).replace("━", " ") == bars(two(), 80, PLAIN, LINES).replace("━", " ")


@pytest.mark.parametrize(
    ("encoding", "expected"), [("utf-8", LINES), ("ascii", ASCII), ("latin-1", ASCII), ("cp437", ASCII), (None, ASCII)]
)
def test_encodings(encoding: str | None, expected: object) -> None:
    assert glyphs(encoding) is expected
    assert bars(two(), 80, PLAIN, ASCII).isascii()


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline([], [], 0.0),
        Timeline([(0,)], [], 0.0, "units"),
        Timeline([(0,)], [], 1.0),
        Timeline([(0,)], [Ran(0, "compute", Activity("F", "F", {}), 0.0, 0.0)], 0.0),
        Timeline([(0,)], [Ran(0, "compute", Activity("F", "F", {}), 1e-9, 2e-9)], 3e-9),
        Timeline([(0,)], [Ran(0, "compute", Activity("F", "F", {}), 0.0, 1e7)], 1e7),
    ],
)
@pytest.mark.parametrize("width", [1, 40, 200])
def test_odd_timelines(timeline: Timeline, width: int) -> None:
    lines = bars(timeline, width, PLAIN).splitlines()
    assert len(lines) == len(timeline.rows) + 2
    assert all(len(line) <= max(width, 33) for line in lines[:-1])


def test_units() -> None:
    timeline = simulate(SCHEDULES["one_f_one_b"].lanes(2, 3))
    width = 3 * int(timeline.length) + len("device 0 || 100%")
    assert bars(timeline, width, PLAIN) == (
        "   units |0             |5             |10    | idle\n"
        "device 0 |F0=F1=......B0====F2=B1====...B2====|  25%\n"
        "device 1 |...F0=B0====F1=B1====F2=B2====......|  25%\n"
        "a column is 0.33 units\n"
    )


def test_hundreds_of_devices() -> None:
    forward, send = Activity("F", "F", {"mb": 0}), Activity("send", "send", {"mb": 0})
    ran = [
        one
        for row in range(300)
        for one in (Ran(row, "compute", forward, row, row + 1), Ran(row, "comm>", send, row + 1, row + 2))
    ]
    timeline = Timeline([(2 * row, 2 * row + 1) for row in range(300)], ran, 301.0)
    lines = bars(timeline, 100, PLAIN).splitlines()
    assert len(lines) == 1 + MOST_LINES + 2
    assert lines[-2] == f"... and {600 - MOST_LINES:,} more devices"
    assert lines[1].startswith("  device 0-1 |f")
    alike = bars(replace(timeline, rows=[tuple(range(0, 600, 2)), *timeline.rows[1:]]), 140, PLAIN)
    assert "\ndevice 0 and 299 more |f" in alike


def test_streams_of_a_device_are_not_divided() -> None:
    """A device with its streams is there, or is not."""
    ran = [
        Ran(row, stream, Activity("F" if stream == "compute" else "send", "", {}), 0.0, 1.0)
        for row in range(20)
        for stream in ("compute", "first", "second")
    ]
    lines = bars(Timeline([(row,) for row in range(20)], ran, 1.0), 80, PLAIN).splitlines()
    assert len(lines) == 1 + 30 + 2
    assert lines[-2] == "... and 10 more devices"


def test_100_000_bars() -> None:
    forward = Activity("F", "F", {"mb": 0})
    ran = [Ran(k % 8, "compute", forward, k // 8, k // 8 + 0.9) for k in range(100_000)]
    timeline = Timeline([(row,) for row in range(8)], ran, 12_500.0)
    begin = process_time()
    lines = bars(timeline, 200, PLAIN).splitlines()
    assert process_time() - begin < 5
    hidden = re.search(r"([\d,]+) shorter bars do not show", lines[-1])
    assert hidden is not None
    assert int(hidden[1].replace(",", "")) + sum(line.count("F") for line in lines) == len(ran)
