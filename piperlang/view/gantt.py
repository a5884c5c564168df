"""Timelines as an SVG picture for papers and talks: width is duration, hue is the stage, shade is the pass, grey is
idle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from math import floor, log10

from piperlang.core.selector import TagValue
from piperlang.diagnostics.printable import printable
from piperlang.plan.estimate.summary import time_text
from piperlang.simulate.timeline import COMMUNICATION, Activity, Ran, Timeline, measure, numbers, stream_name, union
from piperlang.view import axis
from piperlang.view.names import ELLIPSIS, shortened

WIDTH, MARGIN, GAP, HEAD, FOOT = 1280, 110, 6, 62, 64
TALL, LOW = 34, 22
"""Bars of a picture with one chart, and with several."""
THIN = 8
"""The height of a line of communication, with the gap below it."""
APART, LINE = 12, 20
"""Pixels between charts, and from a line of the legend to the next."""
ROWS = 32
"""Rows that are drawn: more cannot be read on a slide."""
FEWEST = 8
"""Rows of a chart, however many charts there are."""
HUES = (214, 24, 150, 320, 48, 262, 184, 0)
"""Of stages, in degrees; far apart for neighbours."""
SHADES = {"F": (80, 78), "B": (62, 48), "I": (68, 62), "W": (62, 34), "R": (30, 84)}
"""Saturation and lightness of a pass, in percent."""
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "forward again"}
INK, FAINT, IDLE, MOVED, OTHER = "#1d2127", "#5b6470", "#e6e8eb", "#9aa3ad", "#c8bda9"
"""The last two: of communication, and of updates and copies."""
TITLE, FIGURES, SMALL = 20, 15, 13
"""Sizes of text."""
NARROW = 1.0
"""Pixels below which bars are drawn as one."""


def gantt(timeline: Timeline, title: str = "") -> str:
    """Passes, a row per device; communication below them in thin bars, where there is any."""
    return stacked([replace(timeline, title=title or timeline.title)])


def stacked(timelines: Sequence[Timeline]) -> str:
    """Charts one above the other, with the time scale of the longest step and the same hue for the same stage."""
    longest = max(timelines, key=lambda one: one.length)
    several = len(timelines) > 1
    sources = [one.source for one in timelines]
    rows = max(FEWEST, ROWS // len(timelines))
    look = _Look((WIDTH - MARGIN - 24) / (longest.length or 1), LOW if several else TALL, rows, _stages(timelines))
    parts: list[str] = []
    y = 0.0
    for k, one in enumerate(timelines):
        repeated = k > 0 and one.source == sources[k - 1]
        parts += _chart(replace(one, source="") if repeated else one, y, look)
        y += _chart_height(one, look) + (APART if several else 0)
    legend, more = _legend(_entries(timelines, look.stages), y + FOOT - 18)
    below = [*_axis(longest, y, look.scale), *legend]
    return "\n".join([*_paper(y + FOOT + more), *parts, *below, "</svg>"]) + "\n"


def _paper(height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
        f' height="{height:g}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{height:g}" fill="white"/>',
    ]


@dataclass(frozen=True)
class _Look:
    """What the charts of a picture share."""

    scale: float
    """Pixels per unit of time."""
    bar: float
    """The height of a pass."""
    rows: int
    """That are drawn of a timeline."""
    stages: Mapping[TagValue | None, int]
    """Which hue a stage has."""


def _chart(timeline: Timeline, top: float, look: _Look) -> list[str]:
    rows = timeline.rows[: look.rows]
    each, scale, lanes = _row_height(timeline, look), look.scale, _lanes(timeline)
    parts = _heading(timeline, top)
    for row, ran in enumerate(timeline.of_row()[: len(rows)]):
        y = top + HEAD + row * each
        parts.append(_text(MARGIN - 10, y + look.bar / 2 + 5, _devices(rows[row]), 14, INK, "end"))
        parts.append(_rect(MARGIN, y, timeline.length * scale, look.bar, IDLE))
        parts += _bars(_others(ran), y, look.bar, look)
        parts += _bars([one for one in ran if one.what.computes], y, look.bar, look)
        thin = sorted((one for one in ran if one.what.communicates), key=lambda one: one.start + one.waited)
        for lane in range(max(lanes.values(), default=-1) + 1):
            its = [one for one in thin if lanes[stream_name(one.stream)] == lane]
            parts += _bars(its, y + look.bar + 2 + THIN * lane, THIN - 2, look)
    if len(timeline.rows) > len(rows):
        y = top + HEAD + len(rows) * each + 12
        parts.append(_text(MARGIN, y, f"and {len(timeline.rows) - len(rows):,} more rows", 13, FAINT))
    return parts


def _heading(timeline: Timeline, top: float) -> list[str]:
    figures = _figures(timeline)
    room = WIDTH - 60 - 0.55 * FIGURES * len(figures)
    title = shortened(timeline.title or "Timeline", int(room / (0.72 * TITLE)))
    parts = [
        _text(20, top + 30, title, TITLE, weight="600"),
        _text(WIDTH - 20, top + 30, figures, FIGURES, FAINT, "end"),
    ]
    most = int((WIDTH - 40) / (0.55 * SMALL))
    source = timeline.source if len(timeline.source) <= most else f"{timeline.source[: most - 1]}{ELLIPSIS}"
    return [*parts, _text(20, top + 50, source, SMALL, FAINT)] if source else parts


def _others(ran: Sequence[Ran]) -> list[Ran]:
    """Updates and copies, on streams that compute: those of other streams run beside passes."""
    streams = {one.stream for one in ran if one.what.computes}
    return [one for one in ran if one.stream in streams and not one.what.computes and not one.what.communicates]


def _chart_height(timeline: Timeline, look: _Look) -> float:
    more = 20 if len(timeline.rows) > look.rows else 0
    return HEAD + min(look.rows, len(timeline.rows)) * _row_height(timeline, look) + more


def _row_height(timeline: Timeline, look: _Look) -> float:
    lanes = _lanes(timeline)
    return look.bar + (2 + THIN * (max(lanes.values()) + 1) if lanes else 0) + GAP


def _lanes(timeline: Timeline) -> dict[str, int]:
    """Of streams with communication: those that run beside each other have lines of their own."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for one in timeline.ran:
        if one.what.communicates:
            of_row = one.row * (timeline.length + 1)
            of_stream = spans.setdefault(stream_name(one.stream), [])
            of_stream.append((of_row + one.start + one.waited, of_row + one.end))
    found: dict[str, int] = {}
    lanes: list[list[tuple[float, float]]] = []
    for stream, its in spans.items():
        beside = [measure(union(lane)) + measure(union(its)) - measure(union([*lane, *its])) for lane in lanes]
        lane = next((k for k, shared in enumerate(beside) if shared <= 1e-9 * timeline.length), len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane] += its
        found[stream] = lane
    return found


