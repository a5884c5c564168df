"""Where shards of values are: what one device cuts out is what another puts in its place.

A plan does not say which part of a tensor a device has, only which box of its own it gives, and where others put it.
Each such move fixes where two devices' parts lie to each other. A gradient lies where its value lies. All of it must
fit together, and what arrives must be all that was there."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from piperlang.core.value_id import Kind, Point, ValueId
from piperlang.plan.instructions import AllReduce, AllToAll, Compute, Copy, Receive, Send
from piperlang.plan.verify.messages import apart, size_of
from piperlang.plan.verify.report import At, Checked

CODE = "P0503"
Origin = tuple[int, ...] | None
"""Where something begins; None for zero in every dim, however many there are."""


class Move(NamedTuple):
    """A part of one device's value that becomes a part of another's."""

    source: At
    key: ValueId
    taken: Any
    target: At
    put: Any


def parts(checked: Checked) -> None:
    cut: set[str] = set()
    for _, send in checked.each(Send):
        if send.value is not None and any(one.box is not None for one in send.messages):
            cut.add(_name(send.value))
    for _, receive in checked.each(Receive):
        if receive.local or receive.messages[0].box is not None:
            cut.add(_name(receive.target))
    cut.update(_name(at.does.writes[0]) for at in checked.all("copy", "all_to_all", "all_reduce"))
    if cut:
        _Parts(checked, cut).run()


def _name(key: ValueId) -> str:
    """Of a value, and of its gradient alike."""
    return f"{key.name}@{key.owner[0]}" if key.kind is Kind.BATCH else key.name


class _Parts:
    def __init__(self, checked: Checked, cut: set[str]) -> None:
        self.checked, self.cut = checked, cut
        self.number = [device.device for device in checked.plan.devices]
        self.root: dict[tuple[int, ValueId], tuple[int, ValueId]] = {}
        self.offset: dict[tuple[int, ValueId], Origin] = {}
        self.shape: dict[tuple[int, ValueId], tuple[int, ...]] = {}

    def run(self) -> None:
        moved = [move for move in self._moves() if _name(move.key) in self.cut]
        self._shapes()
        for move in moved:
            self.checked.steps += 1
            inside = self.shape.get((move.source.device, move.key))
            if (
                inside is not None
                and move.taken is not None
                and (
                    len(inside) != len(move.taken)
                    or any(not 0 <= low <= high <= size for (low, high), size in zip(move.taken, inside, strict=True))
                )
            ):
                self._wrong(f"{move.taken} is not in {move.key}, which is {list(inside)}", move)
                return
            if not self._relate(
                (move.source.device, move.key),
                (move.target.device, move.target.does.writes[0]),
                _minus(_low(move.taken), _low(move.put)),
            ):
                self._wrong(f"{move.taken} of {move.key} is put at {move.put}, where something else belongs", move)
                return
        if self._gradients():
            self._regions(moved)

    def _wrong(self, message: str, move: Move) -> None:
        self.checked.wrong(CODE, message, *([move.source] if move.source is not move.target else []), move.target)

    # ------------------------------------------------------------------------------------------------ what moves

    def _moves(self) -> Iterator[Move]:
        sent = {
            (self.number[at.device], one.peer, one.tag): (at, send.value, one.box)
            for at, send in self.checked.each(Send)
            if send.value is not None
            for one in send.messages
        }
        for at, receive in self.checked.each(Receive):
            for source, tag, put, _ in receive.messages:
                found = sent.get((source, self.number[at.device], tag))
                if found is not None:
                    yield Move(*found, at, put)
            for key, taken, put in receive.local:
                yield Move(at, key, taken, at, put)
        for at, copy in self.checked.each(Copy):
            for key, taken, put in copy.copies:
                yield Move(at, key, taken, at, put)
        for at, reduce in self.checked.each(AllReduce):
            yield Move(at, reduce.source, reduce.keep, at, None)
        yield from self._exchanged()

    def _exchanged(self) -> Iterator[Move]:
        every = list(self.checked.each(AllToAll))
        there = {(x.node, self.number[at.device]): (at, x) for at, x in every}
        for at, x in every:
            seen: dict[int, int] = {}
            for peer, put, _ in x.take:
                source, other = there[x.node, peer]
                mine = [block.box for block in other.give if block.peer == self.number[at.device]]
                yield Move(source, other.source, mine[seen.get(peer, 0)], at, put)
                seen[peer] = seen.get(peer, 0) + 1

    def _shapes(self) -> None:
        for at in self.checked.all("recv", "copy", "all_to_all"):
            assert isinstance(at.does, Receive | Copy | AllToAll)
            self.shape[at.device, at.does.target] = at.does.shape
        for at, reduce in self.checked.each(AllReduce):
            self.shape[at.device, reduce.source] = reduce.shape
            self.shape[at.device, reduce.target] = reduce.shape if reduce.keep is None else size_of(reduce.keep)
        for at, send in self.checked.each(Send):
            if send.value is not None and send.messages[0].box is None:
                self.shape.setdefault((at.device, send.value), send.messages[0].shape)

    # ---------------------------------------------------------------------------------------------- where values are

    def _find(self, item: tuple[int, ValueId]) -> tuple[tuple[int, ValueId], Origin]:
        """The one that others are placed by, and how far off it an item begins."""
        path = []
        while (up := self.root.get(item, item)) != item:
            path.append(item)
            item = up
        total: Origin = None
        for step in reversed(path):
            total = _plus(self.offset[step], total)
            self.root[step], self.offset[step] = item, total
        return item, total

    def _relate(self, one: tuple[int, ValueId], two: tuple[int, ValueId], distance: Origin) -> bool:
        """`two` begins `distance` after `one`; False if that cannot be."""
        (a, to_one), (b, to_two) = self._find(one), self._find(two)
        gap = _minus(_plus(to_one, distance), to_two)
        if a == b:
            return gap is None or not any(gap)
        self.root[b], self.offset[b] = a, gap
        return True

    def _gradients(self) -> bool:
        """A gradient covers the same region as its value."""
        forward: dict[tuple[int, int, Point | None, str, int], tuple[ValueId, At]] = {}
        for backward in (False, True):
            for at, x in self.checked.each(Compute):
                program = self.checked.plan.programs[x.program]
                if x.op == "R" or backward != (x.op != "F"):
                    continue
                microbatch = x.outputs[0].microbatch
                named = [
                    (slot, key) for slot, keys in zip(program.inputs, x.inputs, strict=True) for key in keys
                ] + list(zip(program.outputs, x.outputs, strict=False))
                for (what, i), key in named:
                    if what.removeprefix("grad_") not in ("input", "output") or _name(key) not in self.cut:
                        continue
                    place = at.device, program.chunk, microbatch, what.removeprefix("grad_"), i
                    if not backward:
                        forward[place] = key, at
                    elif what.startswith("grad_") and place in forward and not self._same(*forward[place], key, at):
                        return False
        return True

    def _same(self, value: ValueId, made: At, gradient: ValueId, at: At) -> bool:
        one, two = (at.device, value), (at.device, gradient)
        mine, theirs = self.shape.get(one), self.shape.get(two)
        if (mine is None or theirs is None or mine == theirs) and self._relate(one, two, None):
            self.shape.update({item: known for item in (one, two) if (known := mine or theirs) is not None})
            return True
        self.checked.wrong(CODE, f"{gradient} does not lie where {value} lies", made, at)
        return False

    # -------------------------------------------------------------------------------------------- is it all there

    def _regions(self, moved: list[Move]) -> None:
        """What all devices have of a value before a move, they have after it; parts of a cut, and parts that are
        joined, count together."""
        before: dict[tuple[Any, ValueId, bool], dict[Any, At] | None] = {}
        after: dict[tuple[Any, ValueId, bool], dict[Any, At] | None] = {}
        for move in moved:
            arrived = move.target.does.writes[0]
            sliced = arrived.is_slice and arrived.source is move.key
            for side, at, key in ((before, move.source, move.key), (after, move.target, arrived)):
                root, origin = self._find((at.device, key))
                shape = self.shape.get((at.device, key))
                group = root, move.key if sliced else arrived, sliced
                known = side.setdefault(group, {})
                if shape is None:
                    side[group] = None
                elif known is not None:
                    known[_box(origin, shape)] = at
        for group, boxes in after.items():
            source = before.get(group)
            if boxes and source and _extent(source) != _extent(boxes):
                one, two = (
                    next(iter(source.values())),
                    next((at for box, at in boxes.items() if box not in source), next(iter(boxes.values()))),
                )
                self.checked.wrong(
                    CODE, f"not all of {group[1]} arrives, or some of it twice", *([one] if one is not two else []), two
                )
                return


def _extent(boxes: dict[Any, At]) -> Any:
    """What distinct boxes make up together; None where they overlap in part."""
    found = [box for box in boxes if prod(high - low for low, high in box)]
    if not found or not apart(list(found), 0, len(found[0])):
        return object()
    return tuple((min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*found, strict=True)), sum(
        prod(high - low for low, high in box) for box in found
    )


def _box(origin: Origin, shape: tuple[int, ...]) -> Any:
    return tuple((low, low + size) for low, size in zip(origin or (0,) * len(shape), shape, strict=True))


def _low(box: Any) -> Origin:
    return None if box is None else tuple(low for low, _ in box)


def _plus(a: Origin, b: Origin) -> Origin:
    return b if a is None else a if b is None else tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Origin, b: Origin) -> Origin:
    return a if b is None else tuple(-y for y in b) if a is None else tuple(x - y for x, y in zip(a, b, strict=True))
