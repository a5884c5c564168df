"""Whether one device of each class of devices that do the same stands for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from piperlang.plan.instructions import Collective, Receive, Send
from piperlang.plan.plan import Plan


def stand_for_all(plan: Plan, classes: Sequence[tuple[int, ...]]) -> bool:
    """`plan`: of the first device of each class. Between submeshes that overlap, devices that are in the same of them
    need not do the same: one gives another what this one has itself. Then there are messages that no device of the plan
    receives, or collectives that not all members enter."""
    row = {device: number for number, devices in enumerate(classes) for device in devices}
    sent: Counter[tuple[int, int, int]] = Counter()
    received: Counter[tuple[int, int, int]] = Counter()
    entered: Counter[tuple[int, str, frozenset[int], int]] = Counter()
    for device in plan.devices:
        me = row[device.device]
        for x in device.instructions:
            match x:
                case Send(messages=messages):
                    sent.update({(me, row[one.peer], one.tag) for one in messages})
                case Receive(messages=messages):
                    received.update({(row[one.peer], me, one.tag) for one in messages})
                case Collective(group=group):
                    rows = frozenset(row[member] for member in plan.groups[group].members)
                    entered[x.node, x.op, rows, me] += 1
    together = all(
        entered[node, op, rows, other] == count for (node, op, rows, _), count in entered.items() for other in rows
    )
    return together and sent == received and all(count == 1 for count in chain(sent.values(), received.values()))
