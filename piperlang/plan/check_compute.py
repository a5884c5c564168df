"""Passes of chunks: they take and give what their kind says.

Keys are names: `NAME#POINT` is the value NAME of a microbatch, `d:NAME:C.i` its gradient through input i of chunk C,
`dw:WEIGHT@C.i` that of weight i, `saved:C` what a forward keeps, and `w:WEIGHT@H'` what it makes of a buffer. So it can
be seen without a graph that a chunk is given what it is given elsewhere, and of one microbatch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from piperlang.ir.graph import COMPUTE, Key
from piperlang.ir.model import Slot
from piperlang.plan.check import At, Checked
from piperlang.plan.check_samples import placed, samples_seen, share_of

CODE = "P0504"
GIVEN = ("seed", "rng")
SUFFIX = re.compile(r"@\d+|[~!+]")
BUNDLES = ("saved", "kept")


def compute(checked: Checked) -> None:
    names = _Names(checked)
    seen: dict[int, At] = {}
    kinds, last = checked.plan.kinds, checked.plan.samples
    parts = [(kind["samples"], share_of(checked.plan, kind), kind["arranged"][0]) for kind in kinds]
    firsts: list[list[int]] = [[] for _ in kinds]
    for at in checked.all(*COMPUTE):
        do, stream, node, reads, writes, _, args = at[2]
        number = args["kind"]
        if not 0 <= number < len(kinds):
            checked.wrong(CODE, f"a pass of kind {number}, and there are {len(kinds)}", at)
            continue
        other = seen.setdefault(node, at)
        theirs = other[2][6]
        if other is at or theirs["reads"] != args["reads"] or other[2][4] != writes or other[2][3] != reads:
            checked.steps += len(reads) + len(writes)
            if _fits(checked, at, do, reads, writes, args["reads"], kinds[number]):
                names.learn(at, kinds[number])
            if other is not at:
                checked.wrong(CODE, "devices of one node do not read and write the same", other, at)
        if theirs["kind"] != number or other[2][1] != stream:
            checked.wrong(
                CODE,
                f"devices of one node run different {'pieces of the model' if theirs['kind'] != number else 'streams'}",
                other,
                at,
            )
        elif other[0] == at[0] and other is not at:
            checked.wrong(CODE, "a device does the same twice", other, at)
        firsts[number].append(args["first"])
        samples, share, divides = parts[number]
        if not 0 <= args["first"] <= last - samples or args.get("share", share) != share or divides or args["at"]:
            placed(checked, at, args, kinds[number], share)
    samples_seen(checked, firsts)


def _fits(
    checked: Checked,
    at: At,
    do: str,
    reads: Sequence[Key],
    writes: Sequence[Key],
    groups: Sequence[Sequence[Key]],
    kind: Mapping[str, Any],
) -> bool:
    """The right number of everything, and reads that say what is taken."""
    single = [slot for slot in kind["gives"] if slot[0] not in BUNDLES]
    least, most = (1, 1) if do == "R" else (len(single), len(single) + (do in ("F", "I")))
    if do != kind["op"]:
        return _no(checked, f"{do} of a piece that is a {kind['op']}", at)
    if len(groups) != len(kind["slots"]):
        return _no(checked, f"{len(groups)} things are read for {len(kind['slots'])} slots", at)
    if tuple([key for keys in groups for key in keys if key not in GIVEN]) != tuple(reads):
        return _no(checked, "a pass does not take what it says it reads", at)
    if not least <= len(writes) <= most:
        return _no(checked, f"{len(writes)} values are written, and a {do} gives {least}", at)
    for name in ("weight", "input", "batch"):
        taken = [keys for slot, keys in zip(kind["slots"], groups, strict=True) if slot[0] == name]
        if len(set(map(tuple, taken))) < len(taken):
            return _no(checked, f"the same {name} is taken twice", at)
    for slot, keys in zip(kind["slots"], groups, strict=True):
        if len(keys) != 1 and slot[0] != "grad_output":
            return _no(checked, f"{len(keys)} values for {_slot(slot)}", at)
        if slot[0] == "grad_output" and not keys and slot[1] not in at.does.args.get("zeros", {}):
            return _no(checked, f"no gradient for {_slot(slot)}", at)
    return True


def _no(checked: Checked, message: str, at: At) -> bool:
    checked.wrong(CODE, message, at)
    return False


def _slot(slot: Slot) -> str:
    return f"{slot[0].replace('_', ' of ')} {slot[1]}"


class _Names:
    """What stands in each slot of each chunk, as the passes of all microbatches say."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self.known: dict[tuple[int, str, int], tuple[str, At]] = {}
        self.makers: dict[str, tuple[int, At]] = {}

    def learn(self, at: At, kind: Mapping[str, Any]) -> None:
        chunk, writes = kind["chunk"], at.does.writes
        gives = [("saved", 0)] if at.does.do == "R" else [slot for slot in kind["gives"] if slot[0] not in BUNDLES]
        if len(writes) > len(gives):
            gives.append(("saved" if at.does.do == "F" else "kept", 0))
        point = _point(writes[0].partition("#")[2])
        for slot, keys in (
            *zip(kind["slots"], at.does.args["reads"], strict=True),
            *((slot, (key,)) for slot, key in zip(gives, writes, strict=True)),
        ):
            for key in keys:
                base, _, where = key.partition("#")
                if key not in GIVEN:
                    self._one(at, chunk, slot, base, key)
                    if not _same_piece(_point(where), point) and slot[0] != "weight":
                        self.checked.wrong(CODE, f"{key} is of another part of the batch than {writes[0]}", at)
        for slot, key in zip(gives, writes, strict=True):
            if slot[0] == "output":
                maker = self.makers.setdefault(key.partition("#")[0], (chunk, at))
                if maker[0] != chunk:
                    self.checked.wrong(CODE, f"two chunks make {key.partition('#')[0]}", maker[1], at)

    def _one(self, at: At, chunk: int, slot: Slot, base: str, key: Key) -> None:
        said = _said(slot, base, chunk)
        if said is None:
            self.checked.wrong(CODE, f"{key} is no {_slot(slot)} of chunk {chunk}", at)
            return
        name, other = self.known.setdefault((chunk, slot[0].removeprefix("grad_"), slot[1]), (said, at))
        if name != said:
            self.checked.wrong(CODE, f"{_slot(slot)} of chunk {chunk} is {said} here and {name} elsewhere", other, at)


