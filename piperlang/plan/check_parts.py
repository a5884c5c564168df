"""Where parts of values lie: what one device cuts out is what another puts in its place.

A plan does not say which part of a tensor a device has, only which box of its own it gives, and where others put it.
Each such move fixes where two devices' parts lie to each other. A gradient lies where its value lies. All of it must
fit together, and what arrives must be all that was there."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

from piperlang.ir.graph import COMPUTE, Key
from piperlang.plan.check import At, Checked
from piperlang.plan.check_partners import apart

CODE = "P0503"
Origin = tuple[int, ...] | None
"""Where something begins; None for zero in every dim, however many there are."""


class Move(NamedTuple):
    """A part of one device's value that becomes a part of another's."""

    source: At
    key: Key
    taken: Any
    target: At
    put: Any


def parts(checked: Checked) -> None:
    cut: set[str] = set()
    for at in checked.of["send"]:
        for part in at[2][6]["parts"]:
            if part[2] is not None:
                cut.add(_name(at.does.args["key"]))
    for at in checked.of["recv"]:
        if at[2][6]["own"] or at[2][6]["parts"][0][2] is not None:
            cut.add(_name(at.does.writes[0]))
    cut.update(_name(at.does.writes[0]) for at in checked.all("copy", "exchange", "all_reduce"))
    if cut:
        _Parts(checked, cut).run()


def _name(key: Key) -> str:
    """Of a value, and of its gradient alike."""
    base = key.partition("#")[0]
    return base[2:].rpartition(":")[0] if base.startswith("d:") else base


class _Parts:
    def __init__(self, checked: Checked, cut: set[str]) -> None:
        self.checked, self.cut = checked, cut
        self.number = [device.device for device in checked.plan.devices]
        self.root: dict[tuple[int, Key], tuple[int, Key]] = {}
        self.offset: dict[tuple[int, Key], Origin] = {}
        self.shape: dict[tuple[int, Key], tuple[int, ...]] = {}

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
            (self.number[at.device], part[0], part[1]): (at, part[2])
            for at in self.checked.of["send"]
            for part in at.does.args["parts"]
            if at.does.args["key"] is not None
        }
        for at in self.checked.of["recv"]:
            for source, tag, put, _ in at.does.args["parts"]:
                found = sent.get((source, self.number[at.device], tag))
                if found is not None:
                    yield Move(found[0], found[0].does.args["key"], found[1], at, put)
        for at in self.checked.all("recv", "copy"):
            for key, taken, put in at.does.args["own"]:
                yield Move(at, key, taken, at, put)
        for at in self.checked.of["all_reduce"]:
            yield Move(at, at.does.reads[0], at.does.args["keep"], at, None)
        yield from self._exchanged()

    def _exchanged(self) -> Iterator[Move]:
        there: dict[tuple[int, int], At] = {
            (at.does.node, self.number[at.device]): at for at in self.checked.of["exchange"]
        }
        for at in self.checked.of["exchange"]:
            seen: dict[int, int] = {}
            for peer, put, _ in at.does.args["take"]:
                source = there[at.does.node, peer]
                mine = [box for target, box, _ in source.does.args["give"] if target == self.number[at.device]]
                yield Move(source, source.does.reads[0], mine[seen.get(peer, 0)], at, put)
                seen[peer] = seen.get(peer, 0) + 1

    def _shapes(self) -> None:
        for at in self.checked.all("recv", "copy", "exchange"):
            self.shape[at.device, at.does.writes[0]] = tuple(at.does.args["shape"])
        for at in self.checked.of["all_reduce"]:
            args = at.does.args
            self.shape[at.device, at.does.reads[0]] = tuple(args["shape"])
            self.shape[at.device, at.does.writes[0]] = (
                tuple(args["shape"]) if args["keep"] is None else tuple(high - low for low, high in args["keep"])
            )
        for at in self.checked.of["send"]:
            if at.does.args["key"] is not None and at.does.args["parts"][0][2] is None:
                self.shape.setdefault((at.device, at.does.args["key"]), tuple(at.does.args["parts"][0][3]))

    # ---------------------------------------------------------------------------------------------- who lies where

    def _find(self, item: tuple[int, Key]) -> tuple[tuple[int, Key], Origin]:
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

    def _relate(self, one: tuple[int, Key], two: tuple[int, Key], distance: Origin) -> bool:
        """`two` begins `distance` after `one`; False if that cannot be."""
        (a, to_one), (b, to_two) = self._find(one), self._find(two)
        gap = _minus(_plus(to_one, distance), to_two)
        if a == b:
            return gap is None or not any(gap)
        self.root[b], self.offset[b] = a, gap
        return True

    def _gradients(self) -> bool:
        """A gradient lies where its value lies, and is as large."""
        forward: dict[tuple[int, int, str, str, int], tuple[Key, At]] = {}
        for backward in (False, True):
            for at in self.checked.all(*COMPUTE):
                kind = self.checked.plan.kinds[at.does.args["kind"]]
                if at.does.do == "R" or backward != (at.does.do != "F"):
                    continue
                piece = at.does.writes[0].partition("#")[2]
                named = [
                    (slot, key) for slot, keys in zip(kind["slots"], at.does.args["reads"], strict=True) for key in keys
                ] + list(zip(kind["gives"], at.does.writes, strict=False))
                for (what, i), key in named:
                    if (
                        key == "seed"
                        or what.removeprefix("grad_") not in ("input", "output")
                        or _name(key) not in self.cut
                    ):
                        continue
                    place = at.device, kind["chunk"], piece, what.removeprefix("grad_"), i
                    if not backward:
                        forward[place] = key, at
                    elif what.startswith("grad_") and place in forward and not self._same(*forward[place], key, at):
                        return False
        return True

    def _same(self, value: Key, made: At, gradient: Key, at: At) -> bool:
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
        before: dict[tuple[Any, str], dict[Any, At] | None] = {}
        after: dict[tuple[Any, str], dict[Any, At] | None] = {}
        for move in moved:
            arrived = move.target.does.writes[0]
            name = f"{move.key}/" if arrived.startswith(f"{move.key}/") else arrived
            for side, at, key in ((before, move.source, move.key), (after, move.target, arrived)):
                root, origin = self._find((at.device, key))
                shape = self.shape.get((at.device, key))
                group = root, name
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
                    CODE,
                    f"not all of {group[1].rstrip('/')} arrives, or some of it twice",
                    *([one] if one is not two else []),
                    two,
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
