"""A plan: one list of instructions per device, and what they refer to. No strategy, no mesh, no graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from piperlang.core.selector import TagValue
from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.core.value_id import ValueId
from piperlang.ir.layout import Box
from piperlang.ir.model import Sharding, Slot
from piperlang.plan.instructions import Compute, Instruction, Interval

VERSION = 8


class PlanNode(NamedTuple):
    """A node of the graph, as messages and pictures name it."""

    name: str
    line: str
    """Of the script, if a directive added it."""
    tags: tuple[tuple[str, TagValue], ...]
    """What selectors of a script select it by: its tags, pass, microbatches and kind of communication."""

    def __str__(self) -> str:
        return f"{self.name} ({self.line})" if self.line else self.name


BUNDLES = ("saved", "kept")
"""Slots of what one pass keeps for another: many tensors, one value of a plan."""


class StageProgram(NamedTuple):
    """What a compute instruction runs: one pass of one chunk, for a number of samples and one sharding."""

    op: str
    chunk: int
    samples: int
    sharding: Sharding
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    loss: int | None
    """Which output is the loss."""
    routed: bool
    """Its experts are divided over devices, so its tokens are dispatched."""
    without_samples: tuple[Slot, ...] = ()
    """Inputs and outputs that do not have samples. A pass may read what another microbatch has made of them."""


class ParameterShard(NamedTuple):
    """What a device keeps of a weight between steps."""

    weight: str
    box: Box
    interval: Interval | None
    """Of the flattened box, where ZeRO divides it further."""
    first: bool
    """Of the devices that keep the same weight, the first."""

    def updated(self, part: Interval | None) -> Interval | None:
        """Of the flattened box, what an update of `part` of this shard changes; None for all of it."""
        if part is None:
            return self.interval
        start = self.interval[0] if self.interval is not None else 0
        return start + part[0], start + part[1]


class Feed(NamedTuple):
    """A slice of the batch."""

    key: ValueId
    name: str
    box: Box
    """In the whole batch."""


class Group(NamedTuple):
    """A communicator, with the resources of its stream."""

    members: tuple[int, ...]
    stream: str


class Pair(NamedTuple):
    """Who sends to whom, on streams with some resources: backends whose messages have no tags need a communicator for
    each."""

    source: int
    target: int
    resources: StreamResources


@dataclass
class DevicePlan:
    device: int
    instructions: list[Instruction] = field(default_factory=list)
    feeds: list[Feed] = field(default_factory=list)
    weights: dict[ValueId, ParameterShard] = field(default_factory=dict)
    next: dict[ValueId, ValueId] = field(default_factory=dict)
    """Which value becomes the weight of the next step."""
    losses: dict[ValueId, float] = field(default_factory=dict)
    """Losses made here, and what each counts for; the same loss is counted on one device only."""


@dataclass
class Plan:
    """Everything that is needed to run steps, except the model's own code and weights."""

    devices: list[DevicePlan]
    programs: list[StageProgram]
    nodes: list[PlanNode]
    """Those of the graph that instructions belong to."""
    samples: int
    combine: str
    """`mean` or `sum`: how the losses of the parts of the batch combine."""
    whole: tuple[str, ...]
    """Tensors without a batch dimension, computed from the whole batch: every part of the batch is given all of
    them."""
    groups: list[Group]
    seconds: float = 0.0
    """The estimated step time."""
    about: dict[str, Any] = field(default_factory=dict)
    """Provenance: model, script, versions."""
    weights: tuple[float, ...] = ()
    """What each sample counts for, in a batch that is padded so that it can be divided; in others, 1."""
    streams: dict[str, StreamResources] = field(default_factory=dict)
    """Streams of instructions that a script gives resources."""

    def resources(self, stream: str) -> StreamResources:
        return self.streams.get(stream, DEFAULT)

    @property
    def counted(self) -> int:
        """The number of samples of the batch before it was padded."""
        return round(sum(self.weights)) if self.weights else self.samples

    def share(self, x: Compute) -> float:
        """What the loss of a pass counts for."""
        samples = self.programs[x.program].samples
        if not self.weights:
            return samples / self.samples if self.combine == "mean" else 1.0
        counts = sum(self.weights[x.first_sample : x.first_sample + samples])
        return counts / (self.counted if self.combine == "mean" else samples)
