"""Weights and gradients: in the parts that devices keep them in, all of each counted once, and updated once.

What a device has of a weight is a box of it and, where ZeRO divides further, an interval of that. Gathers, reductions
and updates are followed from interval to interval: a cut that does not fit its neighbours shows where it meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from piperlang.core.value_id import NORM_FACTOR, Kind, ValueId
from piperlang.ir.layout import Box
from piperlang.plan.instructions import (
    Fetch,
    Forward,
    GatherParameters,
    GradientNorm,
    Interval,
    Offload,
    ParameterUpdate,
    ReduceGradients,
    ScatterGradients,
    ShardCollective,
    Update,
)
from piperlang.plan.plan import ParameterShard
from piperlang.plan.rewrite.clip import part_of
from piperlang.plan.sums import ADDED
from piperlang.plan.verify.report import At, Checked

CODE = "P0504"


def entries(checked: Checked) -> None:
    """Every record is about one weight, and its cuts make up what they divide."""
    for at, x in checked.each(ShardCollective):
        members = len(checked.plan.groups[x.group].members)
        reduces = isinstance(x, ReduceGradients)
        for one in x.shards:
            checked.steps += 1 + len(one.cuts)
            if not reduces and len(one.cuts) != members:
                checked.wrong("P0503", f"{len(one.cuts)} parts for {members} members", at)
            names = {_weight(key) for key in (*one.sources, one.target)}
            if len(names) > 1 or not one.sources:
                checked.wrong(CODE, f"{x.op} makes {one.target} of {', '.join(map(str, one.sources)) or 'nothing'}", at)
            if not reduces and not _partition(one.cuts, prod(one.shape)):
                checked.wrong(
                    "P0503",
                    f"the parts {list(one.cuts)} do not make up the {prod(one.shape)} elements of {one.target}",
                    at,
                )
    for at, update in checked.each(Update):
        for change in update.parameters:
            names = {_weight(key) for key in (change.old, change.new, *change.gradients)}
            if names != {change.weight} or not change.gradients:
                checked.wrong(
                    CODE,
                    f"an update of {change.weight} that makes {change.new} of {change.old} and"
                    f" {', '.join(map(str, change.gradients))}",
                    at,
                )
        if update.scale != (NORM_FACTOR if checked.of["norm"] else None):
            checked.wrong(CODE, "an update does not scale its gradients by the norm of all of them", at)
    for at, norm in checked.each(GradientNorm):
        if norm.target is not NORM_FACTOR:
            checked.wrong(CODE, f"the norm of all gradients is called {norm.target}", at)
    for at, offload in checked.each(Offload):
        _moved(checked, at, Kind.SAVED, Kind.HOST, offload)
    for at, fetch in checked.each(Fetch):
        _moved(checked, at, Kind.HOST, Kind.SAVED, fetch)


def _moved(checked: Checked, at: At, source: Kind, target: Kind, x: Offload | Fetch) -> None:
    have, made = x.source, x.target.origin
    if (have.kind, made.kind) != (source, target) or (have.owner, have.microbatch) != (made.owner, made.microbatch):
        checked.wrong(CODE, f"{x.op} makes {x.target} of {x.source}", at)


def _weight(key: ValueId) -> str | None:
    """The weight that a value is, or is a gradient of."""
    return key.name if key.kind in (Kind.WEIGHT, *ADDED) else None


def _partition(cuts: Any, length: int) -> bool:
    end = 0
    for low, high in cuts:
        if low != end or high < low:
            return False
        end = high
    return bool(end == length)


# ---------------------------------------------------------------------------------------------------------- flow


def flow(checked: Checked) -> None:
    for d, device in enumerate(checked.plan.devices):
        _Flow(checked, d, device.weights).run()
    _boxes(checked)
    _norm(checked)


class _Flow:
    """What one device has of each weight and gradient, as it goes through its instructions."""

    def __init__(self, checked: Checked, d: int, weights: Mapping[ValueId, ParameterShard]) -> None:
        self.checked, self.d, self.weights = checked, d, weights
        self.device = checked.plan.devices[d]
        self.has: dict[ValueId, Interval] = {}
        self.maker: dict[ValueId, At] = {}
        self.length: dict[str, int] = {}
        self.counted: dict[ValueId, At] = {}
        for key, held in weights.items():
            size = prod(high - low for low, high in held.box)
            self.length[key.name] = size
            self.has[key] = held.interval if held.interval is not None else (0, size)

    def run(self) -> None:
        for i, x in enumerate(self.device.instructions):
            if isinstance(x, ShardCollective):
                self._collective(At(self.d, i, x), x)
            elif isinstance(x, Update):
                for change in x.parameters:
                    self._update(At(self.d, i, x), change)
            elif isinstance(x, Forward):
                self._changes(At(self.d, i, x))
        self._next()
        made = self.checked.made[self.d]
        for key in made.keys() - self.counted.keys():
            if key.kind in ADDED:
                self.checked.wrong(
                    CODE,
                    f"{key} is a part of a gradient that device {self.device.device} does not use",
                    At(self.d, made[key], self.device.instructions[made[key]]),
                )

    def _changes(self, at: At) -> None:
        """Buffers that a forward changes: each once, and all of it."""
        for key in at.does.writes:
            if key.kind is Kind.WEIGHT and key.microbatch is None:  # of all parts of the batch, one is kept
                old = key.origin
                if old not in self.weights or self.device.next.get(old) != key:
                    self.checked.wrong(
                        CODE, f"device {self.device.device} changes {old} and does not keep the result", at
                    )
                if self.counted.setdefault(old, at) is not at:
                    self._twice(old, at)
                self._has(key, (0, self.length.get(key.name, -1)), at)

    def _twice(self, key: ValueId, at: At) -> None:
        self.checked.wrong(CODE, f"{key} is counted twice on device {self.device.device}", self.counted[key], at)

    def _collective(self, at: At, x: ShardCollective) -> None:
        gathers, reduces = isinstance(x, GatherParameters), isinstance(x, ReduceGradients)
        rank = self.checked.plan.groups[x.group].members.index(self.device.device)
        for one in x.shards:
            size = prod(one.shape)
            cut = (0, size) if reduces else one.cuts[rank]
            wanted = cut[1] - cut[0] if gathers else size
            # A gradient that a pass made is of all that the device has of its weight.
            length = self.length.get(one.target.name, -1)
            whole = 0, length
            for key in one.sources:
                low, high = self.has.get(key, whole)
                if high - low != wanted or (gathers and size == length and (low, high) != cut):
                    self._odd(at, key, f"takes {wanted} elements of {key}, which has {low} to {high}")
                if not gathers and self.counted.setdefault(key, at) is not at:
                    self._twice(key, at)
            low = self.has.get(one.sources[0], whole)[0]
            made = (low - cut[0], low - cut[0] + size) if gathers else (low + cut[0], low + cut[1])
            self._has(one.target, made, at)

    def _update(self, at: At, change: ParameterUpdate) -> None:
        old = change.old
        if old not in self.weights or self.weights[old].weight != change.weight:
            self.checked.wrong(CODE, f"device {self.device.device} does not keep {old}", at)
            return
        if old not in self.device.next:
            self.checked.wrong(CODE, f"device {self.device.device} updates {old} and does not keep the result", at)
        mine = _cut(self.has[old], change.part)
        for key in change.gradients:
            has = self.has.get(key, (0, self.length.get(change.weight, -1)))
            theirs = _cut(has, change.gradient_part)
            if mine != theirs or mine is None:
                self._odd(at, key, f"updates {mine} of {old} with {theirs} of {key}")
            if self.counted.setdefault(key, at) is not at:
                self._twice(key, at)
        if self.counted.setdefault(old, at) is not at:
            self._twice(old, at)
        if mine is not None:
            self._has(change.new, mine, at)

    def _has(self, key: ValueId, part: Interval, at: At) -> None:
        self.has[key], self.maker[key] = part, at

    def _odd(self, at: At, key: ValueId, message: str) -> None:
        other = self.maker.get(key)
        self.checked.wrong(CODE, f"{at.does.op} {message}", *([other] if other else []), at)

    def _next(self) -> None:
        for old, new in self.device.next.items():
            at = self.maker.get(new)
            if old.name != new.name or self.has.get(new) != self.has.get(old) or new.origin is not old:
                self.checked.wrong(
                    CODE,
                    f"device {self.device.device} keeps {self.has.get(old)} of {old}, and {new} would be"
                    f" {self.has.get(new)}",
                    *([at] if at else []),
                )
        for key, held in self.weights.items():
            if held.weight != key.name:
                self.checked.wrong(CODE, f"device {self.device.device} keeps {held.weight} as {key}")


def _cut(has: Interval, take: Interval | None) -> Interval | None:
    """A part of an interval, in the coordinates of the whole; None if it is not in it."""
    if take is None:
        return has
    low, high = has[0] + take[0], has[0] + take[1]
    return (low, high) if has[0] <= low <= high <= has[1] else None


def _norm(checked: Checked) -> None:
    """The norm is of just what updates use, and of each part of a gradient one device counts."""
    counting: dict[object, list[At]] = {}
    for at, norm in checked.each(GradientNorm):
        device = checked.plan.devices[at.device]
        updated = [change for x in device.instructions if isinstance(x, Update) for change in x.parameters]
        terms = {term.gradients: term for term in norm.terms}
        checked.steps += len(updated)
        if len(terms) != len(norm.terms) or {change.gradients for change in updated} != terms.keys():
            checked.wrong(CODE, f"the norm on device {device.device} is not of the gradients that are used there", at)
            continue
        if set(norm.losses) != (set(device.losses) if norm.skips else set()):
            checked.wrong(CODE, f"the norm on device {device.device} does not look at the losses that are there", at)
        for change in updated:
            term = terms[change.gradients]
            if (term.weight, term.gradient_part) != (change.weight, change.gradient_part):
                checked.wrong(
                    CODE,
                    f"the norm takes {term.gradient_part} of the gradient of {term.weight}, and the update of"
                    f" {change.weight} {change.gradient_part}",
                    at,
                )
            counts = counting.setdefault(part_of(device, change), [])
            counts += [at] if term.counts else []
    for part, counts in counting.items():
        if len(counts) != 1:
            checked.wrong(
                CODE, f"{len(counts)} devices count for the norm of {part}", *(counts or list(checked.all("norm"))[:1])
            )


def _boxes(checked: Checked) -> None:
    """Gradients are added up only where they are of the same part of a weight."""
    plan = checked.plan
    boxes = [{key.name: held.box for key, held in device.weights.items()} for device in plan.devices]
    first: dict[tuple[int, str], tuple[At, Box | None]] = {}
    for kind in (ReduceGradients, ScatterGradients):
        for at, x in checked.each(kind):
            for one in x.shards:
                name = one.target.name
                mine = boxes[at.device].get(name)
                other, theirs = first.setdefault((x.group, name), (at, mine))
                if mine != theirs or mine is None:
                    checked.wrong("P0503", f"parts {theirs} and {mine} of {name} would be added up", other, at)
