"""Commands on a real pseudo-terminal, and what a person sees of them: pexpect runs, pyte is the terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pexpect
import pyte

from tests.support import ROOT

PIPERC = [sys.executable, "-m", "piperlang"]
STEP = re.compile(r"step +(\d+)  loss \d+\.\d{6}  [\d,]+ samples/s(  [\d.]+ ms)?(  [\d,]+ MiB)?")


def rows_of(lines: list[str]) -> list[int]:
    """The steps that a log or a screen has a row of."""
    return [int(found[1]) for line in lines if (found := STEP.fullmatch(line))]


@dataclass
class Terminal:
    """A terminal in which one command runs. `raw` is everything it has written."""

    child: pexpect.spawn[bytes]
    screen: pyte.HistoryScreen
    stream: pyte.ByteStream
    raw: bytes = b""
    seen: set[str] = field(default_factory=set)
    """Every line that was the last one on the screen at some moment."""

    def read(self, until: Callable[[], bool] = lambda: False, timeout: float = 60.0) -> None:
        """Read until the condition holds, or the command ends."""
        while not until():
            try:
                found = self.child.read_nonblocking(4096, timeout)
            except pexpect.EOF:
                break
            self.raw += found
            self.stream.feed(found)
            if self.lines:
                self.seen.add(self.lines[-1])

    def end(self, timeout: float = 60.0) -> int:
        """Read the rest; the exit status."""
        self.read(timeout=timeout)
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -int(self.child.signalstatus or 0)

    @property
    def lines(self) -> list[str]:
        """The screen and what has scrolled off it, without the empty end."""
        above = ["".join(row[x].data for x in range(self.screen.columns)) for row in self.screen.history.top]
        found = [line.rstrip() for line in [*above, *self.screen.display]]
        while found and not found[-1]:
            found.pop()
        return found

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self.screen.resize(rows, columns)


@contextmanager
def terminal(
    command: list[str], columns: int, rows: int = 24, cwd: Path = ROOT, **environment: str
) -> Iterator[Terminal]:
    screen = pyte.HistoryScreen(columns, rows, history=100_000)
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI")
    }
    child = pexpect.spawn(
        command[0],
        command[1:],
        dimensions=(rows, columns),
        cwd=str(cwd),
        env={**inherited, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **environment},
        timeout=600,
    )
    try:
        yield Terminal(child, screen, pyte.ByteStream(screen))
    finally:
        child.close(force=True)
