"""The order of work per device, with `next` resolved.

Devices that have been given the same orders share one lane, so an order on a slice of 128 replicas is worked out once;
a lane is divided only when an order names some of its devices and not the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from piperlang.diagnostics import Label, did_you_mean, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.placement import NOT_TAGS, Chunk, Microbatches, Placements
from piperlang.elaborate.selector import Condition, Conjunction, Selector, TagValue
from piperlang.elaborate.values import Slice

Item: TypeAlias = dict[str, TagValue]
"""One piece of work: its tags, `pass` (or `comm`), and its microbatch."""

TAKES = {"F": ("F",), "B": ("I", "W"), "I": ("I",), "W": ("W",)}
"""A B is the I and the W of its microbatch at once."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step of a device's order: items that may overlap, and where they were written."""

    items: tuple[Item, ...]
    step: d.Step


@dataclass
class Lane:
    devices: frozenset[int]
    steps: list[Work] = field(default_factory=list)
    taken: dict[tuple[Chunk, str], dict[int, d.Step]] = field(default_factory=dict)
    """For each chunk and half (F, I, W): the microbatches ordered, and by which step."""
    lowest: dict[tuple[Chunk, str], int] = field(default_factory=dict)
    """Every microbatch below is taken: where `next` starts to look."""

    def part(self, devices: frozenset[int]) -> Lane:
        taken = {key: dict(value) for key, value in self.taken.items()}
        return Lane(devices, list(self.steps), taken, dict(self.lowest))


