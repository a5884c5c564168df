"""Source text and the spans that point into it.

A `Span` carries its `Source`, so a diagnostic can quote any file (the user's script, an imported one, the standard
library) without a table of files travelling along.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a text: line and column, counted from 1."""

    line: int
    column: int


@dataclass(frozen=True, eq=False)
class Source:
    """One text with the name it is known by: a path as the user gave it, or `std/pipeline.piper`."""

    name: str
    text: str = field(repr=False)
    library: bool = False
    """True for the standard library: errors inside it are shown at the user's call first."""

    @cached_property
    def line_starts(self) -> list[int]:
        starts = [0]
        starts.extend(i + 1 for i, char in enumerate(self.text) if char == "\n")
        return starts

    def position(self, offset: int) -> Position:
        line = bisect_right(self.line_starts, offset)
        return Position(line, offset - self.line_starts[line - 1] + 1)

    def line(self, number: int) -> str:
        start = self.line_starts[number - 1]
        end = self.line_starts[number] - 1 if number < len(self.line_starts) else len(self.text)
        return self.text[start:end]

    def span(self, start: int, end: int) -> Span:
        return Span(self, start, end)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of characters of one source."""

    source: Source
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def first(self) -> Position:
        return self.source.position(self.start)

    @property
    def last(self) -> Position:
        """The position just after the last character."""
        return self.source.position(self.end)

    def to(self, other: Span) -> Span:
        return Span(self.source, self.start, other.end)

    def __str__(self) -> str:
        at = self.first
        return f"{self.source.name}:{at.line}:{at.column}"