def _figures(timeline: Timeline) -> str:
    devices = sum(map(len, timeline.rows))
    length = time_text(timeline.length) if timeline.unit == "s" else f"{timeline.length:g} {timeline.unit}"
    return f"{devices:,} device{'s' if devices > 1 else ''}, {length}, {timeline.idle_share():.1%} idle"


def _stages(timelines: Sequence[Timeline]) -> dict[TagValue | None, int]:
    every = (one.what for timeline in timelines for one in timeline.ran)
    found = dict.fromkeys(what.tags.get("stage") for what in every if what.computes)
    ordered = sorted(found, key=lambda stage: (0, stage, "") if isinstance(stage, int) else (1, 0, str(stage)))
    return {stage: k for k, stage in enumerate(ordered)}


def _bars(ran: Sequence[Ran], top: float, height: float, look: _Look) -> list[str]:
    """Those too narrow to be seen are drawn with those before them."""
    parts: list[str] = []
    drawn = -1.0
    for one in ran:
        left = MARGIN + (one.start + one.waited) * look.scale
        right = MARGIN + one.end * look.scale
        if right - drawn < NARROW:
            continue
        left, drawn = max(left, drawn), right
        colour = _colour(one.what, look.stages)
        parts.append(_rect(left, top, right - left, height, colour, _title(one)))
        label = f"{one.what.op}{one.what.tags.get('mb', '')}"
        size = 13 if height >= TALL else 11
        if height > 12 and right - left > 0.58 * size * len(label) + 4:
            ink = "white" if one.what.computes and SHADES[one.what.op][1] < 55 else INK
            parts.append(_text((left + right) / 2, top + height / 2 + 0.385 * size, label, size, ink, "middle"))
    return parts