def _said(slot: Slot, base: str, chunk: int) -> str | None:
    """The name in a key, if it can stand in the slot."""
    kind, i = slot
    head, _, rest = base.partition(":")
    if kind in BUNDLES:
        return kind if base == f"{kind}:{chunk}" else None
    if kind == "weight":
        name, _, home = rest.rpartition("@")
        return name if head == "w" and (":" not in home or home.partition(":")[2][:-1] == str(chunk)) else None
    if kind == "grad_weight":
        return rest.rpartition("@")[0] if head == "dw" and rest.endswith(f"@{chunk}.{i}") else None
    if kind == "batch":
        name, _, reader = base.rpartition("@")
        return name if reader == str(chunk) else None
    if kind in ("grad_input", "grad_output"):
        name, _, reader = rest.rpartition(":")
        return name if head == "d" and (kind == "grad_output" or reader == f"{chunk}.{i}") else None
    if head == "w" and base.endswith("'"):
        return f"w:{rest.rpartition('@')[0]}"  # what a buffer becomes
    return base if head not in ("w", "d", "dw", "g", "saved", "kept", "host", "now") or not rest else None


def _point(where: str) -> str:
    return SUFFIX.sub("", where).replace("/", ".").strip(".")


def _same_piece(a: str, b: str) -> bool:
    """Of the same microbatch, or one of a part of the other's."""
    return a == b or not a or not b or a.startswith(f"{b}.") or b.startswith(f"{a}.")
