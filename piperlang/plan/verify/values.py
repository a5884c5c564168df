"""Every value is made once, before it is read, and for somebody."""

from __future__ import annotations

from collections.abc import Sequence

from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import ROUTING, Instruction
from piperlang.plan.plan import DevicePlan
from piperlang.plan.verify.report import At, Checked

CODE = "P0504"
LATE = "a wait for the first of these instructions is missing from the second, or comes too late"
SPMD = ("all_to_all", *ROUTING, "all_reduce", "gather", "scatter", "update", "copy", "offload", "fetch")
"""What is the same on all devices of a node, except what is declared to differ by rank; compute.py looks at passes."""


def values(checked: Checked) -> None:
    used: set[ValueId] = set()
    known: dict[object, int] = {}
    for d, device in enumerate(checked.plan.devices):
        same = known.setdefault(_signature(device), d)
        if same != d:
            checked.made.append(checked.made[same])
            checked.steps += len(device.instructions)
            continue
        made = _made(checked, d, device)
        checked.made.append(made)
        _read(checked, d, device, made, used)
        _kept(checked, d, device, made)
        used.update(device.losses)
        used.update(device.next.values())
    _alike(checked)
    _unread(checked, used)


def _signature(device: DevicePlan) -> object:
    """Equal for devices that make and read the same values in the same order, as replicas do: of those, one is looked
    at."""
    streams: dict[str, int] = {}
    steps = tuple(
        [
            (x.op == "update", streams.setdefault(x.stream, len(streams)), x.reads, x.writes, x.waits)
            for x in device.instructions
        ]
    )
    return (
        steps,
        tuple(device.weights),
        tuple([key for key, _, _ in device.feeds]),
        tuple(device.next.items()),
        tuple(device.losses),
    )


def _made(checked: Checked, d: int, device: DevicePlan) -> dict[ValueId, int]:
    made: dict[ValueId, int] = {}
    instructions = device.instructions
    for i, instruction in enumerate(instructions):
        for key in instruction.writes:
            if key in made:
                checked.wrong(
                    CODE,
                    f"{key} is made twice on device {device.device}",
                    At(d, made[key], instructions[made[key]]),
                    At(d, i, instruction),
                )
            made[key] = i
    fed: set[ValueId] = set()
    for key in (*device.weights, *(key for key, _, _ in device.feeds)):
        if key in made:
            checked.wrong(
                CODE,
                f"{key} is on device {device.device} from the start, and is made there again",
                At(d, made[key], instructions[made[key]]),
            )
        if key in fed:
            checked.wrong(
                CODE,
                f"{key} is given to device {device.device} twice",
                *([At(d, 0, instructions[0])] if instructions else []),
            )
        fed.add(key)
    return made


def _read(checked: Checked, d: int, device: DevicePlan, made: dict[ValueId, int], used: set[ValueId]) -> None:
    """A read after the write in the same stream, or behind a wait for it."""
    instructions = device.instructions
    given = device.weights.keys() | {key for key, _, _ in device.feeds}
    streams = [instruction.stream for instruction in instructions]
    before: _Before | None = None
    readers: dict[ValueId, list[int]] = {key: [] for key in device.weights}
    for i, x in enumerate(instructions):
        stream, reads, waits = x.stream, x.reads, x.waits
        ended = waits if len(waits) < 8 else frozenset(waits)
        for key in reads:
            maker = made.get(key)
            if maker is None:
                if key in readers:
                    readers[key].append(i)
                elif key not in given:
                    _missing(checked, At(d, i, instructions[i]), key, device)
                continue
            if maker in ended or (maker < i and streams[maker] == stream):
                continue
            before = before or _Before(instructions, streams)
            if not before.surely(maker, i):
                checked.wrong(
                    CODE,
                    f"{key} is read on stream {stream} of device {device.device} before stream {streams[maker]} has"
                    " surely made it",
                    At(d, maker, instructions[maker]),
                    At(d, i, instructions[i]),
                    help=LATE,
                )
        checked.steps += 1 + len(reads)
    used.update(*[instruction.reads for instruction in instructions])
    for key, found in readers.items():
        if not found and key not in device.next:  # a buffer may be written without being read
            checked.wrong(
                CODE,
                f"device {device.device} keeps {key}, which nobody reads",
                *([At(d, 0, instructions[0])] if instructions else []),
            )
    _in_place(checked, d, device, readers, before)


