"""A unit-cost simulation of the order of passes: F, I and W take one unit, B two; communication is free.

Without a model the stages are assumed to form a chain in numeric order: F(s) needs F(s-1) of its microbatch, B and I of
s need F of s and B or I of s+1, W needs its I. Each lane (devices with identical orders) runs its steps in order; the
items of one step run one after the other, whichever is ready first."""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import TypeAlias

from piperlang.core.selector import Selector, TagValue
from piperlang.diagnostics import Diagnostic, Label, PiperError, error
from piperlang.elaborate.lanes import Item, Lane
from piperlang.simulate.timeline import Activity, Ran, Timeline
from piperlang.syntax.words import PASSES

Event: TypeAlias = tuple[str, object, object]
"""A result that others wait for: a forward, a gradient (of B or I) or a weight gradient, of (stage, microbatch)."""

MAX_WIDE = 2_000
"""Maximum number of passes in one step: all are visited whenever one of them ends."""

_GIVES = {"F": "forward", "B": "gradient", "I": "gradient", "W": "weights"}


@dataclass(frozen=True)
class UnitCosts:
    """Units of time that a pass takes, and tags that multiply them: `{("stage", 3): 2}`."""

    passes: Mapping[str, int] = field(default_factory=lambda: {"F": 1, "B": 2, "I": 1, "W": 1})
    factors: Mapping[tuple[str, TagValue], int] = field(default_factory=dict)
    recomputed: Sequence[tuple[Selector, bool]] = ()
    """Whether the forward of a pass runs again before the backward, or before its first half: the last one holds."""

    def of(self, item: Item) -> int:
        op = str(item["pass"])
        units = self.passes[op]
        if op in ("B", "I") and self._runs_again(item):
            units += self.passes["F"]
        return units * prod(self.factors.get(tag, 1) for tag in item.items())

    def _runs_again(self, item: Item) -> bool:
        return next((again for selector, again in reversed(self.recomputed) if selector.matches(item)), False)

    def __str__(self) -> str:
        """`F=I=W=1, B=2, stage=3 takes 2 times that`"""
        by_cost: dict[int, list[str]] = {}
        for name in ("F", "I", "W", "B"):
            by_cost.setdefault(self.passes[name], []).append(name)
        words = [f"{'='.join(names)}={cost}" for cost, names in by_cost.items()]
        words += ["B and I with F again where recomputed"] if any(again for _, again in self.recomputed) else []
        return ", ".join(
            [*words, *(f"{key}={value} takes {factor} times that" for (key, value), factor in self.factors.items())]
        )


UNIT = UnitCosts()
LONGEST = 100
"""Units that a pass may take."""


def parse_costs(words: Iterable[str], now: UnitCosts = UNIT) -> UnitCosts:
    """`F=2`, and `stage=3:2` or `stage3=2` for passes with a tag, which take so many times as long. Raises
    ValueError."""
    passes, factors = dict(now.passes), dict(now.factors)
    named: set[str | tuple[str, TagValue]] = set()
    for word in words:
        whole = re.fullmatch(r"([A-Za-z_]\w*?)(?:=([\w.]+):|(\d+)=|=)(\d+)", word)
        if whole is None or not 1 <= int(whole[4]) <= LONGEST:
            raise ValueError(f"`{word}` is not a cost; expected a whole number from 1 to {LONGEST}")
        key, value, units = whole[1], whole[2] or whole[3], int(whole[4])
        tag = (key, int(value) if value.isdecimal() else value) if value is not None else None
        if (tag or key) in named:
            raise ValueError(f"the cost of {f'{key}={value}' if tag else key} is given twice")
        named.add(tag or key)
        if tag is not None:
            factors[tag] = units
        elif key in PASSES:
            passes[key] = units
        else:
            raise ValueError(f"`{key}` is not a pass: {', '.join(PASSES)}; a tag has a value, `{key}=0:{units}`")
    if named & {"I", "W"} and "B" not in named:
        passes["B"] = passes["I"] + passes["W"]
    return replace(now, passes=passes, factors=factors)


def live(timeline: Timeline) -> list[int]:
    """By row, the most microbatches of a stage whose activations are kept at once: from the begin of their forward to
    the end of the backward, or of its last half."""
    changes: list[list[tuple[float, int]]] = [[] for _ in timeline.rows]
    halves = {(one.row, *_key(dict(one.what.tags))) for one in timeline.ran if one.what.op == "W"}
    for one in timeline.ran:
        if one.what.op == "F":
            changes[one.row].append((one.start, 1))
        elif one.what.op in ("B", "W") or (one.row, *_key(dict(one.what.tags))) not in halves:
            changes[one.row].append((one.end, -1))
    found = []
    for its in changes:
        kept = [0, *accumulate(change for _, change in sorted(its))]  # what is freed goes before what is made
        found.append(max(kept))
    return found


def simulate(lanes: Sequence[Lane], cost: UnitCosts = UNIT) -> Timeline:
    """Run every lane to its end, or raise P0501 with the cycle of lanes that wait for each other."""
    return _Simulation(lanes, cost).run()


