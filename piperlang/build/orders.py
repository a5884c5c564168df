"""Orders in the graph: steps on devices, and chains that relate nodes wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

from piperlang.build.nodes import Nodes
from piperlang.build.schedule import Schedule
from piperlang.core.selector import Conjunction, Selector
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.lanes import Item, Lane, Work
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.ir.graph import COMPUTE, NodeTemplate, Steps, among, fits
from piperlang.ir.layout import devices_of


class Temporal:
    def __init__(self, schedule: Schedule, nodes: Nodes) -> None:
        self.schedule, self.nodes = schedule, nodes
        self._compute: dict[tuple[Tagset, str], list[NodeTemplate]] = {}
        for template in nodes.templates:
            if template.op in COMPUTE:
                self._compute.setdefault((frozenset(template.tags.items()), template.op), []).append(template)

    def orders(self) -> list[Steps]:
        return [self._steps(lane) for lane in self.schedule.outline.lanes.lanes]

    def _steps(self, lane: Lane) -> Steps:
        groups: list[list[int]] = []
        written = []
        taken: set[int] = set()
        for work in lane.steps:
            found = [node for item in work.items for node in self._nodes(lane, work, item, taken)]
            if found:
                groups.append(found)
                written.append(work.step)
        return Steps(lane.devices, groups, written)

    def _nodes(self, lane: Lane, work: Work, item: Item, taken: set[int]) -> Iterator[int]:
        if "comm" in item or "update" in item:
            yield from self._others(lane, work, item, taken)
            return
        tagset, point = self.schedule.which(item)
        for template in self._compute.get((tagset, str(item["pass"])), ()):
            # A half that a chunk does not have (no input wants a gradient, no weight learns) is no work.
            number = template.points.get(point)
            if number is not None:
                yield number

    def _others(self, lane: Lane, work: Work, item: Item, taken: set[int]) -> Iterator[int]:
        """Communication and updates on these devices; `next` is the lowest microbatch of each kind not ordered here
        yet."""
        for conjunction in _conjunctions(work, item):
            choosing = next((c.key for c in conjunction if c.test in ("next", "next?")), None)
            for template in self.nodes.templates:
                if not fits(template, conjunction) or lane.devices.isdisjoint(devices_of(template.where)):
                    continue
                found = sorted({number for number in among(template, conjunction) if number not in taken})
                for number in found[:1] if choosing else found:
                    taken.add(number)
                    yield number

    def chains(self) -> list[Steps]:
        """`order A -> B -> C & D`: every node of a step after every node of the step before."""
        found: list[Steps] = []
        for chain in self.schedule.outline.chains:
            groups: list[list[int]] = [[]]
            for step in chain.steps:
                now = [number for selector in step.items for number in self._select(selector)]
                for node in now:
                    for earlier in groups[-1]:
                        if node == earlier:
                            raise _itself(str(self.nodes.nodes[node]), step.items[0])
                        self.nodes.before(node, earlier)
                groups.append(now)
            found.append(Steps(frozenset(), groups[1:], chain.steps))
        return found

    def _select(self, selector: Selector) -> Iterator[int]:
        seen: set[int] = set()
        for conjunction in selector.alternatives:
            for template in self.nodes.templates:
                if fits(template, conjunction):
                    for number in among(template, conjunction):
                        if number not in seen:
                            seen.add(number)
                            yield number


def _conjunctions(work: Work, item: Item) -> Iterator[Conjunction]:
    """The selectors behind an item that was kept as written."""
    for selector in work.step.items:
        for conjunction in selector.alternatives:
            keys = {c.key for c in conjunction}
            if keys == set(item) and ("comm" in keys or "update" in keys):
                yield conjunction


def _itself(what: str, selector: Selector) -> PiperError:
    return error(
        "P0501",
        f"{what} would have to run before itself",
        selector.span,
        "also in the step before",
        help="name different nodes in the steps of an order",
    )
