"""Estimated peak memory of a device: its instructions in order, values from when they are made to when they are
last read.

Streams that run side by side may need a little more at once, and a backend has buffers of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import Graph, WeightLayout
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import coordinates, interval
from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Compute,
    Forward,
    GatherParameters,
    InputGradient,
    Instruction,
    ParameterUpdate,
    Receive,
    Recompute,
    Routing,
    ScatterGradients,
    Send,
    ShardCollective,
    Update,
    item_bytes,
)
from piperlang.plan.plan import DevicePlan, Plan, StageProgram
from piperlang.plan.sums import ADDED, reads, sums, travels_alone
from piperlang.plan.transfer import local_shapes

ADAM = 2
"""Tensors of optimizer states for every weight, each as large as what its optimizer updates."""
WIDE = 4
"""Bytes of an element of a float32 tensor: sums of gradients are in it, and master weights."""
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


def peak(
    device: DevicePlan, plan: Plan, graph: Graph, states: float | None = None, sizes: ValueSizes | None = None
) -> Peak:
    """`states`: bytes of optimizer states for every element that the device updates, by default those of Adam. `sizes`:
    to share between devices."""
    return _Walk(device, plan, sizes or ValueSizes(plan, graph), states).peak()


def over_time(
    device: DevicePlan, plan: Plan, sizes: ValueSizes, order: Sequence[int] | None = None, states: float | None = None
) -> list[int]:
    """Bytes while each instruction runs, by its index. `order`: in which they begin, by default that of the plan."""
    walk = _Walk(device, plan, sizes, states)
    walk.peak(order)
    return walk.at_each


def peaks(plan: Plan, graph: Graph, states: float | None = None) -> list[Peak]:
    sizes = ValueSizes(plan, graph)
    return [peak(device, plan, graph, states, sizes) for device in plan.devices]


def kind_of(key: ValueId) -> str:
    return WEIGHTS if key.kind is Kind.WEIGHT else GRADIENTS if key.kind in ADDED else ACTIVATIONS


class ValueSizes:
    """Bytes of values on a device."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        self.known: dict[ValueId, int] = {}
        self.weights: dict[tuple[ValueId, int], int] = {}
        self.bundles: dict[ValueId, int] = {}
        self.scratches: dict[int, int] = {}
        """By program."""
        self.fetched: dict[ValueId, int] = {}
        """Activations that come back from the host: those share memory with nothing else."""
        for device in plan.devices:
            for instruction in device.instructions:
                if isinstance(instruction, Forward | InputGradient | Recompute):
                    self._bundle(instruction)

    def _bundle(self, instruction: Compute) -> None:
        """Activations: what the chunk was captured with, for the samples and the part of it that a device has."""
        last = instruction.writes[-1]
        if last.kind in (Kind.SAVED, Kind.RESIDUALS) and last not in self.bundles:
            program = self.plan.programs[instruction.program]
            chunk = self.graph.model.chunks[program.chunk]
            whole = chunk.saved_apart if last.kind is Kind.SAVED else chunk.kept_bytes
            self.bundles[last] = self._scaled(whole, program)
            self.fetched[last] = self._scaled(chunk.saved_bytes, program)

    def scratch(self, number: int) -> int:
        """Of a pass, beyond what it reads and writes; what it reads for the last time may be gone when it writes."""
        found = self.scratches.get(number)
        if found is None:
            program = self.plan.programs[number]
            work = self.graph.model.chunks[program.chunk].passes["F" if program.op == "R" else program.op]
            parts = prod(divide.size for divide in program.sharding[0])
            found = self.scratches[number] = max(
                (self._scaled(one.activations, program) + one.gradients // parts for one in work.scratch), default=0
            )
        return found

    def _scaled(self, whole: int, program: StageProgram) -> int:
        """For the samples and the part of a chunk that a device has."""
        parts = prod(divide.size for divide in program.sharding[0])
        return int(whole * program.samples / self.graph.model.samples / parts)

    def of(self, key: ValueId, device: int) -> int:
        """In bytes."""
        found = self.known.get(key)
        if found is None:
            held = self.graph.held.get(key)
            if held is not None:
                return self._weight(key, held, device)
            found = self.known[key] = self._value(key, device)
        return found

    def _weight(self, key: ValueId, held: WeightLayout, device: int) -> int:
        """Devices may have parts of different size."""
        found = self.weights.get((key, device))
        if found is None:
            weight = self.graph.model.weights[held.weight]
            low, high = interval(held, weight.shape, coordinates(held.where)[devices_of(held.where).index(device)])
            found = self.weights[key, device] = (high - low) * weight.itemsize
        return found

    def _value(self, key: ValueId, device: int) -> int:
        """The same on every device that has it: layouts divide evenly."""
        value = self.graph.values.get(key)
        if value is not None:
            return (
                prod(local_shapes(value.tensor, value.layout, value.samples, value.inner)[device])
                * value.tensor.itemsize
            )
        if key.source is not None:  # fetched
            return self.fetched.get(key.source, 0)
        return self.bundles.get(key, 0)  # what has been offloaded is in the host's memory


class _Walk:
    def __init__(self, device: DevicePlan, plan: Plan, sizes: ValueSizes, states: float | None) -> None:
        self.device, self.sizes, self.plan = device, sizes, plan
        self.number = device.device
        self.sums = sums(device)
        self.wide = self._wide()
        self.reads = [reads(x, self.sums) for x in device.instructions]
        self.left = Counter(key for keys in self.reads for key in keys)
        self.permanent = {*device.next.values(), *device.losses, *device.weights}
        self.now = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION), 0)
        self.live: dict[ValueId, int] = {}
        self.inside: dict[ValueId, list[ValueId]] = {}
        """Activations, and the values that they share memory with."""
        self.keeping: Counter[ValueId] = Counter()
        self.over: set[ValueId] = set()
        for key in (*device.weights, *(key for key, _, _ in device.feeds)):
            self._add(key)
        updated = [change for x in device.instructions if isinstance(x, Update) for change in x.parameters]
        self.now[OPTIMIZER] = round(sum(self._elements(change) * self._state(change, states) for change in updated))
        self.best, self.at, self.by = sum(self.now.values()), -1, dict(self.now)
        self.at_each = [0] * len(device.instructions)

    def _wide(self) -> set[ValueId]:
        """What was reduced of gradients in float32, of weights in half precision."""
        return {
            one.target
            for x in self.device.instructions
            if isinstance(x, ShardCollective)
            for one in x.shards
            if self._item(one.target) < item_bytes(x.dtype)
        }

    def _state(self, change: ParameterUpdate, states: float | None) -> float:
        """Bytes for each element; copies of weights count as states."""
        model = self.sizes.graph.model
        updated, master = self._updated(change.weight), model.has_master(model.weights[change.weight])
        copies = (WIDE if master else 0) + (updated if model.copies.averages else 0)
        return copies + (ADAM * updated if states is None else states)

    def _updated(self, name: str) -> int:
        """Bytes of an element of what an optimizer updates: the weight, or its master weight."""
        model = self.sizes.graph.model
        return WIDE if model.has_master(model.weights[name]) else model.weights[name].itemsize

    def _copied(self, change: ParameterUpdate, scaled: bool) -> int:
        """Its gradient, where that is clipped, or is in another precision than what is updated."""
        updated = self._updated(change.weight)
        item = self._gradient_item(self.sums.get(change.gradients[0], change.gradients[0]))
        return self._elements(change) * ((item if scaled else 0) + (updated if updated != item else 0))

    def _elements(self, change: ParameterUpdate) -> int:
        if change.part is not None:
            return change.part[1] - change.part[0]
        return self.sizes.of(change.old, self.number) // self._item(change.old)

    def _item(self, key: ValueId) -> int:
        return self.sizes.graph.model.weights[self.sizes.graph.held[key].weight].itemsize

    def _size(self, key: ValueId) -> int:
        """Sums are named after the first of their parts."""
        named = key.source if key.is_total and key.source is not None else key
        size = self.sizes.of(named, self.number)
        return size * self._gradient_item(key) // self._item(named) if key.is_total or key in self.wide else size

    def _gradient_item(self, key: ValueId) -> int:
        item = self._item(key.source if key.is_total and key.source is not None else key)
        return max(WIDE, item) if key.is_total or key in self.wide else item

    def _add(self, key: ValueId) -> None:
        if key not in self.live:
            self.live[key] = self._size(key)
            self.now[kind_of(key)] += self.live[key]

    def _end(self, key: ValueId) -> None:
        if key not in self.live or key in self.permanent:
            return
        if self.keeping[key]:
            self.over.add(key)  # no instruction reads it, but activations share its memory
            return
        self.now[kind_of(key)] -= self.live.pop(key)
        for value in self.inside.pop(key, ()):
            self.keeping[value] -= 1
            if value in self.over and not self.keeping[value]:
                self.over.discard(value)
                self._end(value)

    def _lie_in(self, instruction: Compute) -> None:
        """Activations that a forward saves may share memory with its inputs and outputs."""
        program = self.plan.programs[instruction.program]
        chunk = self.sizes.graph.model.chunks[program.chunk]
        bundle = instruction.outputs[-1]
        if instruction.op not in ("F", "R") or bundle.kind is not Kind.SAVED:
            return
        given = {slot: keys[0] for slot, keys in zip(program.inputs, instruction.inputs, strict=True) if keys}
        made = instruction.op == "F"
        gave = dict(zip(program.outputs, instruction.outputs, strict=False)) if made else {}
        for slot in chunk.saved_in:
            key = given.get(slot) or gave.get(slot)
            if not made and slot[0] == "output":
                # Made again only for the activations that are views of it.
                output = ValueId(Kind.ACTIVATION, chunk.outputs[slot[1]], (), bundle.microbatch)
                again = self.sizes.of(output, self.number)
                self.live[bundle] += again
                self.now[ACTIVATIONS] += again
            elif key is not None:
                self._add(key)
                self.inside.setdefault(bundle, []).append(key)
                self.keeping[key] += 1

    def peak(self, order: Sequence[int] | None = None) -> Peak:
        sent = 0
        again = set(self.device.next.values())
        for i in order if order is not None else range(len(self.device.instructions)):
            instruction = self.device.instructions[i]
            if isinstance(instruction, Send):
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
                if instruction.op != "update" and key not in again and (total in self.left or total in self.permanent):
                    self._add(total)
            if isinstance(instruction, Compute) and instruction.outputs[-1] in self.live:
                self._lie_in(instruction)
            kind = ACTIVATIONS if isinstance(instruction, Compute) else COMMUNICATION
            self._look(i, {GRADIENTS: fresh, kind: self._buffers(instruction)})
            for key in self.reads[i]:
                self.left[key] -= 1
                if not self.left[key]:
                    self._end(key)
            if isinstance(instruction, Send) and instruction.value is not None and instruction.value not in self.live:
                # Until the receiver has it, as far as it is no copy.
                whole = any(one.box is None for one in instruction.messages)
                kept = self.sizes.of(instruction.value, self.number) if whole else 0
                self.now[COMMUNICATION] += kept
                sent += kept
        return Peak(self.best, self.at, self.by)

    def _look(self, i: int, more: Mapping[str, int]) -> None:
        total = self.at_each[i] = sum(self.now.values()) + sum(more.values())
        if total > self.best:
            self.best, self.at, self.by = total, i, {name: size + more.get(name, 0) for name, size in self.now.items()}

    def _sent(self, send: Send) -> int:
        """What is cut out of a value is a copy."""
        if send.value is None:
            return len(send.messages)
        whole, elements = self.sizes.of(send.value, self.number), prod(self._shape(send.value)) or 1
        return sum(whole * prod(one.shape) // elements for one in send.messages if one.box is not None)

    def _shape(self, key: ValueId) -> tuple[int, ...]:
        value = self.sizes.graph.values[key]
        return local_shapes(value.tensor, value.layout, value.samples, value.inner)[self.number]

    def _buffers(self, instruction: Instruction) -> int:
        """What an instruction needs only while it runs."""
        of = self.sizes.of
        match instruction:
            case Compute(program=program):
                return self.sizes.scratch(program)
            case GatherParameters(shards=shards) | ScatterGradients(shards=shards):
                together = sum(prod(one.shape) for one in shards if not travels_alone(one))
                target = shards[0].target
                copied = together * (self._gradient_item(target) if target.kind in ADDED else self._item(target))
                return copied + copied // (len(shards[0].cuts) or 1)
            case Update(parameters=parameters, scale=scale):
                return sum(self._copied(change, scale is not None) for change in parameters)
            case AllToAll(give=give, take=take, dtype=dtype):
                return sum(prod(one.shape) for one in (*give, *take)) * item_bytes(dtype)
            case Routing(source=source, target=target):
                return of(source, self.number) + of(target, self.number)
            case AllReduce(source=source, keep=keep):
                return of(source, self.number) if keep is not None else 0
            case Receive(target=target, messages=messages, shape=shape):
                largest = max((prod(one.shape) for one in messages if one.box is not None), default=0)
                return largest * of(target, self.number) // max(1, prod(shape))
        return 0
