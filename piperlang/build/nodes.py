"""The graph while it is being built."""

from __future__ import annotations

from piperlang.build.schedule import Schedule
from piperlang.core.selector import Condition
from piperlang.core.value_id import Point, ValueId
from piperlang.ir.graph import Node, NodeTemplate, Value, WeightLayout, fits

_STREAMS = {
    "F": "compute",
    "B": "compute",
    "I": "compute",
    "W": "compute",
    "R": "compute",
    "update": "compute",
    "offload": "host",
    "fetch": "host",
}


class Nodes:
    def __init__(self, schedule: Schedule) -> None:
        self.rules = schedule.streams
        self.nodes: list[Node] = []
        self.templates: list[NodeTemplate] = []
        self.values: dict[ValueId, Value] = {}
        self.held: dict[ValueId, WeightLayout] = {}
        self.made: dict[ValueId, int] = {}
        self.after: dict[int, list[int]] = {}
        self._stream: dict[int, tuple[str, list[tuple[list[tuple[int, Condition]], str]]]] = {}

    def template(self, template: NodeTemplate) -> NodeTemplate:
        self.templates.append(template)
        default = _STREAMS.get(template.op, "comm")
        picky: list[tuple[list[tuple[int, Condition]], str]] = []
        for rule in self.rules:
            for conjunction in rule.selector.alternatives:
                if not fits(template, conjunction):
                    continue
                about = [(template.dims.index(c.key), c) for c in conjunction if c.key in template.dims]
                if about:
                    picky.append((about, rule.stream))
                else:
                    default, picky = rule.stream, []  # the last directive that names a node holds
        self._stream[id(template)] = (default, picky)
        return template

    def add(
        self, template: NodeTemplate, point: Point, reads: tuple[tuple[ValueId, ...], ...], writes: tuple[ValueId, ...]
    ) -> int:
        number = len(self.nodes)
        stream, picky = self._stream[id(template)]
        for about, name in picky:
            if all(c.holds({c.key: point[i]}) for i, c in about):
                stream = name
        self.nodes.append(Node(number, template, point, reads, writes, stream))
        template.points[point] = number
        for key in writes:
            self.made[key] = number
        return number

    def before(self, node: int, earlier: int) -> None:
        """A temporal edge: `earlier` ends before `node` starts."""
        self.after.setdefault(node, []).append(earlier)
