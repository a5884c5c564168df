"""Two devices that talk to each other must mean the same, message by message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from piperlang.ir.graph import Key
from piperlang.plan.check import At, Checked
from piperlang.plan.instruction import ROUTES

CODE = "P0503"
Message = tuple[int, int, int]
"""From, to, and the tag."""
BOTH = "both ends of a communication come from one node of the graph; make the plan again"


# ------------------------------------------------------------------------------------------------- by themselves


def moves(checked: Checked) -> None:
    """Whatever puts parts together must fill what it gives, each element once, and say in its reads what it takes."""
    for at in checked.of["send"]:
        reads, args = at[2][3], at[2][6]
        key = args["key"]
        if (reads != (key,)) if key is not None else reads:
            checked.wrong("P0504", f"a send of {key} that reads {_listed(reads)}", at)
        for _, _, box, shape in args["parts"]:
            if box is not None and size_of(box) != shape:
                checked.wrong(CODE, f"a send takes {box} and calls it {list(shape)}", at)
    for at in checked.of["recv"]:
        args = at[2][6]
        parts = args["parts"]
        if len(parts) != 1 or args["own"] or parts[0][2] is not None or parts[0][3] != args["shape"] or at[2][3]:
            _filled(checked, at, args)
    for at in checked.all("copy", "exchange"):
        _filled(checked, at, at.does.args)
    for at in checked.all("copy", "exchange", *ROUTES, "all_reduce"):
        for key in at.does.reads[: 1 if at.does.do in ROUTES else None]:
            _moved(checked, key, at.does.writes[0], at, at)


def _filled(checked: Checked, at: At, args: Mapping[str, Any]) -> None:
    own = args.get("own", ())
    shape = tuple(args["shape"])
    boxes = [part[-2] for part in args.get("parts", args.get("take", ()))] + [box for _, *both in own for box in both]
    if min(shape, default=0) < 0 or any(box is not None and len(box) != len(shape) for box in boxes):
        checked.wrong(
            CODE,
            f"{at.does.do} moves parts with other dims than its result {list(shape)}",
            at,
            notes=(f"they are {boxes}",),
        )
        return
    taking = [(box, size) for *_, box, size in args.get("parts", args.get("take", ()))]
    checked.steps += len(taking) + len(own)
    if at.does.do != "exchange" and set(at.does.reads) != {key for key, _, _ in own} and (own or at.does.do == "recv"):
        checked.wrong(
            "P0504", f"{at.does.do} reads {_listed(at.does.reads)} and moves {_listed([key for key, _, _ in own])}", at
        )
    for box, size in [*taking, *((put, size_of(taken)) for _, taken, put in own)]:
        if tuple(size) != (shape if box is None else size_of(box)):
            checked.wrong(CODE, f"{at.does.do} puts {list(size)} into {box or list(shape)}", at)
    boxes = [box for box, _ in taking] + [put for _, _, put in own]
    if (boxes or at.does.do != "copy") and not fills(boxes, shape):
        checked.wrong(
            CODE, f"the parts of {at.does.do} do not make up its result {list(shape)}", at, notes=(f"they are {boxes}",)
        )


def _moved(checked: Checked, key: Key, arrived: Key, source: At, target: At) -> None:
    """Values keep their names when they move: what arrives is called what was sent, and a suffix. Joined parts are
    called by what they share."""
    if not arrived.startswith(key) and not (arrived.endswith("+") and key.startswith(arrived[:-1])):
        checked.wrong("P0504", f"{key} cannot become {arrived}", source, target)


def fills(boxes: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Whether boxes (None: all of it) make up a shape, without a gap and without overlapping."""
    if len(boxes) == 1:
        return (
            boxes[0] is None
            or all(low == 0 and high == size for (low, high), size in zip(boxes[0], shape, strict=True))
            or not prod(shape)
        )
    if None in boxes:
        return False
    inside = all(0 <= low <= high <= size for box in boxes for (low, high), size in zip(box, shape, strict=True))
    return (
        inside
        and sum(prod(size_of(box)) for box in boxes) == prod(shape)
        and apart([box for box in boxes if prod(size_of(box))], 0, len(shape))
    )


def apart(boxes: list[Any], dim: int, dims: int) -> bool:
    """Whether no two boxes overlap: they are parted along one dim after the other, so that many parts do not take their
    square."""
    if len(boxes) < 2:
        return True
    if dim == dims:
        return False
    boxes.sort(key=lambda box: box[dim])
    cluster, end = [boxes[0]], boxes[0][dim][1]
    clusters = [cluster]
    for box in boxes[1:]:
        if box[dim][0] >= end:
            cluster = []
            clusters.append(cluster)
        cluster.append(box)
        end = max(end, box[dim][1])
    return all(apart(part, dim + 1, dims) for part in clusters)