def _in_place(
    checked: Checked, d: int, device: DevicePlan, readers: dict[ValueId, list[int]], before: _Before | None
) -> None:
    """An update changes the weight itself: whoever reads the old one must have ended."""
    instructions = device.instructions
    for i, update in enumerate(instructions):
        if update.op != "update":
            continue
        ended = {update.stream: i - 1}
        for other in update.waits:
            ended[instructions[other].stream] = max(other, ended.get(instructions[other].stream, -1))
        for old in [key for key in update.reads if key in readers]:
            checked.steps += len(readers[old])
            for reader in readers[old]:
                if reader == i or reader <= ended.get(instructions[reader].stream, -1):
                    continue
                before = before or _Before(instructions, [x.stream for x in instructions])
                if not before.surely(reader, i):
                    checked.wrong(
                        CODE,
                        f"{old} is changed in place on device {device.device} while it may still be read",
                        At(d, reader, instructions[reader]),
                        At(d, i, update),
                        help=LATE,
                    )


def _missing(checked: Checked, at: At, key: ValueId, device: DevicePlan) -> None:
    elsewhere = next(
        (
            At(d, i, x)
            for d, other in enumerate(checked.plan.devices)
            for i, x in enumerate(other.instructions)
            if key in x.writes
        ),
        None,
    )
    notes = () if elsewhere else ("nobody makes it",)
    checked.wrong(
        CODE,
        f"device {device.device} reads {key}, which is not there",
        at,
        *([elsewhere] if elsewhere else []),
        notes=notes,
    )


class _Before:
    """Which instructions have ended when another one starts: for each, the latest of every stream."""

    def __init__(self, instructions: Sequence[Instruction], streams: Sequence[str]) -> None:
        self.streams = streams
        self.latest: list[dict[str, int]] = []
        last: dict[str, int] = {}
        for i, instruction in enumerate(instructions):
            known: dict[str, int] = {}
            before = last.get(streams[i])
            for j in (*instruction.waits, *(() if before is None else (before,))):
                for stream, k in (*self.latest[j].items(), (streams[j], j)):
                    if known.get(stream, -1) < k:
                        known[stream] = k
            self.latest.append(known)
            last[streams[i]] = i

    def surely(self, earlier: int, later: int) -> bool:
        return self.latest[later].get(self.streams[earlier], -1) >= earlier


def _kept(checked: Checked, d: int, device: DevicePlan, made: dict[ValueId, int]) -> None:
    instructions = device.instructions
    for old, new in device.next.items():
        if old not in device.weights or new not in made:
            readers = [
                At(d, i, x)
                for i, x in sorted(enumerate(instructions), key=lambda one: one[1].op != "update")
                if old in x.reads or new in x.writes
            ][:1]
            checked.wrong(
                CODE, f"device {device.device} should keep {new} as the next {old}, and does not have it", *readers
            )
    for key in device.losses:
        if key not in made:
            checked.wrong(
                CODE,
                f"device {device.device} counts {key}, which it does not compute",
                *([At(d, 0, instructions[0])] if instructions else []),
            )


def _alike(checked: Checked) -> None:
    """All devices of a node read and write the same values, on the same stream, as the same thing."""
    first: dict[int, At] = {}
    for at in checked.all(*SPMD):
        other = first.setdefault(at.does.node, at)
        if other is at:
            continue
        mine, theirs = at.does, other.does
        if (differing := _differing(mine, theirs)) is not None:
            checked.wrong(CODE, f"devices of one node differ in its {differing}", other, at)
        elif at.device == other.device and at.place != other.place:
            checked.wrong(CODE, f"device {checked.plan.devices[at.device].device} does the same twice", other, at)


def _differing(mine: Instruction, theirs: Instruction) -> str | None:
    if type(mine) is not type(theirs):
        return "kind"
    for name in ("stream", "reads", "writes", *mine.shared):
        if getattr(mine, name) != getattr(theirs, name):
            return name
    return None


def _unread(checked: Checked, used: set[ValueId]) -> None:
    """A value that nobody reads is a value that somebody lost. Only activations may turn out not to be needed, and of
    what has no samples one microbatch's may do for all."""
    bases: set[ValueId] = set()
    seen: set[ValueId] = set()
    for d, made in enumerate(checked.made):
        for key in sorted(made.keys() - used - seen):
            seen.add(key)
            at = At(d, made[key], checked.plan.devices[d].instructions[made[key]])
            bases = bases or {other.every_microbatch for other in used}
            if key.kind not in (Kind.SIGNAL, Kind.SAVED, Kind.RESIDUALS) and (
                at.does.op != "F" or key.every_microbatch not in bases
            ):
                checked.wrong(CODE, f"nobody reads {key}", at)
