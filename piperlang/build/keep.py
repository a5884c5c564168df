"""Which passes share one all-gather of weights that ZeRO keeps in parts: the option `keep` of `replicate`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from piperlang.build.schedule import Keep, Schedule
from piperlang.build.sites import Site, Sites
from piperlang.core.value_id import Point
from piperlang.elaborate.lanes import Lane, Work
from piperlang.ir.layout import devices_of

Pass: TypeAlias = tuple[int, str, Point]
"""A chunk, F, B, I, W or R, and a microbatch."""


@dataclass(eq=False)
class Run:
    """Passes of a chunk that share a gather, which is named after the first of them."""

    passes: list[Pass] = field(default_factory=list)
    programs: set[str] = field(default_factory=set)
    """The passes of the chunk whose weights are gathered."""

    @property
    def phase(self) -> str:
        return self.passes[0][1]

    @property
    def point(self) -> Point:
        return self.passes[0][2]


class Runs:
    def __init__(self, schedule: Schedule, sites: Sites) -> None:
        self.schedule, self.sites = schedule, sites
        self._of: dict[Pass, Run] = {}
        every = [site for of_chunk in sites.of for site in of_chunk]
        if not sites.sketch and any(_keep(site) is not Keep.PASS for site in every):
            self._join_neighbours()

    def of(self, site: Site, phase: str, point: Point) -> Run:
        if phase == "R" and _keep(site) is not Keep.PASS:
            phase = self._first_half(site, point)
        one = (site.chunk.number, phase, point)
        if one not in self._of:
            self._add(Run(), site, one)
        return self._of[one]

    def _add(self, run: Run, site: Site, one: Pass) -> None:
        self._of[one] = run
        run.passes.append(one)
        run.programs.update(self._programs(site, one[1], one[2]))

    def _programs(self, site: Site, phase: str, point: Point) -> tuple[str, ...]:
        """The passes of the chunk whose weights are gathered for this one: a forward that is recomputed reads what is
        gathered for its backward."""
        if phase == "R":
            return ("F",)
        again = site.group in self.schedule.recomputed and phase != "F" and _keep(site) is not Keep.PASS
        return ("F", phase) if again and phase == self._first_half(site, point) else (phase,)

    def _first_half(self, site: Site, point: Point) -> str:
        return next(op for op in self.schedule.halves(site.group, point) if op in site.chunk.passes)

    def _join_neighbours(self) -> None:
        """A pass shares the gather of the one before it if all devices that gather have them so in their orders."""
        lanes = self.schedule.outline.lanes.lanes
        before = [self._before(lane) for lane in lanes]
        lane_of = {device: number for number, lane in enumerate(lanes) for device in lane.devices}
        known: dict[Site, set[int]] = {}
        for number, pairs in enumerate(before):
            for later, earlier in pairs.items():
                site = self.sites.at(later[0], later[2])
                if site not in known:
                    known[site] = {lane_of.get(device, -1) for device in devices_of(site.where)}
                its = known[site]
                if min(its) == number and all(before[lane].get(later) == earlier for lane in its):
                    self._add(self.of(site, *earlier[1:]), site, later)

    def _before(self, lane: Lane) -> Mapping[Pass, Pass]:
        """Passes that follow another of their chunk, with no pass of another chunk between them. Unless the turn is
        kept too, both are forwards, or neither is. Passes that read no weights do not count."""
        found: dict[Pass, Pass] = {}
        chunk = -1
        last: dict[bool, tuple[Site, Pass]] = {}
        for work in lane.steps:
            passes = list(self._passes(work))
            chunks = {site.chunk.number for site, _, _ in passes}
            if chunks and chunks != {chunk}:
                # The passes of one step have no order among them.
                chunk, last = (chunks.pop() if len(chunks) == 1 else -1), {}
            now: dict[bool, tuple[Site, Pass]] = {}
            for site, phase, point in passes if chunk != -1 else ():
                if not self._reads_weights(site, phase, point):
                    continue
                way = _keep(site) is Keep.TURN or phase == "F"
                one = (chunk, phase, point)
                earlier = now.get(way) or last.get(way)
                if earlier is not None and earlier[0] is site and _keep(site) is not Keep.PASS:
                    found[one] = earlier[1]
                now[way] = (site, one)
            last = now or last
        return found

    def _reads_weights(self, site: Site, phase: str, point: Point) -> bool:
        programs = self._programs(site, phase, point)
        return any(kind == "weight" for op in programs for kind, _ in site.chunk.passes[op].inputs)

    def _passes(self, work: Work) -> Iterator[tuple[Site, str, Point]]:
        for item in work.items:
            if "comm" in item or "update" in item:
                continue
            group, point = self.schedule.which(item)
            phase = str(item["pass"])
            for chunk in self.schedule.groups[group]:
                if phase in chunk.passes:
                    yield self.sites.at(chunk.number, point), phase, point


def _keep(site: Site) -> Keep:
    """Along axes that are gathered together, the longest."""
    return max((use.keep for use in site.uses.values() if use.level == 3), default=Keep.PASS)
