"""The marks of a time axis: all in one unit, and a plain 0 at the origin. page/viewer.js has the same."""

from __future__ import annotations

from math import floor, log10

UNITS = ((1e-3, 1e6, " us"), (1.0, 1e3, " ms"), (float("inf"), 1.0, " s"))
"""Below which length of the whole axis, how many of it a second is, and its name."""


def mark(time: float, step: float, length: float, unit: str) -> str:
    """`time`, on an axis of this length with a mark at every `step`."""
    if not time:
        return "0"
    factor, name = next((each, name) for below, each, name in UNITS if length < below) if unit == "s" else (1.0, "")
    decimals = max(0, -floor(log10(step * factor) + 1e-9))
    return f"{time * factor:.{decimals}f}{name}"
