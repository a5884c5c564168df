"""What nodes take, roughly: enough to order what a script leaves open, and to say about how long a step is.
piperlang/simulate says what it takes on a machine."""

from __future__ import annotations

from math import prod

from piperlang.ir.graph import COMPUTE, Graph, Node
from piperlang.ir.layout import axes_of
from piperlang.plan.estimate.machine import Machine


class Costs:
    """Only ratios matter for orders, so one machine does for all: the target machine of the compiler."""

    def __init__(self, graph: Graph, machine: Machine | None = None) -> None:
        self.graph, self.machine = graph, machine or Machine()
        self._known: dict[int, float] = {}

    def seconds(self, node: Node) -> float:
        """Nodes that differ only in their microbatch take the same."""
        known = self._known.get(id(node.template))
        if known is None:
            known = self._known[id(node.template)] = self._seconds(node)
        return known

    def _seconds(self, node: Node) -> float:
        template, machine = node.template, self.machine
        if template.op in COMPUTE and template.chunk is not None:
            work = self.graph.model.chunks[template.chunk].passes["F" if template.op == "R" else template.op]
            share = template.samples / self.graph.model.samples / prod(divide.size for divide in template.sharding[0])
            moved = work.moved_bytes / machine.memory_bandwidth
            return machine.launch + share * (work.flops / machine.rate("float32") + moved)
        if template.op in ("update", "slice", "concat", "share"):
            return machine.launch + self.moved(node) / machine.memory_bandwidth
        return machine.network.latency + self.moved(node) / machine.network.bandwidth

    def moved(self, node: Node) -> float:
        """Bytes that one device writes."""
        total = 0.0
        for key in node.writes:
            value, held = self.graph.values.get(key), self.graph.held.get(key)
            if value is not None:
                parts = prod(
                    size
                    for (_, size), place in zip(axes_of(value.layout.where), value.layout.placements, strict=True)
                    if place.shards
                )
                total += value.tensor.bytes(value.samples) / parts / prod(of for _, of in value.inner)
            elif held is not None:
                sizes = dict(axes_of(held.where))
                parts = prod(
                    size for (_, size), place in zip(axes_of(held.where), held.placements, strict=True) if place.shards
                )
                total += self.graph.model.weights[held.weight].bytes / parts / prod(sizes[axis] for axis in held.flat)
        return total
