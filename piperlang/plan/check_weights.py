"""Weights and gradients: in the parts that devices keep them in, all of each counted once, and updated once.

What a device has of a weight is a box of it and, where ZeRO divides further, an interval of that. Gathers, reductions
and updates are followed from interval to interval: a cut that does not fit its neighbours shows where it meets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any

from piperlang.ir.graph import Key
from piperlang.plan.check import At, Checked
from piperlang.plan.clip import part_of
from piperlang.plan.instruction import NORM

CODE = "P0504"
Interval = tuple[int, int]
WEIGHTS = frozenset(("gather", "scatter", "reduce", "update"))


def entries(checked: Checked) -> None:
    """Reads and writes say what the entries take and give, and an entry is about one weight."""
    for at in checked.all("gather", "scatter", "reduce"):
        reads: list[Key] = []
        for entry in at.does.args["weights"]:
            reads += entry["from"]
            checked.steps += 1 + len(entry["cuts"])
            if at.does.do != "reduce" and len(entry["cuts"]) != len(at.does.args.get("members", ())):
                checked.wrong(
                    "P0503", f"{len(entry['cuts'])} parts for {len(at.does.args.get('members', ()))} members", at
                )
            names = {weight_of(key) for key in (*entry["from"], entry["to"])}
            if len(names) > 1 or not entry["from"]:
                checked.wrong(CODE, f"{at.does.do} makes {entry['to']} of {', '.join(entry['from']) or 'nothing'}", at)
            if at.does.do != "reduce" and not _partition(entry["cuts"], prod(entry["shape"])):
                checked.wrong(
                    "P0503",
                    f"the parts {entry['cuts']} do not make up the {prod(entry['shape'])} elements of {entry['to']}",
                    at,
                )
        _same(checked, at, reads, [entry["to"] for entry in at.does.args["weights"]])
    for at in checked.all("update"):
        found = at.does.args["weights"]
        for entry in found:
            names = {weight_of(key) for key in (entry["old"], entry["new"], *entry["grads"])}
            if names != {entry["weight"]} or not entry["grads"]:
                checked.wrong(
                    CODE,
                    f"an update of {entry['weight']} that makes {entry['new']} of {entry['old']} and"
                    f" {', '.join(entry['grads'])}",
                    at,
                )
        clips = [NORM] if checked.of["norm"] else []
        _same(
            checked,
            at,
            [*(key for entry in found for key in (entry["old"], *entry["grads"])), *clips],
            [entry["new"] for entry in found],
        )
    for at in checked.all("norm"):
        _same(checked, at, [key for entry in at.does.args["weights"] for key in entry["grads"]], [NORM])
    for at in checked.all("offload", "fetch"):
        before, after = ("saved:", "host:") if at.does.do == "offload" else ("host:", "saved:")
        (read,), (written,) = at.does.reads, at.does.writes
        if read.replace(before, after, 1) != written.removesuffix("!"):
            checked.wrong(CODE, f"{at.does.do} makes {written} of {read}", at)


def _same(checked: Checked, at: At, reads: list[Key], writes: list[Key]) -> None:
    if tuple(reads) != at.does.reads or tuple(writes) != at.does.writes:
        checked.wrong(CODE, f"{at.does.do} does not take and give what it says it reads and writes", at)


@lru_cache(maxsize=65536)
def weight_of(key: Key) -> str:
    """`g:WEIGHT@home:...`, and so for weights and their gradients."""
    return key.partition(":")[2].rpartition("@")[0]


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

    def __init__(self, checked: Checked, d: int, weights: Mapping[Key, Mapping[str, Any]]) -> None:
        self.checked, self.d, self.weights = checked, d, weights
        self.device = checked.plan.devices[d]
        self.has: dict[Key, Interval] = {}
        self.maker: dict[Key, At] = {}
        self.length: dict[str, int] = {}
        self.counted: dict[Key, At] = {}
        for key, held in weights.items():
            size = prod(high - low for low, high in held["box"])
            self.length[weight_of(key)] = size
            self.has[key] = tuple(held["flat"]) if held["flat"] is not None else (0, size)

    def run(self) -> None:
        for i, x in enumerate(self.device.instructions):
            if x[0] in WEIGHTS:
                self._one(At(self.d, i, x))
            elif x[0] == "F":
                self._changes(At(self.d, i, x))
        self._next()
        made = self.checked.made[self.d]
        for key in made.keys() - self.counted.keys():
            if key.startswith(("dw:", "g:")):
                self.checked.wrong(
                    CODE,
                    f"{key} is a part of a gradient that device {self.device.device} does not use",
                    At(self.d, made[key], self.device.instructions[made[key]]),
                )

    def _changes(self, at: At) -> None:
        """Buffers that a forward changes: each once, and all of it."""
        for key in at.does.writes:
            if key.startswith("w:") and "#" not in key:  # of all parts of the batch, one is kept
                old = key.rstrip("'")
                if old not in self.weights or self.device.next.get(old) != key:
                    self.checked.wrong(
                        CODE, f"device {self.device.device} changes {old} and does not keep the result", at
                    )
                if self.counted.setdefault(old, at) is not at:
                    self._twice(old, at)
                self._has(key, (0, self.length.get(weight_of(key), -1)), at)

    def _twice(self, key: Key, at: At) -> None:
        self.checked.wrong(CODE, f"{key} is counted twice on device {self.device.device}", self.counted[key], at)

    def _one(self, at: At) -> None:
        args, me, gathers = at.does.args, self.device.device, at.does.do == "gather"
        for entry in args["weights"]:
            if at.does.do == "update":
                self._update(at, entry)
                continue
            size = prod(entry["shape"])
            cut = entry["cuts"][list(args["members"]).index(me)] if at.does.do != "reduce" else (0, size)
            wanted = cut[1] - cut[0] if gathers else size
            # A gradient that a pass made is of all that the device has of its weight.
            length = self.length.get(weight_of(entry["to"]), -1)
            whole = 0, length
            for key in entry["from"]:
                low, high = self.has.get(key, whole)
                if high - low != wanted or (gathers and size == length and (low, high) != tuple(cut)):
                    self._odd(at, key, f"takes {wanted} elements of {key}, which has {low} to {high}")
                if not gathers and self.counted.setdefault(key, at) is not at:
                    self._twice(key, at)
            low = self.has.get(entry["from"][0], whole)[0]
            self._has(entry["to"], (low - cut[0], low - cut[0] + size) if gathers else (low + cut[0], low + cut[1]), at)

    def _update(self, at: At, entry: Mapping[str, Any]) -> None:
        if entry["old"] not in self.weights or self.weights[entry["old"]]["weight"] != entry["weight"]:
            self.checked.wrong(CODE, f"device {self.device.device} does not keep {entry['old']}", at)
            return
        if entry["old"] not in self.device.next:
            self.checked.wrong(
                CODE, f"device {self.device.device} updates {entry['old']} and does not keep the result", at
            )
        mine = _cut(self.has[entry["old"]], entry["take"])
        for key in entry["grads"]:
            theirs = _cut(self.has.get(key, (0, self.length.get(entry["weight"], -1))), entry["take_grad"])
            if mine != theirs or mine is None:
                self._odd(at, key, f"updates {mine} of {entry['old']} with {theirs} of {key}")
            if self.counted.setdefault(key, at) is not at:
                self._twice(key, at)
        if self.counted.setdefault(entry["old"], at) is not at:
            self._twice(entry["old"], at)
        if mine is not None:
            self._has(entry["new"], mine, at)

    def _has(self, key: Key, part: Interval, at: At) -> None:
        self.has[key], self.maker[key] = part, at

    def _odd(self, at: At, key: Key, message: str) -> None:
        other = self.maker.get(key)
        self.checked.wrong(CODE, f"{at.does.do} {message}", *([other] if other else []), at)

    def _next(self) -> None:
        for old, new in self.device.next.items():
            at = self.maker.get(new)
            if weight_of(old) != weight_of(new) or self.has.get(new) != self.has.get(old) or new.rstrip("'") != old:
                self.checked.wrong(
                    CODE,
                    f"device {self.device.device} keeps {self.has.get(old)} of {old}, and {new} would be"
                    f" {self.has.get(new)}",
                    *([at] if at else []),
                )
        for key, held in self.weights.items():
            if held["weight"] != weight_of(key):
                self.checked.wrong(CODE, f"device {self.device.device} keeps {held['weight']} as {key}")


def _cut(has: Interval, take: Any) -> Interval | None:
    """A part of an interval, in the coordinates of the whole; None if it is not in it."""
    if take is None:
        return has
    low, high = has[0] + take[0], has[0] + take[1]
    return (low, high) if has[0] <= low <= high <= has[1] else None


def _norm(checked: Checked) -> None:
    """The norm is of just what updates use, and of each part of a gradient one device counts."""
    counting: dict[object, list[At]] = {}
    for at in checked.all("norm"):
        device = checked.plan.devices[at.device]
        updated = [entry for x in device.instructions if x.do == "update" for entry in x.args["weights"]]
        named = {tuple(entry["grads"]): entry for entry in at.does.args["weights"]}
        checked.steps += len(updated)
        if len(named) != len(at.does.args["weights"]) or {tuple(entry["grads"]) for entry in updated} != named.keys():
            checked.wrong(CODE, f"the norm on device {device.device} is not of the gradients that are used there", at)
            continue
        for entry in updated:
            mine = named[tuple(entry["grads"])]
            if (mine["weight"], mine["take_grad"]) != (entry["weight"], entry["take_grad"]):
                checked.wrong(
                    CODE,
                    f"the norm takes {mine['take_grad']} of the gradient of {mine['weight']}, and the update of"
                    f" {entry['weight']} {entry['take_grad']}",
                    at,
                )
            counts = counting.setdefault(part_of(device, entry), [])
            counts += [at] if mine["counts"] else []
    for part, counts in counting.items():
        if len(counts) != 1:
            checked.wrong(
                CODE, f"{len(counts)} devices count for the norm of {part}", *(counts or list(checked.all("norm"))[:1])
            )


def _boxes(checked: Checked) -> None:
    """Gradients are added up only where they are of the same part of a weight."""
    plan = checked.plan
    boxes = [{weight_of(key): tuple(held["box"]) for key, held in device.weights.items()} for device in plan.devices]
    first: dict[tuple[int, str], tuple[At, Any]] = {}
    for at in checked.all("reduce", "scatter"):
        for entry in at.does.args["weights"]:
            name = weight_of(entry["to"])
            mine = boxes[at.device].get(name)
            other, theirs = first.setdefault((at.does.args["group"], name), (at, mine))
            if mine != theirs or mine is None:
                checked.wrong("P0503", f"parts {theirs} and {mine} of {name} would be added up", other, at)
