"""The order of work per device, with `next` resolved.

Devices with identical orders share one lane, so an order on a submesh of 128 replicas is resolved once;
a lane is divided only when an order names some of its devices and not the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from piperlang.core.mesh import Submesh
from piperlang.core.selector import Conjunction, Selector, TagValue
from piperlang.diagnostics import Diagnostic, Frame, Label, PiperError, error
from piperlang.elaborate.directive import Step
from piperlang.elaborate.placement import Chunk, Placements, shown
from piperlang.elaborate.resolve import Meant, Resolver

if TYPE_CHECKING:
    from piperlang.directives.order import Order
    from piperlang.directives.split import Split

Item: TypeAlias = dict[str, TagValue]
"""One pass of a chunk for one microbatch: its tags, `pass` (or `comm`), and its microbatch."""

MAX_ORDERED = 150_000

Point: TypeAlias = tuple[int, ...]
"""A position in each split that divides a chunk."""

TAKES = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}
"""B is the I and the W of its microbatch combined."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a device's order: items that may overlap, and where they were written."""

    items: tuple[Item, ...]
    step: Step


@dataclass
class Lane:
    devices: frozenset[int]
    steps: list[Work] = field(default_factory=list)
    taken: dict[tuple[Chunk, str], dict[Point, Step]] = field(default_factory=dict)
    """For each chunk and pass (F, I, W): the ordered microbatches, and the step that ordered each."""
    lowest: dict[object, int] = field(default_factory=dict)
    """For each query for `next`: every microbatch before this one is already ordered, or does not run here."""

    def part(self, devices: frozenset[int]) -> Lane:
        taken = {key: dict(value) for key, value in self.taken.items()}
        return Lane(devices, list(self.steps), taken, dict(self.lowest))


