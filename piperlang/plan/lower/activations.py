"""Passes of chunks, and activations that move between placements: who sends which box of its tensor to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from piperlang.core.placement import DEFERRED, dispatched
from piperlang.core.value_id import RNG, SEED, Kind, ValueId
from piperlang.ir.graph import Graph, Node, NodeTemplate, Value
from piperlang.ir.layout import Box, axes_of, devices_of
from piperlang.ir.model import Tensor
from piperlang.ir.weight_layout import coordinates
from piperlang.plan.instructions import (
    INSTRUCTIONS,
    AllReduce,
    AllToAll,
    Block,
    Combine,
    Copy,
    Dispatch,
    ExchangeSplits,
    LocalCopy,
    Message,
    Receive,
    Send,
    Shape,
    ZeroGradient,
)
from piperlang.plan.lower.emit import Emitter, Members
from piperlang.plan.plan import Feed, StageProgram
from piperlang.plan.transfer import TransferPart, local_shapes, parts, shape_of

Blocks: TypeAlias = tuple[Block, ...]
SAMPLE = Tensor("sample", ((1, 0),), "int64", 8, 0)
SUPPLIED = frozenset((SEED, RNG))
"""What the runtime supplies: each is all that a pass reads at its place."""


class _Pass(NamedTuple):
    """What the nodes of a template have in common."""

    program: int
    share: float
    """What the loss of a microbatch counts for."""
    devices: list[tuple[int, int, tuple[int, ...]]]
    """Those whose instructions are wanted: the place in the submesh, the device, its coordinates along the axes that
    shard the program."""
    batch: list[int]
    """Reads that are slices of the batch."""
    gradients: list[tuple[int, int]]
    """Reads that are gradients of outputs, and those outputs."""


class Activations:
    def __init__(self, graph: Graph, emitter: Emitter) -> None:
        self.graph, self.emitter = graph, emitter
        self.losses = frozenset(graph.losses)
        self.programs: list[StageProgram] = []
        self._passes: dict[int, _Pass] = {}
        """By template."""
        self._fed: set[tuple[int, ValueId]] = set()
        """Slices of the batch that a device is fed already."""
        self._tags: dict[tuple[ValueId, int], dict[int, int]] = {}
        self._known_blocks: dict[tuple[object, ...], tuple[Blocks, Blocks]] = {}
        self._known_groups: dict[tuple[object, ...], list[Members]] = {}
        self._known_samples: dict[tuple[object, ...], tuple[list[int], frozenset[int]]] = {}

    # ------------------------------------------------------------------------------------------------------- compute

    def compute(self, node: Node) -> None:
        template = node.template
        known = self._pass(template)
        value = self._output(node, 0)
        firsts, counted = self._samples(template, value)
        inputs = tuple([keys if SUPPLIED.isdisjoint(keys) else () for keys in node.reads])
        losses = self.losses.intersection(node.writes)
        for k, device, at in known.devices:
            self._feed(node, known.batch, device, k)
            self.emitter.emit(
                device,
                node,
                INSTRUCTIONS[template.op],
                program=known.program,
                inputs=inputs,
                outputs=node.writes,
                first_sample=value.first + firsts[k],
                coordinates=at,
                loss_share=known.share if known.gradients else None,
                zeros=self._zeros(node, known.gradients, device),
            )
            if losses and k in counted:
                self.emitter.devices[device].losses.update(dict.fromkeys(losses, known.share))

    def _pass(self, template: NodeTemplate) -> _Pass:
        if id(template) not in self._passes:
            model = self.graph.model
            at = coordinates(template.where)
            self._passes[id(template)] = _Pass(
                self._program(template),
                template.samples / model.samples if model.combine == "mean" else 1.0,
                [
                    (k, device, tuple(at[k][divide.axis] for divide in template.sharding[0]))
                    for k, device in self.emitter.among(template.where)
                ],
                [i for i, (kind, _) in enumerate(template.slots) if kind == "batch"],
                [(i, output) for i, (kind, output) in enumerate(template.slots) if kind == "grad_output"],
            )
        return self._passes[id(template)]

    def _samples(self, template: NodeTemplate, value: Value) -> tuple[list[int], frozenset[int]]:
        """By device, the first of its samples in a microbatch; and of the devices with the same ones, the first."""
        assert template.layout is not None
        key = (id(template), value.samples, value.inner)
        if key not in self._known_samples:
            boxes = template.layout.boxes(SAMPLE, 0, value.samples, value.inner)
            self._known_samples[key] = [box[0][0] for box in boxes], frozenset(template.layout.separate())
        return self._known_samples[key]

    def _output(self, node: Node, output: int) -> Value:
        name = self.graph.model.chunks[node.template.chunk or 0].outputs[output]
        return self.graph.values[ValueId(Kind.ACTIVATION, name, (), node.point)]

    def _feed(self, node: Node, batch: Sequence[int], device: int, k: int) -> None:
        """Slices of the batch that a pass reads."""
        for i in batch:
            key = node.reads[i][0]
            if (device, key) not in self._fed:
                self._fed.add((device, key))
                fed = self.graph.values[key]
                box = list(fed.layout.boxes(fed.tensor, fed.first, fed.samples, fed.inner))[k]
                self.emitter.devices[device].feeds.append(Feed(key, fed.tensor.name, box))

    def _zeros(self, node: Node, gradients: Sequence[tuple[int, int]], device: int) -> tuple[ZeroGradient, ...]:
        found = []
        for i, output in gradients:
            if not node.reads[i]:
                value = self._output(node, output)
                found.append(ZeroGradient(output, _local(value)[device], value.tensor.dtype))
        return tuple(found)

    def _program(self, template: NodeTemplate) -> int:
        assert template.chunk is not None
        model = self.graph.model
        chunk, loss = model.chunks[template.chunk], model.loss
        crossing = [("input", chunk.inputs), ("output", chunk.outputs)]
        sharded_experts = any(divide.style == "experts" for divide in template.sharding[0])
        self.programs.append(
            StageProgram(
                template.op,
                template.chunk,
                template.samples,
                template.sharding,
                tuple(template.slots),
                tuple(template.outputs),
                chunk.outputs.index(loss) if loss in chunk.outputs else None,
                chunk.dispatch is not None and sharded_experts,
                tuple(
                    (kind, i)
                    for kind, names in crossing
                    for i, name in enumerate(names)
                    if model.tensors[name].batch is None and name != loss
                ),
            )
        )
        return len(self.programs) - 1

    # ------------------------------------------------------------------------------------------------ point to point

    def send(self, node: Node) -> None:
        key, wire = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[wire]
        wanted, mine = self.emitter.devices, dict[int, list[TransferPart]]()
        for part in parts(have, want):
            if part.target != part.source and (part.source in wanted or part.target in wanted):
                tags = self._tags.setdefault((wire, part.source), {})
                tags[part.target] = self.emitter.tag(part.source, part.target)
                mine.setdefault(part.source, []).append(part)
        for _, device in self.emitter.among(node.template.where):
            shape = _local(have)[device]
            messages = tuple(
                Message(
                    part.target,
                    self._tags[wire, device][part.target],
                    _unless_whole(part.taken, shape),
                    shape_of(part.taken),
                )
                for part in mine.get(device, ())
            )
            if messages:
                self.emitter.emit(device, node, Send, way=">", value=key, messages=messages, dtype=have.tensor.dtype)

    def recv(self, node: Node) -> None:
        wire, target = node.reads[0][0], node.writes[0]
        source = self.graph.nodes[self.graph.made[wire]].reads[0][0]
        have, want = self.graph.values[source], self.graph.values[target]
        coming_to = dict[int, list[TransferPart]]()
        for part in parts(have, want):
            if part.target in self.emitter.devices:
                coming_to.setdefault(part.target, []).append(part)
        for _, device in self.emitter.among(node.template.where):
            coming = coming_to.get(device, [])
            shape = _local(want)[device]
            messages = tuple(
                Message(
                    part.source,
                    self._tags[wire, part.source][device],
                    _unless_whole(part.put, shape),
                    shape_of(part.put),
                )
                for part in coming
                if part.source != device
            )
            self.emitter.emit(
                device,
                node,
                Receive,
                way=f"<{messages[0].peer if messages else device}",
                target=target,
                messages=messages,
                local=tuple(LocalCopy(source, part.taken, part.put) for part in coming if part.source == device),
                shape=shape,
                dtype=want.tensor.dtype,
            )

    # --------------------------------------------------------------------------------------------------- collectives

    def all_reduce(self, node: Node) -> None:
        key, target = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[target]
        shapes, boxes, kept_boxes = _local(have), _boxes(have), _boxes(want)
        for members, wanted in self.emitter.along(node.template.where, node.template.axes):
            for device in wanted:
                kept = tuple(
                    (low - start, high - start)
                    for (low, high), (start, _) in zip(kept_boxes[device], boxes[device], strict=True)
                )
                self.emitter.emit(
                    device,
                    node,
                    AllReduce,
                    group=self.emitter.group(members, node.stream),
                    source=key,
                    target=target,
                    shape=shapes[device],
                    dtype=have.tensor.dtype,
                    keep=_unless_whole(kept, shapes[device]),
                )

    def all_to_all(self, node: Node) -> None:
        key, target = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[target]
        shapes = _local(want)
        groups = self._exchanging(node.template, have, want)
        if all(len(members) == 1 for members, _ in groups):
            self.copy(node)  # every device has its part already
            return
        for members, wanted in groups:
            for device in wanted:
                give, take = self._blocks(have, want, members, device)
                self.emitter.emit(
                    device,
                    node,
                    AllToAll,
                    group=self.emitter.group(members, node.stream),
                    source=key,
                    target=target,
                    give=give,
                    take=take,
                    shape=shapes[device],
                    dtype=have.tensor.dtype,
                )

    def _exchanging(self, template: NodeTemplate, have: Value, want: Value) -> Sequence[Members]:
        """Groups of devices that give each other parts: along axes, or between two views of the same devices those that
        have what others want."""
        if not template.beyond:
            return self.emitter.along(template.where, template.axes)
        key = (id(have.tensor), have.layout, want.layout, have.samples, have.inner, want.inner)
        if key not in self._known_groups:
            group = {device: {device} for device in devices_of(template.where)}
            for part in parts(have, want):
                one, other = group[part.source], group[part.target]
                if one is not other:
                    one |= other
                    group.update(dict.fromkeys(other, one))
            found = {id(members): tuple(sorted(members)) for members in group.values()}
            self._known_groups[key] = [self.emitter.members(members) for members in found.values()]
        return self._known_groups[key]

    def _blocks(self, have: Value, want: Value, members: tuple[int, ...], device: int) -> tuple[Blocks, Blocks]:
        """What a device gives to the members, and takes from them, in their order. The same for all microbatches."""
        key = (id(have.tensor), have.layout, want.layout, have.samples, have.inner, want.inner, members, device)
        if key not in self._known_blocks:
            rank = {member: k for k, member in enumerate(members)}
            moved = parts(have, want)
            give = sorted((part for part in moved if part.source == device), key=lambda part: rank[part.target])
            take = sorted((part for part in moved if part.target == device), key=lambda part: rank[part.source])
            self._known_blocks[key] = (
                tuple(Block(part.target, part.taken, shape_of(part.taken)) for part in give),
                tuple(Block(part.source, part.put, shape_of(part.put)) for part in take),
            )
        return self._known_blocks[key]

    def route(self, node: Node) -> None:
        """Tokens to their experts and back. Shapes are those of balanced experts; token counts are exchanged at run
        time."""
        (key,), (target, *made) = node.reads[0], node.writes
        have, want = self.graph.values[key], self.graph.values[target]
        choice = dispatched((*have.layout.placements, *want.layout.placements))
        assert choice is not None
        to_experts = dispatched(want.layout.placements) is not None
        make = ExchangeSplits if made else Dispatch if to_experts else Combine
        shapes = _local(want)
        for members, wanted in self.emitter.along(node.template.where, node.template.axes):
            for device in wanted:
                self.emitter.emit(
                    device,
                    node,
                    make,
                    group=self.emitter.group(members, node.stream),
                    source=key,
                    target=target,
                    splits=node.splits,
                    experts=choice.experts,
                    shape=shapes[device],
                    dtype=have.tensor.dtype,
                )

    # ---------------------------------------------------------------------------------------------------------- local

    def copy(self, node: Node) -> None:
        """Slices, concatenations, and zeros on devices that do not own a shared gradient."""
        target = node.writes[0]
        want = self.graph.values[target]
        axes = list(zip(axes_of(want.layout.where), want.layout.placements, strict=True))
        for k, device in self.emitter.among(node.template.where):
            at = coordinates(node.template.where)[k]
            zero = node.op == "share" and any(at[axis] for (axis, _), place in axes if place is DEFERRED)
            copies = tuple(
                LocalCopy(key, part.taken, part.put)
                for key in node.reads[0]
                for part in parts(self.graph.values[key], want)
                if part.source == part.target == device
            )
            self.emitter.emit(
                device,
                node,
                Copy,
                sources=node.reads[0],
                target=target,
                copies=() if zero else copies,
                shape=_local(want)[device],
                dtype=want.tensor.dtype,
            )


def _local(value: Value) -> dict[int, Shape]:
    return local_shapes(value.tensor, value.layout, value.samples, value.inner)


def _boxes(value: Value) -> dict[int, Box]:
    boxes = value.layout.boxes(value.tensor, 0, value.samples, value.inner)
    return dict(zip(devices_of(value.layout.where), boxes, strict=True))


def _unless_whole(box: Box, shape: Shape) -> Box | None:
    """A box, or None where it is all there is."""
    return None if shape_of(box) == tuple(shape) else box
