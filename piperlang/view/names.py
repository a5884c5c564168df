"""Names in the room that there is."""

from __future__ import annotations

from unicodedata import east_asian_width

ELLIPSIS = "…"


def columns(text: str) -> int:
    """Of a terminal."""
    return sum(2 if east_asian_width(char) in "WF" else 1 for char in text)


def shortened(name: str, most: int) -> str:
    """In at most so many columns. Its end is kept: that is where names of files differ."""
    if columns(name) <= most:
        return name
    end = len(name)
    taken = 1
    while end and taken + columns(name[end - 1]) <= most:
        end -= 1
        taken += columns(name[end])
    return ELLIPSIS + name[end:]
