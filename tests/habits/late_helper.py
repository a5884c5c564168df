"""A module beside the model, with state of its own."""

from __future__ import annotations

calls = 0


def reset() -> None:
    global calls
    calls = 0


def next_scale() -> float:
    global calls
    calls += 1
    return 1.0 if calls <= 2 else 0.25


class Schedule:
    def __init__(self) -> None:
        self.calls = 0

    def next(self) -> float:
        self.calls += 1
        return 1.0 if self.calls <= 2 else 0.25
