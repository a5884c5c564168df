"""Progress of long actions: one stream of typed events (events.py), and displays of it.

Long actions report to `emit` or `phase` and do not know the display. `displayed_by` installs one: lines for logs
(plain.py), a status line with a bar on a terminal (live.py), one output that is updated in a notebook (notebook.py).
Without a display nothing is shown.
"""

from piperlang.progress.events import (
    Began,
    Display,
    Ended,
    Event,
    Notice,
    StepMetrics,
    Stepping,
    Stopped,
    Workers,
    begin,
    current,
    displayed_by,
    doing,
    done,
    emit,
    phase,
    stepping,
)

__all__ = [
    "Began",
    "Display",
    "Ended",
    "Event",
    "Notice",
    "StepMetrics",
    "Stepping",
    "Stopped",
    "Workers",
    "begin",
    "current",
    "displayed_by",
    "doing",
    "done",
    "emit",
    "phase",
    "stepping",
]
