"""Which chunks a script tells apart where it names communication or updates: what is for several chunks at once must
be, to every such selector, the same for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from piperlang.build.schedule import Schedule
from piperlang.build.sites import Site
from piperlang.core.selector import Conjunction, Selector
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.ir.graph import NodeTemplate, fits

OPS = ("all_reduce", "reduce_scatter", "all_gather", "update")
"""What is done with weights and their gradients."""


class ToldApart:
    def __init__(self, schedule: Schedule) -> None:
        self._conjunctions = tuple(dict.fromkeys(_naming(schedule)))
        self._known: dict[Tagset, tuple[bool, ...]] = {}

    def by(self, site: Site) -> tuple[bool, ...]:
        """By selector and kind of node, whether the script names it for this chunk."""
        if site.group not in self._known:
            templates = [NodeTemplate(op, site.chunk.tags, site.where) for op in OPS]
            self._known[site.group] = tuple(
                fits(template, conjunction) for conjunction in self._conjunctions for template in templates
            )
        return self._known[site.group]


def _naming(schedule: Schedule) -> Iterator[Conjunction]:
    """Those of all streams and orders that name communication or updates."""
    for selector in _selectors(schedule):
        for conjunction in selector.alternatives:
            if any(condition.key in ("comm", "update") for condition in conjunction):
                yield conjunction


def _selectors(schedule: Schedule) -> Iterator[Selector]:
    for stream in schedule.streams:
        yield stream.selector
    steps = {id(work.step): work.step for lane in schedule.outline.lanes.lanes for work in lane.steps}
    for step in (*steps.values(), *(step for chain in schedule.outline.chains for step in chain.steps)):
        yield from step.items
