"""The graph as instructions for every device, taken from one sequence so that partners meet in the same order."""

from __future__ import annotations

from collections.abc import Collection

from piperlang.core.collector import uncollected
from piperlang.core.value_id import Kind
from piperlang.elaborate.directive import Written
from piperlang.ir.graph import COMPUTE, Graph, Node
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import coordinates, interval, local_box
from piperlang.plan.estimate.cost import Costs
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.instructions import Fetch, Offload
from piperlang.plan.linearize import Sequence, linearize
from piperlang.plan.lower.activations import Activations
from piperlang.plan.lower.emit import Emitter
from piperlang.plan.lower.parameters import Parameters
from piperlang.plan.plan import ParameterShard, Plan, PlanNode


def lower(graph: Graph, machine: Machine | None = None, only: Collection[int] | None = None) -> Plan:
    """`only`: a plan of these devices alone, which can be simulated, not run."""
    with uncollected():
        return _lower(graph, linearize(graph, Costs(graph, machine)), only)


def _lower(graph: Graph, sequence: Sequence, only: Collection[int] | None) -> Plan:
    emitter = Emitter(graph, only)
    lowering = _Lowering(graph, emitter)
    _keep_weights(graph, emitter)
    receivers = {node.reads[0][0]: node for node in graph.nodes if node.op == "recv"}
    early: set[int] = set()
    for i in sequence.order:
        node = graph.nodes[i]
        if i in early:
            continue
        emitter.synchronize(node)
        lowering.lower(node)
        # A receive is posted when its send is, unless an order says otherwise: then both ends have the messages of a
        # pair in the same order.
        if node.op == "send" and receivers[node.writes[0]].id not in emitter.before:
            early.add(receivers[node.writes[0]].id)
            lowering.lower(receivers[node.writes[0]])
    for device in emitter.devices.values():
        device.next = {old: new for old, new in graph.next.items() if old in device.weights}
    return Plan(
        list(emitter.devices.values()),
        lowering.activations.programs,
        _nodes(graph),
        graph.model.samples,
        graph.model.combine,
        _whole(graph, emitter),
        list(emitter.groups),
        sequence.seconds,
        streams=emitter.streams,
    )


def _whole(graph: Graph, emitter: Emitter) -> tuple[str, ...]:
    fed = dict.fromkeys(feed.name for device in emitter.devices.values() for feed in device.feeds)
    return tuple(name for name in fed if graph.model.tensors[name].batch is None)


class _Lowering:
    def __init__(self, graph: Graph, emitter: Emitter) -> None:
        self.graph, self.emitter = graph, emitter
        self.activations, self.parameters = Activations(graph, emitter), Parameters(graph, emitter)

    def lower(self, node: Node) -> None:
        activations, parameters, op = self.activations, self.parameters, node.op
        if op in COMPUTE:
            activations.compute(node)
        elif op in ("offload", "fetch"):
            self._offload(node)
        elif op == "update":
            parameters.update(node)
        elif node.writes[0] in self.graph.held:
            parameters.collective(node)
        elif op == "send":
            activations.send(node)
        elif op == "recv":
            activations.recv(node)
        elif op in ("all_reduce", "reduce_scatter"):
            activations.all_reduce(node)
        elif node.splits is not None:
            activations.route(node)
        elif op in ("all_gather", "all_to_all"):
            activations.all_to_all(node)
        else:
            activations.copy(node)

    def _offload(self, node: Node) -> None:
        move = Offload if node.op == "offload" else Fetch
        for _, device in self.emitter.among(node.template.where):
            self.emitter.emit(device, node, move, source=node.reads[0][0], target=node.writes[0])


def _keep_weights(graph: Graph, emitter: Emitter) -> None:
    for key, held in graph.held.items():
        if key.kind is not Kind.WEIGHT or key in graph.made:
            continue
        shape = graph.model.weights[held.weight].shape
        devices = devices_of(held.where)
        for k, device in emitter.among(held.where):
            at = coordinates(held.where)[k]
            emitter.devices[device].weights[key] = ParameterShard(
                held.weight,
                local_box(held, shape, at),
                interval(held, shape, at) if held.flat else None,
                device == devices[0],
            )


def _nodes(graph: Graph) -> list[PlanNode]:
    """With the directive that asked for it, or, for a pass, the step of the order that it is in."""
    steps = {
        i: step
        for order in graph.orders
        for group, step in zip(order.groups, order.written, strict=True)
        for i in group
    }
    return [
        PlanNode(str(node), _line(node.template.by or steps.get(node.id)), tuple(node.attributes().items()))
        for node in graph.nodes
    ]


def _line(written: Written | None) -> str:
    if written is None:
        return ""
    span = written.of_user(written.span)
    return f"{span.source.name}:{span.first.line}"
