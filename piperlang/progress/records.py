"""A line of JSON per step, for programs: standard output contains nothing else."""

from __future__ import annotations

from typing import TextIO

from piperlang.progress.events import Display, Event, Notice, StepMetrics, Stepping, Stopped


class Records:
    """`people`: a display for the user, on another stream. It gets no steps if `stream` is a terminal:
    a bar between rows of JSON is useless."""

    def __init__(self, stream: TextIO, errors: TextIO, people: Display | None = None) -> None:
        self.stream, self.errors, self.people = stream, errors, people
        self.hidden = (StepMetrics, Stepping, Stopped) if stream.isatty() else ()

    def show(self, event: Event) -> None:
        if isinstance(event, StepMetrics):
            print(event.json(), file=self.stream, flush=True)
        if isinstance(event, Notice):
            if event.warning:
                print(event.text, file=self.errors, flush=True)
        elif self.people is not None and not isinstance(event, self.hidden):
            self.people.show(event)