@dataclass
class Lanes:
    placements: Placements
    splits: Mapping[str, d.Split]
    lanes: list[Lane] = field(default_factory=list)
    _tags: dict[Conjunction, tuple[Chunk, ...]] = field(default_factory=dict)

    def unplaced(self) -> Iterator[tuple[Chunk, d.Step]]:
        for lane in self.lanes:
            for (chunk, _), steps in lane.taken.items():
                if chunk not in self.placements.by_chunk:
                    yield chunk, next(iter(steps.values()))

    def order(self, order: d.Order) -> None:
        assert order.where is not None
        for lane in self._covering(self.placements.devices(order.where)):
            for step in order.steps:
                items = tuple(item for selector in step.items for item in self._items(lane, selector, step, order.where))
                if items:
                    lane.steps.append(Work(items, step))

    def _covering(self, wanted: frozenset[int]) -> list[Lane]:
        """Lanes that together are exactly `wanted`; lanes that reach beyond it are divided."""
        found: list[Lane] = []
        rest = wanted
        for lane in list(self.lanes):
            inside = lane.devices & wanted
            if not inside:
                continue
            rest -= inside
            if inside != lane.devices:
                self.lanes.append(lane.part(lane.devices - inside))
                lane.devices = inside
            found.append(lane)
        if rest:
            found.append(Lane(rest))
            self.lanes.append(found[-1])
        return found

    # ------------------------------------------------------------------------------------------------ one selector

    def _items(self, lane: Lane, selector: Selector, step: d.Step, where: Slice) -> Iterator[Item]:
        for conjunction in selector.alternatives:
            if any(c.key in ("comm", "update") for c in conjunction):
                yield _as_written(conjunction)
                continue
            for chunk in self._chunks(conjunction, selector):
                for phase in _passes(conjunction):
                    for at in self._microbatches(lane, conjunction, chunk, phase, selector, step, where):
                        yield {**dict(sorted(chunk, key=str)), "pass": phase, **at}

    def _chunks(self, conjunction: Conjunction, selector: Selector) -> tuple[Chunk, ...]:
        tags = tuple(c for c in conjunction if c.key not in self.splits and c.key not in NOT_TAGS)
        if tags not in self._tags:
            self._tags[tags] = tuple(self._find(tags, selector))
        return self._tags[tags]

    def _find(self, tags: Conjunction, selector: Selector) -> Iterator[Chunk]:
        known = self.placements.by_chunk
        unknown = next((c for c in tags if c.test in ("next", "next?")), None)
        if unknown is not None:
            names = ", ".join(f"`{name}`" for name in self.splits)
            raise error(
                "P0303", f"there is no split `{unknown.key}`", selector.span, f"the splits so far are {names}" if names else "nothing is split so far",
                help=f"add `split batch into N as {unknown.key}` before",
            )  # fmt: skip
        found = [chunk for chunk in known if all(c.holds(dict(chunk)) for c in tags)]
        if found:
            yield from found
        elif all(c.test == "in" for c in tags) and tags and not self._names(tags[0].key):
            # Nothing with this tag is placed so far: taken at its word, and reported when the script has ended.
            yield from (frozenset(zip((c.key for c in tags), values, strict=True)) for values in product(*(c.values for c in tags)))
        else:
            raise self._nothing(tags, selector)

    def _names(self, key: str) -> list[TagValue]:
        return sorted({value for chunk in self.placements.by_chunk for name, value in chunk if name == key}, key=str)

    def _nothing(self, tags: tuple[Condition, ...], selector: Selector) -> Exception:
        for condition in tags:
            values = self._names(condition.key)
            if values and condition.test == "in" and not set(values) & set(condition.values):
                shown = f"{condition.key}={values[0]}" + (f" to {condition.key}={values[-1]}" if len(values) > 1 else "")
                wanted = condition.values[0]
                near = f"did you mean `{condition.key}={_closest(wanted, values)}`?"
                return error("P0302", "selector matches no nodes", selector.span, f"the script places {shown}", help=near)
            if not values:
                keys = {name for chunk in self.placements.by_chunk for name, _ in chunk}
                return error("P0302", "selector matches no nodes", selector.span, f"nothing placed so far has the tag `{condition.key}`", help=did_you_mean(condition.key, keys))
        return error("P0302", "selector matches no nodes", selector.span, "nothing placed so far fits all of it")

    # ------------------------------------------------------------------------------------------------ microbatches

    def _microbatches(
        self, lane: Lane, conjunction: Conjunction, chunk: Chunk, phase: str, selector: Selector, step: d.Step, where: Slice
    ) -> Iterator[Item]:
        allowed = self._placed(lane, chunk, selector, where)
        dimensions = [c for c in conjunction if c.key in self.splits]
        name = dimensions[0].key if dimensions else next(iter(self.splits), None)
        if name is None:
            yield {}
            return
        keep = [c for c in dimensions if c.test not in ("next", "next?")]
        chosen = next((c.test for c in dimensions if c.test in ("next", "next?")), None)
        bounds = _bounds(keep, self.splits[name].count)

        def fits(at: int) -> bool:
            return (allowed is None or at in allowed) and all(c.holds({name: at}) for c in keep)

        if chosen is None:
            for at in bounds:
                if fits(at):
                    self._take(lane, chunk, phase, at, step, selector)
                    yield {name: at}
            return
        half = TAKES[phase][0]
        taken = lane.taken.setdefault((chunk, half), {})
        start = max(bounds.start, lane.lowest.get((chunk, half), 0)) if not keep and allowed is None else bounds.start
        free = next((at for at in range(start, bounds.stop) if at not in taken and fits(at)), None)
        if free is None:
            if chosen == "next?":
                return
            raise self._exhausted(chunk, phase, name, taken, selector)
        if not keep and allowed is None:
            lane.lowest[chunk, half] = free + 1
        self._take(lane, chunk, phase, free, step, selector)
        yield {name: free}

    def _placed(self, lane: Lane, chunk: Chunk, selector: Selector, where: Slice) -> Microbatches:
        device = next(iter(lane.devices))
        runs, at, known = self.placements.here(chunk, device)
        if runs or not known:
            return at
        what = ", ".join(f"{key}={value}" for key, value in sorted(chunk, key=str))
        raise error(
            "P0403", f"{what} does not run on {where}", selector.span, "ordered here",
            also=[Label(p.directive.span, f"placed on {p.where} here") for p in known[:3]], help=f"order it on {known[0].where}, or place it here",
        )  # fmt: skip

    def _take(self, lane: Lane, chunk: Chunk, phase: str, at: int, step: d.Step, selector: Selector) -> None:
        for half in TAKES[phase]:
            taken = lane.taken.setdefault((chunk, half), {})
            if at in taken:
                what = ", ".join(f"{key}={value}" for key, value in sorted(chunk, key=str))
                raise error(
                    "P0407", f"{what}, pass={phase}, microbatch {at} is ordered twice", selector.span, "again here",
                    also=[Label(taken[at].span, "ordered here")], help="`mb=next` takes the next one that is not ordered yet",
                )  # fmt: skip
            taken[at] = step

    def _exhausted(self, chunk: Chunk, phase: str, name: str, taken: Mapping[int, d.Step], selector: Selector) -> Exception:
        what = ", ".join(f"{key}={value}" for key, value in sorted(chunk, key=str))
        count = self.splits[name].count
        return error(
            "P0304", f"no {name} is left for {what}, pass={phase}", selector.span, f"all {len(taken)} of {count} there are ordered already",
            also=[Label(self.splits[name].span, f"split into {count} here")], help=f"repeat it less often, or write `{name}=next?` to take one only if there is one",
        )  # fmt: skip


def _bounds(conditions: list[Condition], count: int) -> range:
    low, high = 0, count
    for c in conditions:
        if c.test == "range":
            low, high = max(low, c.low or 0), min(high, c.high if c.high is not None else count)
        elif c.test == "in":
            numbers = [v for v in c.values if isinstance(v, int)]
            low, high = max(low, min(numbers, default=count)), min(high, max(numbers, default=-1) + 1)
    return range(low, high)


def _passes(conjunction: Conjunction) -> list[str]:
    named = [c for c in conjunction if c.key == "pass"]
    if not any(c.test == "in" for c in named):
        return [p for p in ("F", "B") if all(c.holds({"pass": p}) for c in named)]  # halves exist where they are named
    return [p for p in ("F", "B", "I", "W") if all(c.holds({"pass": p}) for c in named)]


def _as_written(conjunction: Conjunction) -> Item:
    """Communication and updates exist only with a model: shown as the script names them."""
    item: Item = {}
    for c in conjunction:
        item[c.key] = c.values[0] if len(c.values) == 1 else "*" if c.test == "present" else str(c).partition("=")[2]
    return item


def _closest(wanted: TagValue, values: list[TagValue]) -> TagValue:
    numbers = [v for v in values if isinstance(v, int)]
    if isinstance(wanted, int) and numbers:
        return min(numbers, key=lambda v: abs(v - wanted))
    return values[0]
