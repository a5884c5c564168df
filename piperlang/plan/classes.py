"""Whether one device of each class of devices that do the same stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import Collective, Receive, Send
from piperlang.plan.plan import Plan
from piperlang.plan.verify.messages import MessageId, carries


def stand_for_all(plan: Plan, classes: Sequence[tuple[int, ...]]) -> bool:
    """`plan`: of the first device of each class. Between submeshes that overlap, devices that are in the same of them
    need not do the same: one gives another what this one has itself. Then there are messages that no device of the plan
    receives, or collectives that not all members enter."""
    row = {device: number for number, devices in enumerate(classes) for device in devices}
    sent: dict[MessageId, ValueId | None] = {}
    received: dict[MessageId, ValueId] = {}
    entered: Counter[tuple[int, str, frozenset[int], int]] = Counter()
    for device in plan.devices:
        me = row[device.device]
        for x in device.instructions:
            match x:
                case Send(messages=messages, value=value):
                    found = dict.fromkeys(((me, row[one.peer], one.tag) for one in messages), value)
                    if sent.keys() & found.keys():
                        return False
                    sent.update(found)
                case Receive(messages=messages, target=target):
                    came = dict.fromkeys(((row[one.peer], me, one.tag) for one in messages), target)
                    if received.keys() & came.keys():
                        return False
                    received.update(came)
                case Collective(group=group):
                    rows = frozenset(row[member] for member in plan.groups[group].members)
                    entered[x.node, x.op, rows, me] += 1
    if sent.keys() != received.keys() or not all(
        carries(sent[message], target) for message, target in received.items()
    ):
        return False
    return all(
        entered[node, op, rows, other] == count for (node, op, rows, _), count in entered.items() for other in rows
    )
