"""The graph as instructions for every device, taken from one sequence so that partners meet in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from piperlang.diagnostics import error
from piperlang.elaborate.values import Slice
from piperlang.ir.graph import COMPUTE, Family, Graph, Held, Key, Node
from piperlang.ir.held import along, coordinates, dividing, interval, local_box, local_shape
from piperlang.ir.layout import axes_of, devices_of
from piperlang.ir.model import Tensor, choice_of
from piperlang.plan.cost import Costs, Machine
from piperlang.plan.instruction import SYNC, DevicePlan, Instruction, Plan
from piperlang.plan.linearize import linearize
from piperlang.plan.transfer import Part, local_shapes, parts, shape_of

SAMPLE = Tensor("sample", ((1, 0),), "int64", 8, 0)
GIVEN = ("seed", "rng")


def lower(graph: Graph, machine: Machine | None = None) -> Plan:
    return _Lowering(graph, machine).plan()


class _Lowering:
    def __init__(self, graph: Graph, machine: Machine | None) -> None:
        self.graph = graph
        self.sequence = linearize(graph, Costs(graph, machine))
        every = sorted(
            {
                device
                for family in graph.families
                for where in (family.where, *family.beyond)
                for device in devices_of(where)
            }
        )
        self.devices = {device: DevicePlan(device) for device in every}
        self.made: dict[int, dict[Key, int]] = {device: {} for device in every}
        self.at: dict[int, dict[int, list[int]]] = {device: {} for device in every}
        self.kinds: dict[int, int] = {}
        self.kind_list: list[dict[str, Any]] = []
        self.groups: dict[tuple[tuple[int, ...], str], int] = {}
        self.tags: dict[tuple[int, int], int] = {}
        self._numbers: dict[tuple[Key, int], dict[int, int]] = {}
        self.before: dict[int, list[int]] = {node: list(earlier) for node, earlier in graph.after.items()}
        for order in graph.orders:
            for earlier, later in order.fences(lambda node: graph.nodes[node].stream):
                for node in later:
                    self.before.setdefault(node, []).extend(earlier)

    def plan(self) -> Plan:
        graph = self.graph
        self._keep_weights()
        receivers = {node.reads[0][0]: node for node in graph.nodes if node.op == "recv"}
        early: set[int] = set()
        for i in self.sequence.order:
            node = graph.nodes[i]
            if i in early:
                continue
            self._after_others(node)
            self._lower(node)
            # A receive is posted when its send is, unless an order says otherwise: then both ends have the messages of
            # a pair in the same order.
            if node.op == "send" and receivers[node.writes[0]].id not in self.before:
                early.add(receivers[node.writes[0]].id)
                self._lower(receivers[node.writes[0]])
        for device in self.devices.values():
            device.next = {old: new for old, new in graph.next.items() if old in device.weights}
        names = [str(node) for node in graph.nodes]
        lines = [_line(node.family) for node in graph.nodes]
        return Plan(
            list(self.devices.values()),
            self.kind_list,
            names,
            lines,
            graph.model.samples,
            graph.model.combine,
            list(self.groups),
            self.sequence.seconds,
        )

    def _keep_weights(self) -> None:
        for key, held in self.graph.held.items():
            if not key.startswith("w:") or key in self.graph.made:
                continue
            shape = self.graph.model.weights[held.weight].shape
            for device, at in zip(devices_of(held.where), coordinates(held.where), strict=True):
                self.devices[device].weights[key] = {
                    "weight": held.weight,
                    "box": local_box(held, shape, at),
                    "flat": interval(held, shape, at) if held.flat else None,
                    "first": device == devices_of(held.where)[0],
                }

    # ------------------------------------------------------------------------------------------------- emitting

    def _emit(
        self,
        device: int,
        do: str,
        node: Node,
        reads: Sequence[Key],
        writes: Sequence[Key],
        args: dict[str, Any],
        stream: str | None = None,
        more: Sequence[int] = (),
    ) -> int:
        plan, made = self.devices[device], self.made[device]
        stream = stream or node.stream
        earlier = {made[key] for key in reads if key in made} | set(more)
        earlier |= {i for other in self.before.get(node.id, ()) for i in self.at[device].get(other, ())}
        waits = tuple(sorted(i for i in earlier if plan.instructions[i].stream != stream))
        index = len(plan.instructions)
        plan.instructions.append(
            Instruction(
                do, stream, node.id, tuple(key for key in reads if key not in GIVEN), tuple(writes), waits, args
            )
        )
        for key in writes:
            made[key] = index
        self.at[device].setdefault(node.id, []).append(index)
        return index

    def _after_others(self, node: Node) -> None:
        """A temporal edge between nodes that share no device takes a message."""
        here = _devices(node.family)
        for other in dict.fromkeys(self.before.get(node.id, ())):
            earlier = self.graph.nodes[other]
            there = _devices(earlier.family)
            if set(here) & set(there):
                continue
            pairs = zip(there, here, strict=True) if len(there) == len(here) else product(there, here)
            for source, target in pairs:
                tag = self._tag(source, target)
                key = f"now:{other}>{node.id}"
                part = {"shape": (1,), "dtype": "uint8"}
                self._emit(
                    source,
                    "send",
                    earlier,
                    (),
                    (),
                    {"parts": [(target, tag, None, (1,))], "key": None, "dtype": "uint8"},
                    f"{SYNC}>",
                    self.at[source].get(other, ()),
                )
                index = self._emit(
                    target,
                    "recv",
                    earlier,
                    (),
                    (key,),
                    {"parts": [(source, tag, None, (1,))], "own": [], **part},
                    f"{SYNC}<{source}",
                )
                self.at[target].setdefault(other, []).append(index)

    def _tag(self, source: int, target: int) -> int:
        """Messages between two devices are numbered in the order of the sequence."""
        tag = self.tags.get((source, target), 0)
        self.tags[source, target] = tag + 1
        return tag

    def _group(self, members: Sequence[int], stream: str) -> int:
        return self.groups.setdefault((tuple(members), stream), len(self.groups))

    # ------------------------------------------------------------------------------------------------ by kind

    def _lower(self, node: Node) -> None:
        op = node.op
        if op in COMPUTE:
            self._compute(node)
        elif op in ("offload", "fetch"):
            for device in devices_of(node.family.where):
                self._emit(device, op, node, node.reads[0], node.writes, {})
        elif op == "update":
            self._update(node)
        elif node.writes[0] in self.graph.held:
            self._weights(node)
        elif op == "send":
            self._send(node)
        elif op == "recv":
            self._recv(node)
        elif op == "all_reduce" or op == "reduce_scatter":
            self._all_reduce(node)
        elif node.routes is not None:
            self._route(node)
        elif op in ("all_gather", "all_to_all"):
            self._exchange(node)
        else:
            self._local(node)

    def _compute(self, node: Node) -> None:
        family, graph = node.family, self.graph
        assert family.layout is not None
        assert family.chunk is not None
        chunk = graph.model.chunks[family.chunk]
        value = graph.values[f"{chunk.outputs[0]}#{'.'.join(map(str, node.point))}"]
        firsts = [box[0][0] for box in family.layout.boxes(SAMPLE, value.first, value.samples, value.inner)]
        counted = set(family.layout.separate())
        share = family.samples / graph.model.samples if graph.model.combine == "mean" else 1.0
        for k, device in enumerate(devices_of(family.where)):
            at = coordinates(family.where)[k]
            args: dict[str, Any] = {
                "kind": self._kind(family),
                "reads": node.reads,
                "first": firsts[k],
                "at": [at[divide.axis] for divide in family.arranged[0]],
            }
            for slot, keys in zip(family.slots, node.reads, strict=True):
                if slot[0] == "batch":
                    fed = graph.values[keys[0]]
                    box = list(fed.layout.boxes(fed.tensor, fed.first, fed.samples, fed.inner))[k]
                    if all(known != keys[0] for known, _, _ in self.devices[device].feeds):
                        self.devices[device].feeds.append((keys[0], fed.tensor.name, box))
                if slot[0] == "grad_output":
                    args["share"] = share
                    if not keys:
                        args.setdefault("zeros", {})[slot[1]] = self._zeros(node, slot[1], device)
            self._emit(device, family.op, node, [key for keys in node.reads for key in keys], node.writes, args)
            for key in set(node.writes) & set(graph.losses):
                if k in counted:
                    self.devices[device].losses[key] = share

    def _zeros(self, node: Node, output: int, device: int) -> tuple[tuple[int, ...], str]:
        """The gradient of an output that nobody differentiates through."""
        name = self.graph.model.chunks[node.family.chunk or 0].outputs[output]
        value = self.graph.values[f"{name}#{'.'.join(map(str, node.point))}"]
        return local_shapes(value.tensor, value.layout, value.samples, value.inner)[device], value.tensor.dtype

    def _kind(self, family: Family) -> int:
        if id(family) not in self.kinds:
            self.kinds[id(family)] = len(self.kind_list)
            chunk = self.graph.model.chunks[family.chunk or 0]
            loss = chunk.outputs.index(self.graph.model.loss) if self.graph.model.loss in chunk.outputs else None
            self.kind_list.append(
                {
                    "op": family.op,
                    "chunk": family.chunk,
                    "samples": family.samples,
                    "arranged": family.arranged,
                    "slots": family.slots,
                    "gives": family.gives,
                    "loss": loss,
                    "routed": (
                        chunk.choice is not None and any(divide.style == "experts" for divide in family.arranged[0])
                    ),
                }
            )
        return self.kinds[id(family)]

    def _send(self, node: Node) -> None:
        key, target = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[target]
        moved = parts(have, want)
        for device in devices_of(node.family.where):
            mine = [part for part in moved if part.source == device and part.target != device]
            pieces = [
                (
                    part.target,
                    self._tag(device, part.target),
                    _whole(part.taken, local_shapes(have.tensor, have.layout, have.samples, have.inner)[device]),
                    shape_of(part.taken),
                )
                for part in mine
            ]
            self._numbers[node.writes[0], device] = {
                part.target: tag for part, (_, tag, _, _) in zip(mine, pieces, strict=True)
            }
            if pieces:
                self._emit(
                    device,
                    "send",
                    node,
                    [key],
                    (),
                    {"parts": pieces, "key": key, "dtype": have.tensor.dtype},
                    f"{node.stream}>",
                )

    def _recv(self, node: Node) -> None:
        wire, target = node.reads[0][0], node.writes[0]
        sender = self.graph.nodes[self.graph.made[wire]]
        source = sender.reads[0][0]
        have, want = self.graph.values[source], self.graph.values[target]
        moved = parts(have, want)
        for device in devices_of(node.family.where):
            coming = [part for part in moved if part.target == device]
            shape = local_shapes(want.tensor, want.layout, want.samples, want.inner)[device]
            pieces = [
                (part.source, self._numbers[wire, part.source][device], _whole(part.put, shape), shape_of(part.put))
                for part in coming
                if part.source != device
            ]
            own = [(source, part.taken, part.put) for part in coming if part.source == device]
            self._emit(
                device,
                "recv",
                node,
                [source] if own else [],
                [target],
                {"parts": pieces, "own": own, "shape": shape, "dtype": want.tensor.dtype},
                f"{node.stream}<{pieces[0][0] if pieces else device}",
            )

    def _all_reduce(self, node: Node) -> None:
        key, target = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[target]
        shapes = local_shapes(have.tensor, have.layout, have.samples, have.inner)
        boxes = dict(
            zip(devices_of(have.layout.where), have.layout.boxes(have.tensor, 0, have.samples, have.inner), strict=True)
        )
        wanted = dict(
            zip(devices_of(want.layout.where), want.layout.boxes(want.tensor, 0, want.samples, want.inner), strict=True)
        )
        for members in self._along(node.family.where, node.family.axes):
            for device in members:
                kept = tuple(
                    (low - a, high - a) for (low, high), (a, _) in zip(wanted[device], boxes[device], strict=True)
                )
                args = {
                    "group": self._group(members, node.stream),
                    "shape": shapes[device],
                    "dtype": have.tensor.dtype,
                    "reduce": "sum",
                    "keep": None if shape_of(kept) == shapes[device] else kept,
                }
                self._emit(device, "all_reduce", node, [key], [target], args)

    def _exchange(self, node: Node) -> None:
        key, target = node.reads[0][0], node.writes[0]
        have, want = self.graph.values[key], self.graph.values[target]
        moved = parts(have, want)
        given: dict[int, list[Part]] = {}
        taken: dict[int, list[Part]] = {}
        for part in moved:
            given.setdefault(part.source, []).append(part)
            taken.setdefault(part.target, []).append(part)
        shapes = local_shapes(want.tensor, want.layout, want.samples, want.inner)
        for members in self._along(node.family.where, node.family.axes):
            for device in members:
                give = [
                    (p.target, p.taken, shape_of(p.taken))
                    for p in sorted(given.get(device, ()), key=lambda p: members.index(p.target))
                ]
                take = [
                    (p.source, p.put, shape_of(p.put))
                    for p in sorted(taken.get(device, ()), key=lambda p: members.index(p.source))
                ]
                args = {
                    "group": self._group(members, node.stream),
                    "members": members,
                    "give": give,
                    "take": take,
                    "shape": shapes[device],
                    "dtype": have.tensor.dtype,
                }
                self._emit(device, "exchange", node, [key], [target], args)

    def _route(self, node: Node) -> None:
        """Rows to their experts and back. Shapes are those of experts that are all chosen alike; how many rows there
        are is seen when they go."""
        (key,), (target, *_) = node.reads[0], node.writes
        have, want = self.graph.values[key], self.graph.values[target]
        choice = choice_of((*have.layout.places, *want.layout.places))
        assert choice is not None
        there = choice_of(want.layout.places) is not None
        do = "choose" if node.routes == "choose" else "dispatch" if there else "combine"
        shapes = local_shapes(want.tensor, want.layout, want.samples, want.inner)
        for members in self._along(node.family.where, node.family.axes):
            for device in members:
                args = {
                    "group": self._group(members, node.stream),
                    "members": members,
                    "experts": choice.experts,
                    "shape": shapes[device],
                    "dtype": have.tensor.dtype,
                }
                self._emit(device, do, node, [key for keys in node.reads for key in keys], node.writes, args)

    def _along(self, where: Slice, axes: Sequence[str]) -> Iterator[list[int]]:
        """Groups of devices that differ only along some axes."""
        devices = devices_of(where)
        yield from ([devices[k] for k in group] for group in along(where, axes))

    def _local(self, node: Node) -> None:
        target = node.writes[0]
        want = self.graph.values[target]
        shapes = local_shapes(want.tensor, want.layout, want.samples, want.inner)
        for k, device in enumerate(devices_of(node.family.where)):
            own = [
                (key, part.taken, part.put)
                for key in node.reads[0]
                for part in parts(self.graph.values[key], want)
                if part.source == part.target == device
            ]
            at = coordinates(node.family.where)[k]
            zero = node.op == "share" and any(
                at[axis]
                for (axis, _), place in zip(axes_of(want.layout.where), want.layout.places, strict=True)
                if place == "share"
            )
            self._emit(
                device,
                "copy",
                node,
                node.reads[0],
                [target],
                {"own": [] if zero else own, "shape": shapes[device], "dtype": want.tensor.dtype},
            )

    # ------------------------------------------------------------------------------------------------ weights

    def _weights(self, node: Node) -> None:
        if node.family.beyond:
            self._across(node)
            return
        axes, where = node.family.axes, node.family.where
        places = dict(zip(devices_of(where), coordinates(where), strict=True))
        for members in self._along(where, axes):
            first = self.graph.held[node.writes[0]] if node.op != "all_gather" else self.graph.held[node.reads[0][0]]
            ordered = sorted(
                members, key=lambda device: [places[device][axis] for axis in first.flat if axis in axes] or [0]
            )
            group = self._group(ordered, node.stream)
            for device in ordered:
                entries = [
                    self._entry(keys, target, ordered, places, device)
                    for keys, target in zip(node.reads, node.writes, strict=True)
                ]
                do = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce"}[node.op]
                dtype = self.graph.model.weights[self.graph.held[node.writes[0]].weight].dtype
                self._emit(
                    device,
                    do,
                    node,
                    [key for keys in node.reads for key in keys],
                    node.writes,
                    {"group": group, "members": ordered, "weights": entries, "dtype": dtype, "reduce": "sum"},
                )

    def _entry(
        self, keys: Sequence[Key], target: Key, members: Sequence[int], places: Any, device: int
    ) -> dict[str, Any]:
        have, want = self.graph.held[keys[0]], self.graph.held[target]
        shape = self.graph.model.weights[have.weight].shape
        finer = have if len(have.flat) > len(want.flat) else want
        coarse = want if finer is have else have
        start = interval(coarse, shape, places[device])[0]
        cuts = [tuple(x - start for x in interval(finer, shape, places[member])) for member in members]
        whole = local_shape(have, shape, places[device])
        size = interval(coarse, shape, places[device])
        return {
            "from": tuple(keys),
            "to": target,
            "cuts": cuts,
            "shape": whole if not coarse.flat else (size[1] - size[0],),
        }

    def _across(self, node: Node) -> None:
        """Parts of a mesh that keep the same weight: all devices with the same part of it, each counting for its share
        of its home."""
        wheres = (node.family.where, *node.family.beyond)
        count = len(wheres)
        held = [self.graph.held[key] for key in node.writes[:count]]
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for home, (one, where) in enumerate(zip(held, wheres, strict=True)):
            for device, at in zip(devices_of(where), coordinates(where), strict=True):
                groups.setdefault(tuple(at[axis] for axis in dividing(one)), []).append((home, device))
        for members in groups.values():
            if len({device for _, device in members}) < len(members):
                raise error(
                    "P0414",
                    f"weight {held[0].weight} would be kept twice on one device",
                    notes=[f"on {wheres[0]} and on {wheres[1]}"],
                    help="place both ends of tied weights on the same devices, or on different ones",
                )
            group = self._group([device for _, device in members], node.stream)
            for home, device in members:
                alike = sum(1 for other, _ in members if other == home)
                at = coordinates(wheres[home])[devices_of(wheres[home]).index(device)]
                entries: list[dict[str, Any]] = []
                reads: list[Key] = []
                writes: list[Key] = []
                for w in range(len(node.writes) // count):
                    keys, target = node.reads[w * count + home], node.writes[w * count + home]
                    one = self.graph.held[target]
                    shape = self.graph.model.weights[one.weight].shape
                    low, high = interval(one, shape, at)
                    entries.append(
                        {
                            "from": tuple(keys),
                            "to": target,
                            "cuts": [],
                            "shape": (high - low,) if one.flat else local_shape(one, shape, at),
                        }
                    )
                    reads += keys
                    writes.append(target)
                dtype = self.graph.model.weights[held[0].weight].dtype
                self._emit(
                    device,
                    "reduce",
                    node,
                    reads,
                    writes,
                    {"group": group, "weights": entries, "dtype": dtype, "reduce": "sum", "share": 1 / alike},
                )

    def _update(self, node: Node) -> None:
        where = node.family.where
        for device, at in zip(devices_of(where), coordinates(where), strict=True):
            entries = []
            for w, new in enumerate(node.writes):
                (old,), grads = node.reads[2 * w], node.reads[2 * w + 1]
                have, want, grad = self.graph.held[old], self.graph.held[new], self.graph.held[grads[0]]
                entries.append(
                    {
                        "weight": have.weight,
                        "old": old,
                        "grads": tuple(grads),
                        "new": new,
                        "take": self._cut(have, want, at),
                        "take_grad": self._cut(grad, want, at),
                        "partial": bool(dividing(want)),
                    }
                )
            self._emit(
                device, "update", node, [key for keys in node.reads for key in keys], node.writes, {"weights": entries}
            )

    def _cut(self, have: Held, want: Held, at: Any) -> tuple[int, int] | None:
        """Of what a device has, the interval that an update of its part needs; None for all of it."""
        if have.flat == want.flat:
            return None
        shape = self.graph.model.weights[have.weight].shape
        start = interval(have, shape, at)[0]
        low, high = interval(want, shape, at)
        return low - start, high - start


def _devices(family: Family) -> tuple[int, ...]:
    return tuple(device for where in (family.where, *family.beyond) for device in devices_of(where))


def _whole(box: Any, shape: tuple[int, ...]) -> Any:
    """A box, or None where it is all there is."""
    return None if shape_of(box) == tuple(shape) else box


def _line(family: Family) -> str:
    if family.by is None:
        return ""
    span = family.by.span
    return f"{span.source.name}:{span.first.line}"