@dataclass
class Lanes:
    placements: Placements
    splits: Mapping[str, Split]
    lanes: list[Lane] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.resolver = Resolver(self.placements, self.splits)
        self.ordered = 0
        self._of: dict[int, Lane] = {}

    def forget(self) -> None:
        """After a new placement or split, the search for `next` starts over."""
        self.resolver.forget()
        for lane in self.lanes:
            lane.lowest.clear()

    def misplaced(self) -> Iterator[Diagnostic]:
        """Passes that were ordered before a `place` put their chunk on other devices."""
        for lane in self.lanes:
            for (chunk, _), steps in lane.taken.items():
                known = self.placements.by_chunk.get(chunk)
                if known and steps and not any(lane.devices <= p.devices for p in known):
                    step = next(iter(steps.values()))
                    where = Label(known[0].directive.span, f"placed on {known[0].where} here")
                    yield Diagnostic(
                        "P0403",
                        f"{shown(chunk)} does not run on device {min(lane.devices)}",
                        step.span,
                        "ordered on that device here",
                        (where,),
                        self.placements.notes(chunk),
                        (f"order it on {known[0].where}",),
                        trail=step.trail,
                    )
                    return

    def unplaced(self) -> Iterator[tuple[Chunk, Step]]:
        for lane in self.lanes:
            for (chunk, _), steps in lane.taken.items():
                if chunk not in self.placements.by_chunk and steps:
                    yield chunk, next(iter(steps.values()))

    def order(self, order: Order) -> None:
        assert order.where is not None
        if not order.steps:
            return
        for lane in self._covering(frozenset(order.where.devices()), order.steps[0]):
            for step in order.steps:
                try:
                    items = tuple(self._counted(lane, step, order.where))
                except PiperError as problem:  # the step knows its call stack, the order does not
                    raise PiperError(*(x.within(_trail(step, x)) for x in problem.diagnostics)) from None
                if items:
                    lane.steps.append(Work(items, step))

    def _counted(self, lane: Lane, step: Step, where: Submesh) -> Iterator[Item]:
        for selector in step.items:
            for item in self._items(lane, selector, step, where):
                self.ordered += 1
                self._check_size(step)
                yield item

    def _check_size(self, step: Step) -> None:
        if self.ordered > MAX_ORDERED:
            raise error(
                "P0208",
                f"more than {MAX_ORDERED:,} passes are ordered",
                step.span,
                help="check the sizes of the splits",
            )

    def _covering(self, wanted: frozenset[int], step: Step) -> list[Lane]:
        """Lanes whose union is exactly `wanted`; lanes with devices outside it are divided."""
        found = list(
            {id(lane): lane for device in sorted(wanted) if (lane := self._of.get(device)) is not None}.values()
        )
        rest = wanted.difference(*(lane.devices for lane in found))
        for lane in found:
            inside = lane.devices & wanted
            if inside != lane.devices:
                self._open(lane.part(lane.devices - inside))
                # A division copies what was ordered so far.
                self.ordered += (len(lane.steps) + sum(map(len, lane.taken.values()))) // 10
                self._check_size(step)
                lane.devices = inside
        if rest:
            found.append(self._open(Lane(rest)))
        return found

    def _open(self, lane: Lane) -> Lane:
        self.lanes.append(lane)
        self._of.update(dict.fromkeys(lane.devices, lane))
        return lane

    # ------------------------------------------------------------------------------------------------ one selector

    def _items(self, lane: Lane, selector: Selector, step: Step, where: Submesh) -> Iterator[Item]:
        for conjunction in selector.alternatives:
            if any(c.key in ("comm", "update") for c in conjunction):
                yield _as_written(conjunction)
                continue
            if self.resolver.unknowable(conjunction):
                yield _as_written(conjunction)
                continue
            for meant in self.resolver.meant(conjunction, selector):
                self._check_placed(lane, meant.chunk, selector, where)
                for phase in meant.passes:
                    for point in self._points(lane, meant, phase, selector):
                        self._take(lane, meant.chunk, phase, point, step, selector)
                        yield {**meant.tags, "pass": phase, **dict(zip(meant.dimensions, point, strict=True))}

    def _check_placed(self, lane: Lane, chunk: Chunk, selector: Selector, where: Submesh) -> None:
        known = self.placements.by_chunk.get(chunk)
        if not known or any(lane.devices <= p.devices for p in known):
            return
        raise error(
            "P0403",
            f"{shown(chunk)} does not run on {where}",
            selector.span,
            "ordered here",
            also=[Label(p.directive.span, f"placed on {p.where} here") for p in known[:3]],
            notes=self.placements.notes(chunk),
            help=f"order it on {known[0].where}, or place it on these devices",
        )

    # ------------------------------------------------------------------------------------------------ microbatches

    def _points(self, lane: Lane, meant: Meant, phase: str, selector: Selector) -> Iterator[Point]:
        boxes = [dict(p.box) for p in self.placements.here(meant.chunk, next(iter(lane.devices))) if p.box]

        def runs_here(point: Point) -> bool:
            at = dict(zip(meant.dimensions, point, strict=True))
            return not boxes or any(all(at[name] in these for name, these in box.items()) for box in boxes)

        if meant.chooses is None:
            if prod(map(len, meant.values)) > MAX_ORDERED:
                raise error("P0208", f"this orders more than {MAX_ORDERED:,} passes", selector.span)
            points = [point for point in product(*meant.values) if runs_here(point)]
            if not points:
                raise self._no_point(meant, selector)
            yield from points
            return
        taken = lane.taken.setdefault((meant.chunk, TAKES[phase][0]), {})
        before, after = meant.values[: meant.chooses], meant.values[meant.chooses + 1 :]
        for rest in product(*before, *after):
            key = (id(meant), TAKES[phase][0], rest)
            choices = meant.values[meant.chooses]
            at = lane.lowest.get(key, 0)
            while at < len(choices):
                point = (*rest[: meant.chooses], choices[at], *rest[meant.chooses :])
                at += 1
                if point not in taken and runs_here(point):
                    yield point
                    break
            else:
                if not meant.optional:
                    raise self._exhausted(meant, phase, len(taken), selector)
            lane.lowest[key] = at

    def _take(self, lane: Lane, chunk: Chunk, phase: str, point: Point, step: Step, selector: Selector) -> None:
        for half in TAKES[phase]:
            taken = lane.taken.setdefault((chunk, half), {})
            if point in taken:
                which = f", microbatch {', '.join(map(str, point))}" if point else ""
                raise error(
                    "P0407",
                    f"{shown(chunk)}, pass={phase}{which} is ordered twice",
                    selector.span,
                    "ordered again here",
                    also=[Label(taken[point].span, "first ordered here")],
                    help="`mb=next` selects the next microbatch that is not ordered yet",
                )
            taken[point] = step

    def _no_point(self, meant: Meant, selector: Selector) -> Exception:
        whole = ", ".join(f"{name}=0:{self.splits[name].count}" for name in meant.dimensions)
        return error(
            "P0302",
            "selector matches no nodes",
            selector.span,
            f"{shown(meant.chunk)} has {whole}, and some of these do not run here",
        )

    def _exhausted(self, meant: Meant, phase: str, taken: int, selector: Selector) -> Exception:
        assert meant.chooses is not None
        name = meant.dimensions[meant.chooses]
        split = self.splits[name]
        return error(
            "P0304",
            f"no {name} is left for {shown(meant.chunk)}, pass={phase}",
            selector.span,
            f"{taken} already ordered on these devices",
            also=[Label(split.span, f"split into {split.count} here")],
            help=f"remove a step, or write `{name}=next?`, which selects nothing if none is left",
        )


def _trail(step: Step, problem: Diagnostic) -> tuple[Frame, ...]:
    """The call stack of a step; a step like `F(0)` is itself the call that gives the function's selector."""
    at, here = problem.span, step.span
    function, call, _ = here.text.partition("(")
    if at is None or (at.source is here.source and (here.start <= at.start < here.end or not call or not function)):
        return step.trail
    return (*step.trail, Frame(function, here))


def _as_written(conjunction: Conjunction) -> Item:
    """Communication and updates exist only with a model: shown as the script writes them."""
    item: Item = {}
    for c in conjunction:
        item[c.key] = (
            c.values[0] if len(c.values) == 1 else "*" if c.test == "present" else str(c).partition("=")[2] or str(c)
        )
    return item
