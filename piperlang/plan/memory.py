"""What a device needs at most, foreseen: its instructions in order, values from when they are made to when they are last read.

Streams that run side by side may need a little more at once, and a backend has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from piperlang.ir.graph import COMPUTE, Graph, Key
from piperlang.ir.held import coordinates, interval
from piperlang.ir.layout import devices_of
from piperlang.plan.instruction import DevicePlan, Instruction, Plan
from piperlang.plan.transfer import local_shapes

STATES = 8.0
"""Bytes of optimizer states for every element that a device updates: two float32, as Adam has."""
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION = "weights", "gradients", "optimizer states", "activations", "communication"


@dataclass(frozen=True)
class Peak:
    bytes: int
    at: int
    """The instruction at which it is reached; -1 where the step begins with it."""
    by: Mapping[str, int]
    """What it is made of."""


def peak(device: DevicePlan, plan: Plan, graph: Graph, states: float = STATES, sizes: Sizes | None = None) -> Peak:
    """`sizes`: to share between devices."""
    return _Walk(device, plan, sizes or Sizes(plan, graph), states).peak()


def peaks(plan: Plan, graph: Graph, states: float = STATES) -> list[Peak]:
    sizes = Sizes(plan, graph)
    return [peak(device, plan, graph, states, sizes) for device in plan.devices]


def kind_of(key: Key) -> str:
    head = key.partition(":")[0]
    return WEIGHTS if head == "w" else GRADIENTS if head in ("dw", "g", "sum") else ACTIVATIONS


class Sizes:
    """Bytes of values on a device."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.known: dict[Key, int] = {}
        self.bundles: dict[Key, int] = {}
        for device in plan.devices:
            for instruction in device.instructions:
                if instruction.do in ("F", "I", "R"):
                    self._bundle(instruction)

    def _bundle(self, instruction: Instruction) -> None:
        """Activations: what the chunk was captured with, for the samples and the part of it that a device has."""
        last = instruction.writes[-1]
        kind, _, _ = last.partition(":")
        if kind in ("saved", "kept") and last not in self.bundles:
            about = self.plan.kinds[instruction.args["kind"]]
            chunk = self.graph.model.chunks[about["chunk"]]
            whole = chunk.saved_bytes if kind == "saved" else chunk.kept_bytes
            self.bundles[last] = round(whole * about["samples"] / self.graph.model.samples / prod(divide.size for divide in about["arranged"][0]))

    def of(self, key: Key, device: int) -> int:
        held = self.graph.held.get(key)
        if held is not None:
            weight = self.graph.model.weights[held.weight]
            low, high = interval(held, weight.shape, coordinates(held.where)[devices_of(held.where).index(device)])
            return (high - low) * weight.itemsize
        if key not in self.known:
            self.known[key] = self._value(key, device)
        return self.known[key]

    def _value(self, key: Key, device: int) -> int:
        """The same on every device that has it: layouts divide evenly."""
        value = self.graph.values.get(key)
        if value is not None:
            return prod(local_shapes(value.tensor, value.layout, value.samples, value.inner)[device]) * value.tensor.itemsize
        return self.bundles.get(key.removesuffix("!"), 0)  # what has been offloaded is in the host's memory


class _Walk:
    def __init__(self, device: DevicePlan, plan: Plan, sizes: Sizes, states: float) -> None:
        self.device, self.sizes = device, sizes
        self.number = device.device
        self.left: dict[Key, int] = {}
        for instruction in device.instructions:
            for key in instruction.reads:
                self.left[key] = self.left.get(key, 0) + 1
        self.permanent = {*device.next.values(), *device.losses, *device.weights}
        self.sums = _added_up(device)
        self.members = {k: len(members) for k, (members, _) in enumerate(plan.groups)}
        self.now = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION), 0)
        self.live: dict[Key, int] = {}
        for key in (*device.weights, *(key for key, _, _ in device.feeds)):
            self._add(key)
        self.now[OPTIMIZER] = round(states * sum(self._elements(entry) for x in device.instructions if x.do == "update" for entry in x.args["weights"]))
        self.best, self.at, self.by = sum(self.now.values()), -1, dict(self.now)

    def _elements(self, entry: Mapping[str, Any]) -> int:
        if entry["take"] is not None:
            return int(entry["take"][1] - entry["take"][0])
        return self.sizes.of(entry["old"], self.number) // self.sizes.graph.model.weights[entry["weight"]].itemsize

    def _add(self, key: Key) -> None:
        if key not in self.live:
            size = self.sizes.of(self.sums[1].get(key, key), self.number)
            self.live[key] = size
            self.now[kind_of(key)] += size

    def _end(self, key: Key) -> None:
        if key in self.live and key not in self.permanent and not key.startswith("sum:"):
            self.now[kind_of(key)] -= self.live.pop(key)

    def peak(self) -> Peak:
        for i, instruction in enumerate(self.device.instructions):
            for key in instruction.writes:
                total = self.sums[0].get(key, key)
                if instruction.do == "update":
                    continue  # in place
                if total in self.left or total in self.permanent or total.startswith("sum:"):
                    self._add(total)
            self._look(i, self._buffers(instruction))
            if instruction.do == "send":
                self.now[COMMUNICATION] += self._sent(instruction)  # until the step ends: sends are not waited for before
            for key in instruction.reads:
                self.left[key] -= 1
                if not self.left[key]:
                    self._end(key)
        return Peak(self.best, self.at, self.by)

    def _look(self, i: int, buffers: int) -> None:
        total = sum(self.now.values()) + buffers
        if total > self.best:
            self.best, self.at, self.by = total, i, {**self.now, COMMUNICATION: self.now[COMMUNICATION] + buffers}

    def _sent(self, instruction: Instruction) -> int:
        """Only what is cut out of a value is a copy; but the value itself stays with its message, too."""
        args = instruction.args
        if args["key"] is None:
            return len(args["parts"])
        whole = self.sizes.of(args["key"], self.number)
        if any(part[2] is None for part in args["parts"]):
            self.permanent.add(args["key"])
            return 0
        elements = prod(self._shape(args["key"])) or 1
        return sum(whole * prod(part[3]) // elements for part in args["parts"])

    def _shape(self, key: Key) -> tuple[int, ...]:
        value = self.sizes.graph.values[key]
        return local_shapes(value.tensor, value.layout, value.samples, value.inner)[self.number]

    def _buffers(self, instruction: Instruction) -> int:
        """What an instruction needs only while it runs."""
        do, args = instruction.do, instruction.args
        if do in ("gather", "scatter", "reduce"):
            mine = sum(self.sizes.of(self.sums[1].get(key, key), self.number) for entry in args["weights"] for key in entry["from"][:1])
            written = sum(self.sizes.of(key, self.number) for key in instruction.writes)
            return mine * (1 + self.members[args["group"]]) if do == "gather" else mine + (written if do == "scatter" else 0)
        if do == "exchange":
            return self.sizes.of(instruction.reads[0], self.number) + self.sizes.of(instruction.writes[0], self.number)
        if do == "all_reduce":
            return self.sizes.of(instruction.reads[0], self.number)
        return 0


def _added_up(device: DevicePlan) -> tuple[dict[Key, Key], dict[Key, Key]]:
    """Gradients of one weight that one stream makes are added up as they come: which into which sum, and of what size that is."""
    stream = {key: x.stream for x in device.instructions if x.do in COMPUTE for key in x.writes}
    into: dict[Key, Key] = {}
    like: dict[Key, Key] = {}
    for x in device.instructions:
        for entry in x.args.get("weights", ()):
            keys: Sequence[Key] = entry.get("grads") or entry.get("from") or ()
            if len(keys) > 1 and all(key.startswith("dw:") for key in keys) and len({stream[key] for key in keys}) == 1:
                into.update(dict.fromkeys(keys, f"sum:{keys[0]}"))
                like[f"sum:{keys[0]}"] = keys[0]
    return into, like
