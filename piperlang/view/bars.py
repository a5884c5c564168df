"""A timeline as text for a terminal: width is time, a line for each stream of a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import floor, log10
from typing import NamedTuple

from piperlang.diagnostics.render import Paint
from piperlang.plan.estimate.summary import time_text
from piperlang.simulate.timeline import Activity, Ran, Timeline, numbers, stream_name
from piperlang.view import axis
from piperlang.view.grid import COLOURS, IDLE

MOST_LINES = 32
NARROWEST = 16
"""Columns that a step has at least, in however narrow a terminal."""
APART = 10
"""Columns between two times of the ruler, at least."""
SHORT = "'"
DIM, REVERSE = "2", "7"


class Glyphs(NamedTuple):
    """What a bar goes on with, after its label."""

    passes: str
    other: str


ASCII, LINES = Glyphs("=", "-"), Glyphs("━", "─")


def glyphs(encoding: str | None) -> Glyphs:
    """What a stream can print."""
    try:
        "".join(LINES).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return LINES


def bars(timeline: Timeline, width: int, paint: Paint, glyphs: Glyphs = ASCII) -> str:
    """No wider than `width`, unless that leaves nothing for the step. A column shows what takes most of its time. What
    has no column of its own is a small letter, or a `'` if it is no pass, where a column has room for one, and is
    counted where none has."""
    lines, left = _lines(timeline)
    margin = max((len(line.name) for line in lines), default=0)
    margin = min(margin, max(12, width // 5))
    columns = max(NARROWEST, width - margin - len(" || 100%"))
    for line in lines:
        line.fill(columns, timeline.length)
    unit = timeline.unit if timeline.unit != "s" else ""
    parts = [f"{unit:>{margin}} {_ruler(timeline, columns):{columns + 1}}| idle"]
    for line in lines:
        cells = "".join(_painted(line, glyphs, paint))
        idle = f"{line.idle:>5.0%}" if line.idle is not None else ""
        parts.append(f"{_fitted(line.name, margin):>{margin}} |{cells}|{idle}")
    if left:
        parts.append(f"... and {left:,} more device{'s' if left > 1 else ''}")
    return "\n".join([*parts, _about_columns(timeline, columns, lines)]) + "\n"


@dataclass
class _Line:
    name: str
    ran: Sequence[Ran]
    idle: float | None
    """Of the device, on its first line."""
    cells: list[Ran | None] = field(default_factory=list)
    """By column."""
    short: dict[int, Ran] = field(default_factory=dict)
    """In columns that are idle for most of their time."""
    hidden: int = 0

    def fill(self, columns: int, length: float) -> None:
        most: dict[Ran, tuple[float, int]] = {}
        """How long each runs in the column that it takes most of."""
        parts: list[list[tuple[float, Ran]]] = [[] for _ in range(columns)]
        for one in self.ran:
            for column, time in _spread(one, columns, length):
                parts[column].append((time, one))
                if one not in most or time > most[one][0]:
                    most[one] = (time, column)
        self.cells = [_shown(column, length / columns) for column in parts]
        shown = set(self.cells)
        for one, (_, column) in most.items():
            if one not in shown and (self.cells[column] is not None or column in self.short):
                self.hidden += 1
            elif one not in shown:
                self.short[column] = one


def _shown(parts: Sequence[tuple[float, Ran]], time: float) -> Ran | None:
    """In a column: the longest of the operation that takes most of its time, unless it is idle for more than half."""
    of_operation: dict[str, float] = {}
    for its, one in parts:
        of_operation[one.what.op] = of_operation.get(one.what.op, 0.0) + its
    if not parts or 2 * sum(of_operation.values()) < time:
        return None
    most = max(of_operation, key=lambda op: of_operation[op])
    return max((part for part in parts if part[1].what.op == most), key=lambda part: part[0])[1]


def _lines(timeline: Timeline) -> tuple[list[_Line], int]:
    """Those of the first devices, and how many devices are left."""
    found: list[_Line] = []
    for row, ran in enumerate(timeline.of_row()):
        its = _of_device(timeline, row, ran)
        if found and len(found) + len(its) > MOST_LINES:
            return found, sum(map(len, timeline.rows[row:]))
        found += its
    return found, 0


def _of_device(timeline: Timeline, row: int, ran: Sequence[Ran]) -> list[_Line]:
    """What computes comes first."""
    streams: dict[str, list[Ran]] = {}
    for one in ran:
        streams.setdefault(stream_name(one.stream), []).append(one)
    computes = {name: any(one.what.computes for one in its) for name, its in streams.items()}
    names = sorted(streams, key=lambda name: (not computes[name], name))
    first = names.pop(0) if names and computes[names[0]] else None
    lines = [_Line(_device(timeline.rows[row]), streams[first] if first else (), timeline.idle()[row])]
    return lines + [_Line(name, streams[name], None) for name in names]


def _device(devices: Sequence[int]) -> str:
    """`device 0-3`, or where that is long how many there are."""
    found = numbers(devices)
    return f"device {found if len(found) < 10 else f'{devices[0]} and {len(devices) - 1:,} more'}"


def _spread(one: Ran, columns: int, length: float) -> Iterator[tuple[int, float]]:
    """The columns in which it runs, and for how long. A receive that is posted early only waits."""
    begin, each = one.start + one.waited, length / columns
    first = min(columns - 1, int(begin / each)) if each else 0
    last = min(columns - 1, int(one.end / each)) if each else 0
    for k in range(first, last + 1):
        time = min(one.end, (k + 1) * each) - max(begin, k * each)
        if time > 0 or k == first:
            yield k, max(0.0, time)


def _painted(line: _Line, glyphs: Glyphs, paint: Paint) -> Iterator[str]:
    at = 0
    for one, cells in groupby(line.cells):
        width = len(list(cells))
        yield _bar(one, width, glyphs, paint) if one is not None else _idle(line, at, width, paint)
        at += width


def _idle(line: _Line, at: int, width: int, paint: Paint) -> str:
    """Of a device; a stream that does nothing is blank."""
    parts = []
    for one, cells in groupby(line.short.get(k) for k in range(at, at + width)):
        if one is not None:
            parts.append(paint(_short(one.what), *_colour(one.what)))
        else:
            count = len(list(cells))
            parts.append(" " * count if line.idle is None else paint(IDLE * count, DIM))
    return "".join(parts)


def _short(what: Activity) -> str:
    return what.op.lower() if what.computes else SHORT


def _bar(one: Ran, width: int, glyphs: Glyphs, paint: Paint) -> str:
    what = one.what
    label = next((text for text in _labels(what) if len(text) <= width), "")
    if not what.computes:
        return paint(f"{label:{glyphs.other}<{width}}", *_colour(what))
    return paint(f"{label:{' ' if paint.on else glyphs.passes}<{width}}", REVERSE, *_colour(what))


def _labels(what: Activity) -> tuple[str, ...]:
    """Which of them fits is shown."""
    return f"{what.op}{what.tags.get('mb', '')}", what.op


def _colour(what: Activity) -> tuple[str, ...]:
    return (COLOURS.get(what.op, COLOURS["F"]),) if what.computes else (DIM,)


def _ruler(timeline: Timeline, columns: int) -> str:
    """Each time stands where its column begins, behind a mark."""
    if not timeline.length:
        return "|"
    step = _tick(timeline.length * APART / columns)
    found = ""
    for k in range(floor(timeline.length / step) + 1):
        at = round(k * step / timeline.length * columns)
        mark = f"|{axis.mark(k * step, step, timeline.length, timeline.unit)}"
        if at >= len(found) and at + len(mark) <= columns + 1:
            found = f"{found:{at}}{mark}"
    return found


def _tick(least: float) -> float:
    """A round number."""
    power = 10.0 ** floor(log10(least))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= least)


def _fitted(name: str, width: int) -> str:
    return name if len(name) <= width else f"{name[: width - 2]}.."


def _about_columns(timeline: Timeline, columns: int, lines: Sequence[_Line]) -> str:
    each = timeline.length / columns
    said = [f"a column is {time_text(each) if timeline.unit == 's' else f'{each:.2g} {timeline.unit}'}"]
    if any(line.short for line in lines):
        said.append(f"a small letter or {SHORT} takes less than half of it")
    if hidden := sum(line.hidden for line in lines):
        said.append(f"{hidden:,} shorter bar{'s do' if hidden > 1 else ' does'} not show")
    return "; ".join(said)
