"""What a device needs at most, foreseen: its instructions in order, values from when they are made to when they are
last read.

Streams that run side by side may need a little more at once, and a backend has buffers of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from piperlang.ir.graph import COMPUTE, Graph, Key
from piperlang.ir.held import coordinates, interval
from piperlang.ir.layout import devices_of
from piperlang.plan.instruction import ROUTES, DevicePlan, Instruction, Plan
from piperlang.plan.sums import reads, sums, travels_alone
from piperlang.plan.transfer import local_shapes

STATES = 8.0
"""Bytes of optimizer states for every element that a device updates: two float32, as Adam has."""
WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION = (
    "weights",
    "gradients",
    "optimizer states",
    "activations",
    "communication",
)


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
        self.fetched: dict[Key, int] = {}
        """Activations that come back from the host: those lie in nothing else."""
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
            whole = chunk.saved_apart if kind == "saved" else chunk.kept_bytes
            self.bundles[last] = self._scaled(whole, about)
            self.fetched[last] = self._scaled(chunk.saved_bytes, about)

    def scratch(self, kind: int) -> int:
        """Of a pass, beyond what it reads and gives."""
        about = self.plan.kinds[kind]
        whole = self.graph.model.chunks[about["chunk"]].passes["F" if about["op"] == "R" else about["op"]].scratch_bytes
        return self._scaled(whole, about)

    def _scaled(self, whole: int, about: Mapping[str, Any]) -> int:
        """For the samples and the part of a chunk that a device has."""
        return int(
            whole * about["samples"] / self.graph.model.samples / prod(divide.size for divide in about["arranged"][0])
        )

    def of(self, key: Key, device: int) -> int:
        """In bytes."""
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
            return (
                prod(local_shapes(value.tensor, value.layout, value.samples, value.inner)[device])
                * value.tensor.itemsize
            )
        if key.endswith("!"):
            return self.fetched.get(key[:-1], 0)
        return self.bundles.get(key, 0)  # what has been offloaded is in the host's memory


class _Walk:
    def __init__(self, device: DevicePlan, plan: Plan, sizes: Sizes, states: float) -> None:
        self.device, self.sizes, self.plan = device, sizes, plan
        self.number = device.device
        self.sums = sums(device)
        self.reads = [reads(x, self.sums) for x in device.instructions]
        self.left = Counter(key for keys in self.reads for key in keys)
        self.permanent = {*device.next.values(), *device.losses, *device.weights}
        self.now = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION), 0)
        self.live: dict[Key, int] = {}
        self.inside: dict[Key, list[Key]] = {}
        """Activations, and the values that they lie in."""
        self.keeping: Counter[Key] = Counter()
        self.over: set[Key] = set()
        for key in (*device.weights, *(key for key, _, _ in device.feeds)):
            self._add(key)
        self.now[OPTIMIZER] = round(
            states
            * sum(self._elements(entry) for x in device.instructions if x.do == "update" for entry in x.args["weights"])
        )
        self.best, self.at, self.by = sum(self.now.values()), -1, dict(self.now)

    def _elements(self, entry: Mapping[str, Any]) -> int:
        if entry["take"] is not None:
            return int(entry["take"][1] - entry["take"][0])
        return self.sizes.of(entry["old"], self.number) // self._item(entry["old"])

    def _item(self, key: Key) -> int:
        return self.sizes.graph.model.weights[self.sizes.graph.held[key].weight].itemsize

    def _size(self, key: Key) -> int:
        """Sums are named after the first of their parts, and are in float32 where those are in half precision."""
        part = key.removeprefix("sum:")
        size = self.sizes.of(part, self.number)
        return size * max(1, 4 // self._item(part)) if part != key else size

    def _add(self, key: Key) -> None:
        if key not in self.live:
            self.live[key] = self._size(key)
            self.now[kind_of(key)] += self.live[key]

    def _end(self, key: Key) -> None:
        if key not in self.live or key in self.permanent:
            return
        if self.keeping[key]:
            self.over.add(key)  # nobody reads it, but activations lie in it
            return
        self.now[kind_of(key)] -= self.live.pop(key)
        for value in self.inside.pop(key, ()):
            self.keeping[value] -= 1
            if value in self.over and not self.keeping[value]:
                self.over.discard(value)
                self._end(value)

    def _lie_in(self, instruction: Instruction) -> None:
        """Activations that a forward keeps may lie in what it reads or gives."""
        kind = self.plan.kinds[instruction.args["kind"]]
        bundle = instruction.writes[-1]
        if instruction.do not in ("F", "R") or not bundle.startswith("saved:"):
            return
        given = {slot: keys[0] for slot, keys in zip(kind["slots"], instruction.args["reads"], strict=True) if keys}
        gave = dict(zip(kind["gives"], instruction.writes, strict=False)) if instruction.do == "F" else {}
        for slot in self.sizes.graph.model.chunks[kind["chunk"]].saved_in:
            key = given.get(slot) or gave.get(slot)
            if instruction.do == "R" and slot[0] == "output":
                # Made again only for what lies in it.
                again = self.sizes.of(
                    f"{self.sizes.graph.model.chunks[kind['chunk']].outputs[slot[1]]}#{bundle.partition('#')[2]}",
                    self.number,
                )
                self.live[bundle] += again
                self.now[ACTIVATIONS] += again
            elif key is not None:
                self._add(key)
                self.inside.setdefault(bundle, []).append(key)
                self.keeping[key] += 1

    def peak(self) -> Peak:
        sent = 0
        again = set(self.device.next.values())
        for i, instruction in enumerate(self.device.instructions):
            if instruction.do == "send":
                self.now[COMMUNICATION] -= sent  # what was sent before has been taken by now
                sent = self._sent(instruction)
                self.now[COMMUNICATION] += sent
            fresh = 0
            for key in instruction.writes:
                total = self.sums.get(key, key)
                if total != key:
                    fresh += (
                        self.sizes.of(key, self.number) if total in self.live else 0
                    )  # until it has been added to its sum
                if instruction.do != "update" and key not in again and (total in self.left or total in self.permanent):
                    self._add(total)
            if instruction.do in COMPUTE and instruction.writes[-1] in self.live:
                self._lie_in(instruction)
            kind = ACTIVATIONS if instruction.do in COMPUTE else COMMUNICATION
            self._look(i, {GRADIENTS: fresh, kind: self._buffers(instruction)})
            for key in self.reads[i]:
                self.left[key] -= 1
                if not self.left[key]:
                    self._end(key)
        return Peak(self.best, self.at, self.by)

    def _look(self, i: int, more: Mapping[str, int]) -> None:
        total = sum(self.now.values()) + sum(more.values())
        if total > self.best:
            self.best, self.at, self.by = total, i, {name: size + more.get(name, 0) for name, size in self.now.items()}

    def _sent(self, instruction: Instruction) -> int:
        """What is cut out of a value is a copy."""
        args = instruction.args
        if args["key"] is None:
            return len(args["parts"])
        whole, elements = self.sizes.of(args["key"], self.number), prod(self._shape(args["key"])) or 1
        return sum(whole * prod(part[3]) // elements for part in args["parts"] if part[2] is not None)

    def _shape(self, key: Key) -> tuple[int, ...]:
        value = self.sizes.graph.values[key]
        return local_shapes(value.tensor, value.layout, value.samples, value.inner)[self.number]

    def _buffers(self, instruction: Instruction) -> int:
        """What an instruction needs only while it runs."""
        do, args = instruction.do, instruction.args
        if do in COMPUTE:
            return self.sizes.scratch(args["kind"])
        if do in ("gather", "scatter"):
            together = [entry for entry in args["weights"] if not travels_alone(entry)]
            copied: int = sum(prod(entry["shape"]) for entry in together) * self._item(instruction.writes[0])
            return copied + copied // (len(args["weights"][0]["cuts"]) or 1)
        if do in ("exchange", *ROUTES):
            return self.sizes.of(instruction.reads[0], self.number) + self.sizes.of(instruction.writes[0], self.number)
        if do == "all_reduce":
            return self.sizes.of(instruction.reads[0], self.number) if args["keep"] is not None else 0
        if do == "recv":
            largest: int = max((prod(part[3]) for part in args["parts"] if part[2] is not None), default=0)
            return int(largest * self.sizes.of(instruction.writes[0], self.number) // max(1, prod(args["shape"])))
        return 0
