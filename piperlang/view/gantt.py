"""A timeline as an SVG picture for papers and talks: width is duration, hue is the stage, shade is the pass, grey is
idle."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import floor, log10

from piperlang.core.selector import TagValue
from piperlang.plan.estimate.summary import time_text
from piperlang.simulate.timeline import Activity, Ran, Timeline, numbers

WIDTH, MARGIN, HEIGHT, GAP, HEAD, FOOT = 1280, 110, 34, 6, 62, 64
ROWS = 32
"""Rows that are drawn: more cannot be read on a slide."""
HUES = (214, 24, 150, 320, 48, 262, 184, 0)
"""Of stages, in degrees; far apart for neighbours."""
SHADES = {"F": (80, 78), "B": (62, 48), "I": (68, 62), "W": (62, 34), "R": (30, 84)}
"""Saturation and lightness of a pass, in percent."""
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "R": "forward again"}
INK, FAINT, IDLE, OTHER = "#1d2127", "#5b6470", "#e6e8eb", "#9aa3ad"
NARROW = 1.0
"""Pixels below which bars are drawn as one."""


def gantt(timeline: Timeline, title: str = "") -> str:
    """Passes, a row per device; communication below them in thin bars, where there is any."""
    rows = timeline.rows[:ROWS]
    communicates = any(one.what.communicates for one in timeline.ran)
    each = HEIGHT + (10 if communicates else 0) + GAP
    height = HEAD + len(rows) * each + FOOT
    scale = (WIDTH - MARGIN - 24) / (timeline.length or 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(20, 30, title or timeline.title or "Timeline", 20, weight="600"),
        _text(WIDTH - 20, 30, _figures(timeline), 15, FAINT, "end"),
    ]
    stages = _stages(timeline)
    for row, ran in enumerate(timeline.of_row()[: len(rows)]):
        top = HEAD + row * each
        label = f"device {_devices(rows[row])}"
        parts.append(_text(MARGIN - 10, top + HEIGHT / 2 + 5, label, 14, INK, "end"))
        parts.append(_rect(MARGIN, top, timeline.length * scale, HEIGHT, IDLE))
        parts += _bars([one for one in ran if one.what.computes], top, HEIGHT, scale, stages)
        thin = sorted((one for one in ran if one.what.communicates), key=lambda one: one.start + one.waited)
        parts += _bars(thin, top + HEIGHT + 2, 6, scale, stages)
    parts += _axis(timeline, HEAD + len(rows) * each, scale)
    parts += _legend(timeline, stages, height - 18)
    if len(timeline.rows) > ROWS:
        parts.append(_text(20, height - 40, f"and {len(timeline.rows) - ROWS:,} more rows", 13, FAINT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _figures(timeline: Timeline) -> str:
    devices = sum(map(len, timeline.rows))
    length = time_text(timeline.length) if timeline.unit == "s" else f"{timeline.length:g} {timeline.unit}"
    return f"{devices:,} device{'s' if devices > 1 else ''}, {length}, {timeline.idle_share():.1%} idle"


def _stages(timeline: Timeline) -> dict[TagValue | None, int]:
    """Which hue a stage has."""
    found = dict.fromkeys(one.what.tags.get("stage") for one in timeline.ran if one.what.computes)
    ordered = sorted(found, key=lambda stage: (0, stage, "") if isinstance(stage, int) else (1, 0, str(stage)))
    return {stage: k for k, stage in enumerate(ordered)}


def _bars(ran: Sequence[Ran], top: float, height: float, scale: float, stages: dict[TagValue | None, int]) -> list[str]:
    """Those too narrow to be seen are drawn with those before them."""
    parts: list[str] = []
    drawn = -1.0
    for one in ran:
        left = MARGIN + (one.start + one.waited) * scale
        right = MARGIN + one.end * scale
        if right - drawn < NARROW:
            continue
        left, drawn = max(left, drawn), right
        colour = _colour(one.what, stages)
        parts.append(_rect(left, top, right - left, height, colour, _title(one)))
        label = f"{one.what.op}{one.what.tags.get('mb', '')}"
        if height > 12 and right - left > 7.5 * len(label) + 4:
            ink = "white" if SHADES[one.what.op][1] < 55 else INK
            parts.append(_text((left + right) / 2, top + height / 2 + 5, label, 13, ink, "middle"))
    return parts


def _colour(what: Activity, stages: dict[TagValue | None, int]) -> str:
    if not what.computes:
        return OTHER
    number = stages.get(what.tags.get("stage"), 0)
    saturation, light = SHADES[what.op]
    # Beyond the hues there are, the same come again a little darker.
    return f"hsl({HUES[number % len(HUES)]}, {saturation}%, {max(20, light - 7 * (number // len(HUES) % 3))}%)"


def _title(one: Ran) -> str:
    line = f" ({one.what.line})" if one.what.line else ""
    return f"{one.what.name}{line}"


def _axis(timeline: Timeline, top: float, scale: float) -> list[str]:
    step = _tick(timeline.length)
    parts = []
    for k in range(floor(timeline.length / step) + 1 if timeline.length else 0):
        x = MARGIN + k * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{top + 5:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(x, top + 20, _mark(k * step, timeline.unit), 12, FAINT, "middle"))
    return parts


def _tick(length: float) -> float:
    """About ten on the axis, at round numbers."""
    if length <= 0:
        return 1.0
    power = 10.0 ** floor(log10(length / 8))
    return next(power * k for k in (1, 2, 5, 10) if length / (power * k) <= 12)


def _mark(time: float, unit: str) -> str:
    return time_text(time) if unit == "s" else f"{time:g}"


def _legend(timeline: Timeline, stages: dict[TagValue | None, int], y: float) -> list[str]:
    parts, x = [], float(MARGIN)

    def entry(colour: str, text: str) -> None:
        nonlocal x
        parts.append(_rect(x, y - 11, 13, 13, colour))
        parts.append(_text(x + 19, y, text, 13))
        x += 19 + 7.2 * len(text) + 22

    first = next(iter(stages), None)
    for op in [op for op in SHADES if any(one.what.op == op for one in timeline.ran)]:
        entry(_colour(Activity(op, "", {} if first is None else {"stage": first}), stages), f"{op} {NAMES[op]}")
    for stage in list(stages)[: len(HUES)] if len(stages) > 1 else ():
        entry(_colour(Activity("B", "", {} if stage is None else {"stage": stage}), stages), f"stage {stage}")
    if any(one.what.communicates for one in timeline.ran):
        entry(OTHER, "communication")
    entry(IDLE, "idle")
    return parts


def _devices(devices: Sequence[int]) -> str:
    """`0-3`, or where that is long how many there are."""
    found = numbers(devices)
    return found if len(found) < 10 else f"{devices[0]}, ... ({len(devices)})"


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(0.0, width - 0.6):.2f}" height="{height:.1f}" fill="{fill}">'
        f"{inside}</rect>"
    )


def _text(x: float, y: float, text: str, size: int, fill: str = INK, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )
