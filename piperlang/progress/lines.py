"""Events as text, at any width. Fields that do not fit are omitted: a number is never truncated or wrapped."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence

from piperlang.progress.events import Ended, StepMetrics

LINES = 20
"""Approximate maximum number of rows that are kept by default."""
LONG_BAR = 12
"""Minimum width of the bar for the long form `samples/s`."""
MINUTE = 60.0
"""By default, at least one row is kept in this many seconds: steps may be slow."""


def phase_line(ended: Ended) -> str:
    """`traced 3.1 s (87 nodes)`"""
    detail = f" ({ended.detail})" if ended.detail else ""
    return f"{ended.done} {ended.seconds:.1f} s{detail}"


def counted(count: int, what: str) -> str:
    """`1 device`, `1,024 devices`, `2 batches`"""
    plural = "es" if what.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}{plural}"


def beat_line(what: str, seconds: float) -> str:
    """`tracing model.py ... 4 s`"""
    return f"{what} ... {seconds:.0f} s"


def row_line(row: StepMetrics, width: int | None = None) -> str:
    """`step   10  loss 1.069707  2,481 samples/s  51.6 ms  385 MiB`"""
    fields = [
        (0, f"step {row.step:4}"),
        (0, f"loss {row.loss:.6f}"),
        (2, f"{row.samples_per_second:,.0f} samples/s"),
        (3, f"{1e3 * row.seconds:.1f} ms"),
        (4, f"{row.memory_bytes / 2**20:,.0f} MiB"),
    ]
    if row.validation_loss is not None:
        fields.append((1, f"validation {row.validation_loss:.6f}"))
    return _fitting(fields, width)


def _fitting(fields: Sequence[tuple[int, str]], width: int | None) -> str:
    """Fields side by side; those that do not fit are dropped by rank, rank 0 never."""
    for rank in range(max(rank for rank, _ in fields), -1, -1):
        line = "  ".join(text for its, text in fields if its <= rank)
        if width is None or len(line) <= width:
            break
    return line


def wrapped(text: str, width: int | None) -> str:
    """A message, wrapped between words."""
    if width is None:
        return text
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join("\n".join(parts) for parts in lines)


def bar_fields(row: StepMetrics | None, total: int | None, left: float | None, width: int) -> str:
    """The fields to the right of the bar, which takes the remaining width. Fields have priority over the bar."""
    if row is None:
        return f"0/{total:,}" if total is not None else "step 0"
    place = f"{row.step + 1:,}/{total:,}" if total is not None else f"step {row.step:,}"
    loss, rate = f"loss {_short(row.loss)}", f"{row.samples_per_second:,.0f}"
    eta = [] if left is None else [f"ETA {clock(left)}"]
    choices = (
        (LONG_BAR, [place, loss, f"{rate} samples/s", *eta]),
        (0, [place, loss, f"{rate}/s", *eta]),
        (0, [place, loss, *eta]),
        (0, [place, loss]),
        (0, [place]),
    )
    lines = ((bar, "  ".join(fields)) for bar, fields in choices)
    return next((line for bar, line in lines if bar + len(line) <= width), "")


def _short(loss: float) -> str:
    return f"{loss:.4f}" if 1e-3 <= abs(loss) < 1e5 or loss == 0 or loss != loss else f"{loss:.2e}"


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`"""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def default_every(total: int) -> int:
    """1, 2, 5, 10, 20, 50 ... : the first that keeps no more than about LINES rows."""
    size = 1
    while True:
        for every in (size, 2 * size, 5 * size):
            if every * LINES >= total:
                return every
        size *= 10


class Pace:
    """Which rows are kept. Without a total: those of steps 0, 1, 2, 5, 10, 20, 50 ..."""

    def __init__(self, total: int | None, every: int | None, now: Callable[[], float] = time.monotonic) -> None:
        self.every = every or (default_every(total) if total is not None else None)
        self.patience, self.now, self.last = None if every else MINUTE, now, now()

    def keeps(self, row: StepMetrics) -> bool:
        due = row.step % self.every == 0 if self.every is not None else str(row.step).rstrip("0") in ("", "1", "2", "5")
        late = self.patience is not None and self.now() - self.last >= self.patience
        if not (due or late or row.validation_loss is not None):
            return False
        self.last = self.now()
        return True