class _Simulation:
    def __init__(self, lanes: Sequence[Lane], cost: UnitCosts) -> None:
        self.lanes = lanes
        self.cost = cost
        self.at = [0] * len(lanes)
        self.left = [self._open(lane, 0) for lane in range(len(lanes))]
        wide = next((work for lane in lanes for work in lane.steps if len(work.items) > MAX_WIDE), None)
        if wide is not None:
            raise error(
                "P0208",
                f"{len(wide.items):,} passes in one step",
                wide.step.span,
                f"the limit is {MAX_WIDE:,}",
                help="order them, or select fewer in a step",
            )
        self.ordered = {_gives(item) for lane in lanes for work in lane.steps for item in work.items if computes(item)}
        self.done: set[Event] = set()
        self.waiting: defaultdict[Event, set[int]] = defaultdict(set)
        self.ran: list[Ran] = []

    def _open(self, lane: int, step: int) -> list[Item]:
        steps = self.lanes[lane].steps
        return [item for item in steps[step].items if computes(item)] if step < len(steps) else []

    def run(self) -> Timeline:
        ending: list[tuple[int, int]] = []
        running: dict[int, Item] = {}
        now, awake = 0, set(range(len(self.lanes)))
        while awake:
            for lane in sorted(awake - running.keys()):
                item = self._take(lane)
                if item is not None:
                    running[lane] = item
                    end = now + self.cost.of(item)
                    self.ran.append(Ran(lane, "compute", self._activity(item), now, end, step=self.at[lane]))
                    heapq.heappush(ending, (end, lane))
            awake = set()
            now = ending[0][0] if ending else now
            # All ends at one time are processed before any lane goes on, so the result does not depend on lane numbers.
            while ending and ending[0][0] == now:
                lane = heapq.heappop(ending)[1]
                awake |= self._finish(running.pop(lane)) | {lane}
        if any(self.left):
            raise PiperError(self._stuck())
        return Timeline([tuple(sorted(lane.devices)) for lane in self.lanes], tuple(self.ran), now, "units")

    def _activity(self, item: Item) -> Activity:
        return Activity(str(item["pass"]), describe(item), item)

    def _take(self, lane: int) -> Item | None:
        """The next item that the lane can start; if there is none, the lane waits."""
        while not self.left[lane] and self.at[lane] < len(self.lanes[lane].steps):
            self.at[lane] += 1
            self.left[lane] = self._open(lane, self.at[lane])
        for item in self.left[lane]:
            needed = self._missing(item)
            if needed is None:
                self.left[lane].remove(item)
                return item
            self.waiting[needed].add(lane)
        return None

    def _missing(self, item: Item) -> Event | None:
        # Passes without an order are scheduled by the compiler: assumed to be ready in time.
        return next((event for event in _needs(item) if event in self.ordered and event not in self.done), None)

    def _finish(self, item: Item) -> set[int]:
        event = _gives(item)
        self.done.add(event)
        return self.waiting.pop(event, set())

    # ------------------------------------------------------------------------------------------------- deadlock

    def _stuck(self) -> Diagnostic:
        """Follow the chain of waiting lanes until one repeats."""
        giver = {
            _gives(item): lane
            for lane, order in enumerate(self.lanes)
            for work in order.steps
            for item in work.items
            if computes(item)
        }
        lane = next(i for i, left in enumerate(self.left) if left)
        path: list[int] = []
        while lane not in path:
            path.append(lane)
            needed = self._missing(self.left[lane][0])
            assert needed is not None
            lane = giver[needed]
        cycle = path[path.index(lane) :]
        labels = [Label(self.lanes[i].steps[self.at[i]].step.span, self._waits(i)) for i in cycle]
        first = self.lanes[cycle[0]].steps[self.at[cycle[0]]].step
        return Diagnostic(
            "P0501",
            "deadlock: these devices wait for each other",
            first.span,
            labels[0].text,
            tuple(labels[1:]),
            notes=("without a model, stages are assumed to form a chain in numeric order",),
            helps=("move the step that is waited for before the step that waits",),
            trail=first.trail,
        )

    def _waits(self, lane: int) -> str:
        item = self.left[lane][0]
        needed = self._missing(item)
        assert needed is not None
        what, stage, mb = needed
        return (
            f"device {min(self.lanes[lane].devices)} cannot run {describe(item)}: it waits for the {what} of stage"
            f" {stage}, microbatch {mb}"
        )


def computes(item: Item) -> bool:
    """Whether it is a pass of a chunk; communication and updates take no time here."""
    return item.get("pass") in _GIVES and "comm" not in item and "update" not in item


def describe(item: Item) -> str:
    return ", ".join(f"{key}={value}" for key, value in item.items())


def _key(item: Item) -> tuple[object, object]:
    return item.get("stage", 0), item.get("mb", 0)


def _gives(item: Item) -> Event:
    return (_GIVES[str(item["pass"])], *_key(item))


def _needs(item: Item) -> list[Event]:
    kind, (stage, mb) = item["pass"], _key(item)
    below = stage - 1 if isinstance(stage, int) else None
    above = stage + 1 if isinstance(stage, int) else None
    if kind == "F":
        return [("forward", below, mb)]
    if kind == "W":
        return [("gradient", stage, mb)]
    return [("gradient", above, mb), ("forward", stage, mb)]
