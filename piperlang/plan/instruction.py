"""What one device does, in its own words: no strategy, no mesh, no graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from piperlang.ir.graph import Key

VERSION = 2
SYNC = "order"
"""The stream of messages that say only: now."""
NORM = "norm"
"""The stream on which the norm of all gradients is found, and the key of what they are scaled by."""

ROUTES = ("choose", "dispatch", "combine")
"""Rows to the experts that they chose, and back: `choose` finds the way, the others go it."""


class Instruction(NamedTuple):
    do: str
    """F B I W R | send recv exchange all_reduce | gather scatter reduce | norm update | copy offload fetch"""
    stream: str
    node: int
    """Which node of the graph it belongs to: an index into the plan's names."""
    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    waits: tuple[int, ...]
    """Instructions on other streams of this device that must have ended."""
    args: dict[str, Any]


@dataclass
class DevicePlan:
    device: int
    instructions: list[Instruction] = field(default_factory=list)
    feeds: list[tuple[Key, str, Any]] = field(default_factory=list)
    """Of the batch: key, name of the tensor, and the box of the whole batch."""
    weights: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """What it keeps between steps: weight, box and flat interval."""
    next: dict[Key, Key] = field(default_factory=dict)
    losses: dict[Key, float] = field(default_factory=dict)
    """Losses made here, and what each counts for; the same loss is counted on one device only."""


@dataclass
class Plan:
    """Everything that is needed to run steps, but for the model's own code and weights."""

    devices: list[DevicePlan]
    kinds: list[dict[str, Any]]
    """Compute: chunk, pass, samples, how it is divided, and its slots."""
    names: list[str]
    """What nodes are called, for messages."""
    lines: list[str]
    """The line of the script that asked for each node."""
    samples: int
    combine: str
    groups: list[tuple[tuple[int, ...], str]]
    """Communicators: who, and on which stream."""
    seconds: float = 0.0
    """The foreseen length of a step."""
    about: dict[str, Any] = field(default_factory=dict)
    """Where it comes from: model, script, versions."""
