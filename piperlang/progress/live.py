"""One status line at the bottom of a terminal: the current phase, or a bar. Permanent lines go above it.

The line is drawn eight times a second by the display's own thread; a step only stores its row. The cursor is never
hidden, so that the terminal keeps it however the process ends.
"""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.text import Text

from piperlang.progress.events import Event, Stepping
from piperlang.progress.lines import bar_fields, beat_line
from piperlang.progress.plain import Watching

SHORTEST, LONGEST = 5, 60
"""Cells of a bar."""
ECHO = 2
"""Cells right of the status line, in which the terminal can write `^C` without breaking the line."""
SMOOTHING = 0.1
"""Weight of a new step's time in the moving average for the ETA."""


class Live(Watching):
    tick_seconds = 0.125

    def __init__(self, stream: TextIO, keeps_phases: bool = True) -> None:
        super().__init__(keeps_phases)
        self.stream = stream
        self.console = Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self.drawn = 0
        """Cells of the status line that is on the screen."""
        self.middle = False
        """Whether other output has an unfinished line: nothing can be drawn below it."""
        self.begun = 0.0
        self._clock: tuple[int, float, float] | None = None
        self._foreign: list[tuple[str, Above]] = []
        for name in ("stdout", "stderr"):
            if _is_terminal(getattr(sys, name)):
                above = Above(getattr(sys, name), self)
                setattr(sys, name, above)
                self._foreign.append((name, above))

    def show(self, event: Event) -> None:
        if isinstance(event, Stepping):
            self.begun, self._clock = time.monotonic(), None
        super().show(event)

    def width(self) -> int:
        # One cell less than there are: the cursor stays on the line, whatever the terminal does at its end.
        return max(1, self.console.size.width - 1)

    def keep(self, text: str, quiet: bool = False) -> None:
        if self.middle:
            self.stream.write("\n")
        elif _in_foreground(self.stream):
            # Where no status line is, there may be the terminal's `^C`.
            self.stream.write(self._erasure() or "\r\x1b[2K")
        self.drawn, self.middle = 0, False
        self.stream.write(self._styled(Text(text, style="dim" if quiet else "")) + "\n")
        self.stream.flush()

    def tick(self, now: float) -> None:
        text = self._status(now)
        if not _in_foreground(self.stream):
            self.drawn = 0  # the shell has written there
            return
        if text is None or self.middle:
            self.clear()
            return
        written = self._styled(text)
        self.stream.write(self._erasure() + written)
        self.stream.flush()
        self.drawn = text.cell_len

    def changed(self) -> None:
        if not self.phases and self.pace is None:
            self.clear()  # at once: results follow

    def clear(self) -> None:
        if self.drawn:
            if _in_foreground(self.stream):
                self.stream.write(self._erasure())
                self.stream.flush()
            self.drawn = 0

    def close(self) -> None:
        super().close()
        with self.lock:
            self.clear()
            if self.middle:
                self.stream.write("\n")
                self.stream.flush()
            for name, above in self._foreign:
                if getattr(sys, name) is above:
                    setattr(sys, name, above.stream)

    def _erasure(self) -> str:
        """To the beginning of the status line. A terminal that has become narrower has broken it into several."""
        if not self.drawn:
            return ""
        rows = (self.drawn - 1) // max(1, self.console.size.width)
        return "\r\x1b[2K" + "\x1b[1A\x1b[2K" * rows

    def _styled(self, text: Text) -> str:
        with self.console.capture() as captured:
            self.console.print(text, end="", soft_wrap=True)
        return captured.get()

    def _status(self, now: float) -> Text | None:
        if self.phases:
            running = self.phases[-1]
            text = Text(beat_line(running.what, now - running.since), style="dim")
            text.truncate(self.width() - ECHO, overflow="ellipsis")
            return text
        return self._bar(now) if self.pace is not None else None

    def _bar(self, now: float) -> Text:
        width = self.width() - ECHO
        fields = bar_fields(self.row, self.total, self._left(now), width)
        room = min(LONGEST, width - len(fields) - 2)
        if self.total is None or room < SHORTEST:
            return Text(fields)
        done = self.row.step + 1 if self.row is not None else 0
        bar = Text()
        for segment in self.console.render(ProgressBar(total=self.total, completed=done, width=room)):
            bar.append(segment.text, segment.style)
        return bar + Text(f"{' ' * (room - bar.cell_len)}  {fields}")

    def _left(self, now: float) -> float | None:
        """Estimated seconds until the last step, from the recent ones."""
        if self.row is None or self.total is None:
            return None
        done = self.row.step + 1
        if self._clock is None:
            self._clock = (done, now, (now - self.begun) / done)
        before, then, each = self._clock
        if done > before:
            recent, weight = (now - then) / (done - before), 1 - (1 - SMOOTHING) ** (done - before)
            each += weight * (recent - each)
            self._clock = (done, now, each)
        return max(0.0, (self.total - done) * each - (now - self._clock[1]))


class Above(io.TextIOBase):
    """Standard output or error while a status line is drawn: all output goes above it."""

    def __init__(self, stream: TextIO, live: Live) -> None:
        self.stream, self._live = stream, live

    def write(self, text: str) -> int:
        with self._live.lock:
            if text:
                self._live.clear()
                self._live.middle = not text.endswith("\n")
            return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not isinstance(stream, Above) and stream.isatty()


def _in_foreground(stream: TextIO) -> bool:
    """False while the user's shell is in the foreground."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return True
