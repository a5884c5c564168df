"""Two devices that talk to each other must mean the same, message by message."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.layout import Box
from piperlang.plan.instructions import ROUTING, AllToAll, Copy, LocalCopy, Receive, Send, Shape
from piperlang.plan.verify.report import At, Checked

CODE = "P0503"
MessageId = tuple[int, int, int]
"""From, to, and the tag."""
BOTH = "both ends of a communication come from one node of the graph; make the plan again"


# ------------------------------------------------------------------------------------------------- by themselves


def moves(checked: Checked) -> None:
    """Whatever puts parts together must fill its result, each element once."""
    for at, send in checked.each(Send):
        for _, _, box, shape in send.messages:
            if box is not None and size_of(box) != shape:
                checked.wrong(CODE, f"a send takes {box} and calls it {list(shape)}", at)
    for at, x in checked.each(Receive):
        first = x.messages[:1]
        if len(x.messages) != 1 or x.local or first[0].box is not None or first[0].shape != x.shape:
            _filled(checked, at, x.shape, [(one.box, one.shape) for one in x.messages], x.local)
    for at, copy in checked.each(Copy):
        moved = {one.source for one in copy.copies}
        if copy.copies and set(copy.sources) != moved:
            checked.wrong("P0504", f"copy reads {_listed(copy.sources)} and moves {_listed(sorted(moved))}", at)
        _filled(checked, at, copy.shape, [], copy.copies)
    for at, exchange in checked.each(AllToAll):
        _filled(checked, at, exchange.shape, [(one.box, one.shape) for one in exchange.take], ())
    for at in checked.all("copy", "all_to_all", *ROUTING, "all_reduce"):
        for key in at.does.reads[: 1 if at.does.op in ROUTING else None]:
            _moved(checked, key, at.does.writes[0], at, at)


def _filled(
    checked: Checked, at: At, shape: Shape, taking: list[tuple[Box | None, Shape]], own: Sequence[LocalCopy]
) -> None:
    boxes = [box for box, _ in taking] + [box for one in own for box in (one.taken, one.put)]
    if min(shape, default=0) < 0 or any(box is not None and len(box) != len(shape) for box in boxes):
        checked.wrong(
            CODE,
            f"{at.does.op} moves parts with other dims than its result {list(shape)}",
            at,
            notes=(f"they are {boxes}",),
        )
        return
    checked.steps += len(taking) + len(own)
    for box, size in [*taking, *((one.put, size_of(one.taken)) for one in own)]:
        if size != (shape if box is None else size_of(box)):
            checked.wrong(CODE, f"{at.does.op} puts {list(size)} into {box or list(shape)}", at)
    boxes = [box for box, _ in taking] + [one.put for one in own]
    if (boxes or not isinstance(at.does, Copy)) and not fills(boxes, shape):
        checked.wrong(
            CODE, f"the parts of {at.does.op} do not make up its result {list(shape)}", at, notes=(f"they are {boxes}",)
        )


def _moved(checked: Checked, key: ValueId, arrived: ValueId, source: At, target: At) -> None:
    """What arrives is what was sent, redistributed, or the microbatch that it is a part of."""
    if not arrived.follows(key) and not arrived.joins(key):
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


def _listed(keys: Sequence[ValueId]) -> str:
    return ", ".join(map(str, keys)) or "nothing"


# ------------------------------------------------------------------------------------------------------ messages


def messages(checked: Checked) -> None:
    """Every part that is sent is received once, as what it was sent."""
    numbers = [device.device for device in checked.plan.devices]
    sent: dict[MessageId, tuple[At, Send, Shape]] = {}
    for at, send in checked.each(Send):
        me = numbers[at.device]
        for target, tag, _, shape in send.messages:
            message = me, target, tag
            if message in sent:
                checked.wrong(
                    CODE,
                    f"device {me} sends device {target} two messages with tag {tag}",
                    sent[message][0],
                    at,
                    help=BOTH,
                )
            sent[message] = at, send, shape
    checked.steps += 2 * len(sent)
    alone: list[tuple[MessageId, At]] = []
    for at, x in checked.each(Receive):
        me = numbers[at.device]
        for source, tag, _, shape in x.messages:
            partner = sent.pop((source, me, tag), None)
            if partner is None:
                alone.append(((source, me, tag), at))
                continue
            other, sender, gives = partner
            if shape != gives or x.dtype != sender.dtype:
                what = f"{sender.dtype}{list(gives)} is sent and {x.dtype}{list(shape)} received"
                checked.wrong(CODE, f"from device {source} to device {me}, {what}", other, at, help=BOTH)
            gave, takes = checked.plan.resources(sender.stream), checked.plan.resources(x.stream)
            if gave != takes:
                what = f"`{gave or 'no resources'}` are those of stream {sender.stream}"
                checked.wrong(CODE, f"the ends of a message have streams with different resources: {what}", other, at)
            if not carries(sender.value, x.target):
                checked.wrong("P0504", f"{sender.value or 'a signal'} cannot become {x.target}", other, at)
    checked.steps += 2 * len(checked.of["recv"])
    _unpaired(checked, [(message, at) for message, (at, _, _) in sent.items()], alone)


def carries(value: ValueId | None, target: ValueId) -> bool:
    """Whether what is received can be what is sent: the value itself, redistributed, or a signal."""
    return target.kind is Kind.SIGNAL if value is None else target.follows(value)


def _unpaired(checked: Checked, sent: list[tuple[MessageId, At]], received: list[tuple[MessageId, At]]) -> None:
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
    for at, send in checked.each(Send):
        for one in send.messages:
            sent.setdefault((numbers[at.device], one.peer), []).append((one.tag, at))
    for at, receive in checked.each(Receive):
        for one in receive.messages:
            received.setdefault((one.peer, numbers[at.device]), []).append((one.tag, at))
    for (source, target), messages in sent.items():
        for (tag, sends), (other, takes) in zip(messages, received[source, target], strict=True):
            if tag != other:
                checked.wrong(
                    CODE,
                    f"device {target} takes message {other} of device {source} where message {tag} is sent",
                    sends,
                    takes,
                    help="without tags, messages must be received in the order in which they are sent",
                )
                break


def _again(checked: Checked, message: MessageId, late: At) -> At | None:
    """Who has received a message already."""
    source, target, tag = message
    for at, receive in checked.each(Receive):
        if (
            checked.plan.devices[at.device].device == target
            and (at.device, at.place) != (late.device, late.place)
            and any((one.peer, one.tag) == (source, tag) for one in receive.messages)
        ):
            return at
    return None
