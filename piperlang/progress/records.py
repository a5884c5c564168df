"""A line of JSON a step, for programs: standard output holds nothing else."""

from __future__ import annotations

import json
from typing import TextIO

from piperlang.progress.events import Display, Event, Message, Row


class Records:
    """`people`: a display for whoever watches, on another stream."""

    def __init__(self, stream: TextIO, errors: TextIO, people: Display | None = None) -> None:
        self.stream, self.errors, self.people = stream, errors, people

    def show(self, event: Event) -> None:
        if isinstance(event, Row):
            print(json.dumps(event.record()), file=self.stream, flush=True)
        if isinstance(event, Message):
            if event.warning:
                print(event.text, file=self.errors, flush=True)
        elif self.people is not None:
            self.people.show(event)
