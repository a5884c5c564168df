"""The graph while it is being built."""

from __future__ import annotations

from piperlang.elaborate.selector import Condition
from piperlang.ir.graph import Family, Held, Key, Node, Value, fits
from piperlang.passes.schedule import Schedule
from piperlang.passes.sites import Point

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
        self.families: list[Family] = []
        self.values: dict[Key, Value] = {}
        self.held: dict[Key, Held] = {}
        self.made: dict[Key, int] = {}
        self.after: dict[int, list[int]] = {}
        self._stream: dict[int, tuple[str, list[tuple[list[tuple[int, Condition]], str]]]] = {}

    def family(self, family: Family) -> Family:
        self.families.append(family)
        default = _STREAMS.get(family.op, "comm")
        picky: list[tuple[list[tuple[int, Condition]], str]] = []
        for rule in self.rules:
            for conjunction in rule.selector.alternatives:
                if not fits(family, conjunction):
                    continue
                about = [(family.dims.index(c.key), c) for c in conjunction if c.key in family.dims]
                if about:
                    picky.append((about, rule.stream))
                else:
                    default, picky = rule.stream, []  # the last directive that names a node holds
        self._stream[id(family)] = (default, picky)
        return family

    def add(self, family: Family, point: Point, reads: tuple[tuple[Key, ...], ...], writes: tuple[Key, ...]) -> int:
        number = len(self.nodes)
        stream, picky = self._stream[id(family)]
        for about, name in picky:
            if all(c.holds({c.key: point[i]}) for i, c in about):
                stream = name
        self.nodes.append(Node(number, family, point, reads, writes, stream))
        family.points[point] = number
        for key in writes:
            self.made[key] = number
        return number

    def before(self, node: int, earlier: int) -> None:
        """A temporal edge: `earlier` ends before `node` starts."""
        self.after.setdefault(node, []).append(earlier)
