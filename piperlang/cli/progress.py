"""Selects the progress display of a command.

Training reports on standard output: phases, steps, the end. All other commands print results there, and report
progress on standard error. Both use a status line on a capable terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import TextIO

from piperlang.cli.report import paint
from piperlang.interrupts import told_by
from piperlang.progress import begin, displayed_by, doing, done
from piperlang.progress.plain import Plain, Watching
from piperlang.progress.records import Records

TRAINING = ("train", "run")


@contextmanager
def progress_of(options: argparse.Namespace) -> Iterator[None]:
    """Run `options.run` with a progress display."""
    begin()
    told_by(doing, done)
    training, machine = options.command in TRAINING, getattr(options, "json", False)
    people: Watching | None = None
    if training and not machine:
        people = display_on(sys.stdout, keeps_phases=True)
    elif sys.stderr.isatty() or not (machine or options.format == "json"):
        people = display_on(sys.stderr, keeps_phases=False)
    # Output of the user's code must not mix with the lines of JSON.
    apart = redirect_stdout(sys.stderr) if training and machine else nullcontext()
    try:
        with (
            displayed_by(Records(sys.stdout, sys.stderr, people) if training and machine else people or Silent()),
            apart,
        ):
            yield
    finally:
        if people is not None:
            people.close()


class Silent:
    def show(self, event: object) -> None:
        pass


def display_on(stream: TextIO, keeps_phases: bool) -> Watching:
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from piperlang.progress.live import Live

        return Live(stream, keeps_phases)
    colours = paint(stream)
    return Plain(stream, keeps_phases, _width_of(stream), lambda text: colours(text, "2"))


def _width_of(stream: TextIO) -> Callable[[], int | None]:
    """The width of the terminal. Lines of a log have any length, unless COLUMNS is set."""
    limited = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return lambda: shutil.get_terminal_size().columns - 1 if limited else None
