"""What a stream may use of a device: its priority there, and how much of the device its communication takes."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CTAS = 32
"""What NCCL takes at most for `maxCTAs`."""


@dataclass(frozen=True)
class StreamResources:
    """None: what the backend does without being told."""

    high_priority: bool | None = None
    ctas: int | None = None
    """At most so many thread blocks for a kernel of NCCL."""

    def __str__(self) -> str:
        priority = () if self.high_priority is None else (f"priority={'high' if self.high_priority else 'normal'}",)
        return ", ".join((*priority, *(() if self.ctas is None else (f"ctas={self.ctas}",))))


DEFAULT = StreamResources()