def _colour(what: Activity, stages: Mapping[TagValue | None, int]) -> str:
    if not what.computes:
        return MOVED if what.communicates else OTHER
    number = stages.get(what.tags.get("stage"), 0)
    saturation, light = SHADES[what.op]
    # Beyond the hues there are, the same come again a little darker.
    return f"hsl({HUES[number % len(HUES)]}, {saturation}%, {max(20, light - 7 * (number // len(HUES) % 3))}%)"


def _title(one: Ran) -> str:
    line = f" ({one.what.line})" if one.what.line else ""
    return printable(f"{one.what.name}{line}")


def _axis(timeline: Timeline, top: float, scale: float) -> list[str]:
    step = _tick(timeline.length)
    parts = []
    for k in range(floor(timeline.length / step) + 1 if timeline.length else 0):
        x = MARGIN + k * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{top + 5:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(x, top + 20, axis.mark(k * step, step, timeline.length, timeline.unit), 12, FAINT, "middle"))
    return parts


def _tick(length: float) -> float:
    """About ten on the axis, at round numbers."""
    if length <= 0:
        return 1.0
    power = 10.0 ** floor(log10(length / 8))
    return next(power * k for k in (1, 2, 5, 10) if length / (power * k) <= 12)


def _legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Colours and what they mean, in as many lines as it takes; and the height of that."""
    parts, x, y = [], float(MARGIN), top
    for colour, text in entries:
        width = 19 + 7.2 * len(text)
        if x + width > WIDTH:
            x, y = float(MARGIN), y + LINE
        parts.append(_rect(x, y - 11, 13, 13, colour))
        parts.append(_text(x + 19, y, text, 13))
        x += width + 22
    return parts, y - top


def _entries(timelines: Sequence[Timeline], stages: Mapping[TagValue | None, int]) -> list[tuple[str, str]]:
    def colour(op: str, stage: TagValue | None) -> str:
        return _colour(Activity(op, "", {} if stage is None else {"stage": stage}), stages)

    first = next(iter(stages), None)
    used = {one.what.op for timeline in timelines for one in timeline.ran}
    found = [(colour(op, first), f"{op} {NAMES[op]}") for op in SHADES if op in used]
    if len(stages) > 1:
        found += [(colour("B", stage), f"stage {stage}") for stage in list(stages)[: len(HUES)]]
    if len(stages) > len(HUES):
        found.append(("none", f"and {len(stages) - len(HUES):,} more"))
    if used & COMMUNICATION:
        found.append((MOVED, "communication"))
    others = {one.what.op for timeline in timelines for ran in timeline.of_row() for one in _others(ran)}
    if others:
        found.append((OTHER, ", ".join(sorted(others))))
    return [*found, (IDLE, "idle")]


def _devices(devices: Sequence[int]) -> str:
    """`devices 0-3`, or where that is long how many there are."""
    found = numbers(devices)
    short = found if len(found) < 9 else f"{devices[0]}, ... ({len(devices)})"
    return f"device{'s' if len(devices) > 1 else ''} {short}"


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(0.0, width - 0.6):.2f}" height="{height:.1f}" fill="{fill}">'
        f"{inside}</rect>"
    )


def _text(x: float, y: float, text: str, size: int, fill: str = INK, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(printable(text))}</text>'
    )
