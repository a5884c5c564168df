"""Instructions appended to the devices' lists, with their waits; tags, communicators, and messages without data."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from piperlang.core.mesh import Submesh
from piperlang.core.streams import StreamResources
from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import Graph, Node, NodeTemplate
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import along
from piperlang.plan.instructions import SYNC, Instruction, Message, Receive, Send
from piperlang.plan.plan import DevicePlan, Group


class Members(NamedTuple):
    """Of a collective."""

    devices: tuple[int, ...]
    wanted: tuple[int, ...]
    """Those of them whose instructions are wanted."""


class Emitter:
    def __init__(self, graph: Graph, only: Collection[int] | None = None) -> None:
        """`only`: the devices that instructions are wanted of, by default all."""
        self.graph = graph
        every = sorted({device for template in graph.templates for device in _devices(template)})
        every = every if only is None else [device for device in every if device in only]
        self.devices = {device: DevicePlan(device) for device in every}
        self.groups: dict[Group, int] = {}
        self.streams: dict[str, StreamResources] = {}
        self._made: dict[int, dict[ValueId, int]] = {device: {} for device in every}
        self._at: dict[int, dict[int, list[int]]] = {device: {} for device in every}
        self._tags: dict[tuple[int, int], int] = {}
        self._among: dict[Submesh, list[tuple[int, int]]] = {}
        self._devices_of: dict[tuple[Submesh, ...], tuple[int, ...]] = {}
        self._sharing: dict[tuple[int, int], bool] = {}
        self._groups: dict[tuple[Submesh, tuple[str, ...]], list[Members]] = {}
        self.before: dict[int, list[int]] = {node: list(earlier) for node, earlier in graph.after.items()}
        """Temporal edges: which nodes a node comes after."""
        for order in graph.orders:
            for earlier, later in order.fences(lambda node: graph.nodes[node].stream):
                for node in later:
                    self.before.setdefault(node, []).extend(earlier)

    def among(self, where: Submesh) -> Iterator[tuple[int, int]]:
        """Devices of a submesh whose instructions are wanted, each after its place there."""
        known = self._among.get(where)
        if known is None:
            known = [(k, device) for k, device in enumerate(devices_of(where)) if device in self.devices]
            self._among[where] = known
        return iter(known)

    def emit(
        self,
        device: int,
        node: Node,
        make: type[Instruction],
        *,
        on: str | None = None,
        way: str = "",
        after: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """`on`: another stream than the node's; `way`: the part of that stream for messages to others, or from one;
        `after`: instructions that must have ended. Returns its place."""
        plan, made = self.devices[device], self._made[device]
        whole = on or node.stream
        stream = whole + way
        if whole in self.graph.streams:
            self.streams[stream] = self.graph.streams[whole]
        instruction = make(stream, node.id, (), **fields)
        earlier = {made[key] for key in instruction.reads if key in made}
        earlier.update(after)
        at = self._at[device]
        for other in self.before.get(node.id, ()):
            if other in at:
                earlier.update(at[other])
        waits = tuple(sorted([i for i in earlier if plan.instructions[i].stream != stream]))
        index = len(plan.instructions)
        if waits:
            object.__setattr__(instruction, "waits", waits)  # nobody has seen it yet
        plan.instructions.append(instruction)
        for key in instruction.writes:
            made[key] = index
        at.setdefault(node.id, []).append(index)
        return index

    def synchronize(self, node: Node) -> None:
        """A temporal edge between nodes that share no device takes a message."""
        for other in dict.fromkeys(self.before.get(node.id, ())):
            earlier = self.graph.nodes[other]
            if self._share(node.template, earlier.template):
                continue
            here, there = self._together(node.template), self._together(earlier.template)
            pairs = zip(there, here, strict=True) if len(there) == len(here) else product(there, here)
            for source, target in pairs:
                tag = self.tag(source, target)
                if source in self.devices:
                    ended = self._at[source].get(other, ())
                    self.emit(
                        source,
                        earlier,
                        Send,
                        on=SYNC,
                        way=">",
                        after=ended,
                        value=None,
                        messages=(Message(target, tag, None, (1,)),),
                        dtype="uint8",
                    )
                if target not in self.devices:
                    continue
                index = self.emit(
                    target,
                    earlier,
                    Receive,
                    on=SYNC,
                    way=f"<{source}",
                    target=ValueId(Kind.SIGNAL, "", (other, node.id)),
                    messages=(Message(source, tag, None, (1,)),),
                    local=(),
                    shape=(1,),
                    dtype="uint8",
                )
                self._at[target].setdefault(other, []).append(index)

    def _share(self, one: NodeTemplate, other: NodeTemplate) -> bool:
        """Whether nodes of two templates share a device."""
        key = id(one), id(other)
        if key not in self._sharing:
            self._sharing[key] = not set(self._together(one)).isdisjoint(self._together(other))
        return self._sharing[key]

    def _together(self, template: NodeTemplate) -> tuple[int, ...]:
        """The devices of a node."""
        key = (template.where, *template.beyond)
        if key not in self._devices_of:
            self._devices_of[key] = _devices(template)
        return self._devices_of[key]

    def tag(self, source: int, target: int) -> int:
        """Messages between two devices are numbered in the order of the sequence."""
        tag = self._tags.get((source, target), 0)
        self._tags[source, target] = tag + 1
        return tag

    def group(self, members: Sequence[int], stream: str) -> int:
        return self.groups.setdefault(Group(tuple(members), stream), len(self.groups))

    def along(self, where: Submesh, axes: Sequence[str]) -> Sequence[Members]:
        """Groups of devices that differ only along some axes, as far as instructions of a member are wanted."""
        key = (where, tuple(axes))
        if key not in self._groups:
            devices = devices_of(where)
            every = [tuple(devices[k] for k in group) for group in along(where, axes)]
            found = [self.members(group) for group in every]
            self._groups[key] = [members for members in found if members.wanted]
        return self._groups[key]

    def members(self, group: tuple[int, ...]) -> Members:
        return Members(group, tuple(device for device in group if device in self.devices))


def _devices(template: NodeTemplate) -> tuple[int, ...]:
    return tuple(dict.fromkeys(device for where in (template.where, *template.beyond) for device in devices_of(where)))