def size_of(box: Any) -> tuple[int, ...]:
    return tuple([high - low for low, high in box])


def _listed(keys: Sequence[Key]) -> str:
    return ", ".join(keys) or "nothing"


# ------------------------------------------------------------------------------------------------------ messages


def messages(checked: Checked) -> None:
    """Every part that is sent is received once, as what it was sent."""
    numbers = [device.device for device in checked.plan.devices]
    sent: dict[Message, tuple[At, Any]] = {}
    for at in checked.of["send"]:
        me = numbers[at[0]]
        for target, tag, _, shape in at[2][6]["parts"]:
            message = me, target, tag
            if message in sent:
                checked.wrong(
                    CODE,
                    f"device {me} sends device {target} two messages with tag {tag}",
                    sent[message][0],
                    at,
                    help=BOTH,
                )
            sent[message] = at, shape
    checked.steps += 2 * len(sent)
    alone: list[tuple[Message, At]] = []
    for at in checked.of["recv"]:
        me, args = numbers[at[0]], at[2][6]
        for source, tag, _, shape in args["parts"]:
            partner = sent.pop((source, me, tag), None)
            if partner is None:
                alone.append(((source, me, tag), at))
                continue
            other, gives = partner
            given = other[2][6]
            if shape != gives or args["dtype"] != given["dtype"]:
                what = f"{given['dtype']}{list(gives)} is sent and {args['dtype']}{list(shape)} received"
                checked.wrong(CODE, f"from device {source} to device {me}, {what}", other, at, help=BOTH)
            if not at[2][4][0].startswith(given["key"] or "now:"):
                _moved(checked, given["key"] or "a signal", at.does.writes[0], other, at)
    checked.steps += 2 * len(checked.of["recv"])
    _unpaired(checked, [(message, at) for message, (at, _) in sent.items()], alone)


def _unpaired(checked: Checked, sent: list[tuple[Message, At]], received: list[tuple[Message, At]]) -> None:
    """What is left over on both sides between the same two devices was most likely meant for each other; failing that,
    at either of them."""
    for message, at in received:
        source, target, tag = message
        twice = _again(checked, message, at)
        if twice is not None:
            checked.wrong(
                CODE, f"device {target} receives message {tag} of device {source} twice", twice, at, help=BOTH
            )
            continue
        likely = [other for other in sent if other[0][:2] == (source, target)] or [
            other for other in sent if other[0][0] == source or other[0][1] == target
        ]
        if not likely:
            checked.wrong(
                CODE, f"device {target} waits for message {tag} of device {source}, which nobody sends", at, help=BOTH
            )
            continue
        near, other = min(likely, key=lambda found: abs(found[0][2] - tag))
        sent.remove((near, other))
        checked.wrong(
            CODE,
            f"device {target} waits for message {tag} of device {source}, but message {near[2]} is sent from {near[0]}"
            f" to {near[1]}",
            other,
            at,
            help=BOTH,
        )
    for (source, target, tag), at in sent:
        checked.wrong(
            CODE, f"device {source} sends device {target} message {tag}, which nobody receives", at, help=BOTH
        )


def in_order(checked: Checked) -> None:
    """Without tags messages are told apart by their order alone: both ends must have the same, and each in one
    stream."""
    numbers = [device.device for device in checked.plan.devices]
    sent: dict[tuple[int, int], list[tuple[int, At]]] = {}
    received: dict[tuple[int, int], list[tuple[int, At]]] = {}
    for at in checked.of["send"]:
        for part in at.does.args["parts"]:
            sent.setdefault((numbers[at.device], part[0]), []).append((part[1], at))
    for at in checked.of["recv"]:
        for part in at.does.args["parts"]:
            received.setdefault((part[0], numbers[at.device]), []).append((part[1], at))
    for (source, target), messages in sent.items():
        for (tag, one), (other, two) in zip(messages, received[source, target], strict=True):
            if tag != other:
                checked.wrong(
                    CODE,
                    f"device {target} takes message {other} of device {source} where message {tag} is sent",
                    one,
                    two,
                    help="without tags, messages must be received in the order in which they are sent",
                )
                break


def _again(checked: Checked, message: Message, late: At) -> At | None:
    """Who has received a message already."""
    source, target, tag = message
    for at in checked.of["recv"]:
        if (
            checked.plan.devices[at.device].device == target
            and (at.device, at.place) != (late.device, late.place)
            and any(part[:2] == (source, tag) for part in at.does.args["parts"])
        ):
            return at
    return None
