"""All members of a group must mean the same, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from piperlang.core.value_id import ValueId
from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Collective,
    GradientNorm,
    ReduceGradients,
    Routing,
    Shape,
    ShardCollective,
)
from piperlang.plan.verify.messages import BOTH, CODE, size_of
from piperlang.plan.verify.report import At, Checked


def membership(checked: Checked) -> None:
    """Every collective is of a group that its device is a member of, on the group's stream."""
    plan = checked.plan
    for at, x in checked.each(Collective):
        me = plan.devices[at.device].device
        if not 0 <= x.group < len(plan.groups):
            checked.wrong(CODE, f"{x.op} in group {x.group}, and there are {len(plan.groups)}", at)
            continue
        members, stream = plan.groups[x.group]
        if me not in members or stream != x.stream:
            checked.wrong(
                CODE, f"group {x.group} is of devices {list(members)} on stream {stream}, not of {me} on {x.stream}", at
            )


def collectives(checked: Checked) -> None:
    """All members of a group do the same things in the same order."""
    plan = checked.plan
    rounds: dict[int, dict[int, list[At]]] = {}
    # By device and place: a group's stream has them in this order.
    for at, x in sorted(checked.each(Collective), key=lambda one: one[0][:2]):
        rounds.setdefault(x.group, {}).setdefault(plan.devices[at.device].device, []).append(at)
    for group, entered in rounds.items():
        members = plan.groups[group][0]
        lists = [entered.get(member, []) for member in members]
        for together in zip(*lists, strict=False):
            checked.steps += len(together)
            _agree(checked, together, members)
        shortest, longest = min(lists, key=len), max(lists, key=len)
        if len(shortest) < len(longest):
            other = members[lists.index(shortest)]
            last = shortest[-1:] or [
                at
                for device, plans in enumerate(plan.devices)
                if plans.device == other
                for at in _last(device, plans.instructions)
            ]
            checked.wrong(
                CODE,
                f"device {other} does not take part in round {len(shortest)} of group {group}",
                longest[len(shortest)],
                *last,
                notes=("the last that it does there",) if last else (),
                help=BOTH,
            )


def _last(device: int, instructions: Sequence[Any]) -> list[At]:
    return [At(device, len(instructions) - 1, instructions[-1])] if instructions else []


def _agree(checked: Checked, together: Sequence[At], members: Sequence[int]) -> None:
    first = together[0]
    about = _about(first)
    for other in together[1:]:
        if first.does.node != other.does.node:
            checked.wrong(CODE, "members of a group would meet in different nodes", first, other, help=BOTH)
            return
        if _about(other) != about:
            names = ("what they do", "dtypes", "sizes")
            differing = [
                f"{name}: {mine} and {theirs}"
                for name, mine, theirs in zip_longest(names, about, _about(other))
                if mine != theirs
            ]
            checked.wrong(
                CODE,
                f"members of a group differ in {differing[0].partition(':')[0]}",
                first,
                other,
                notes=tuple(differing),
                help=BOTH,
            )
            return
    if isinstance(first.does, AllToAll):
        _exchanged(checked, together, members)
    elif isinstance(first.does, ReduceGradients):
        _shares(checked, together)


def _about(at: At) -> tuple[Any, ...]:
    """What all members must say alike: mnemonic, dtype, sizes."""
    match at.does:
        case AllToAll(dtype=dtype):
            return at.does.op, dtype, None
        case Routing(dtype=dtype, experts=experts, shape=shape):
            return at.does.op, dtype, (experts, shape[1:])
        case AllReduce(dtype=dtype, shape=shape):
            return at.does.op, dtype, shape
        case GradientNorm(limit=limit, skips=skips):
            return at.does.op, "float64", (limit, skips)
        case ShardCollective(dtype=dtype, shards=shards):
            return at.does.op, dtype, [(one.cuts, one.shape) for one in shards]
    raise TypeError(at.does.op)


def _exchanged(checked: Checked, together: Sequence[At], members: Sequence[int]) -> None:
    """What a gives b is what b takes from a, in the order in which it lies in the message."""
    place = {member: k for k, member in enumerate(members)}
    lists: list[tuple[list[list[Shape]], list[list[Shape]]]] = []
    for at in together:
        assert isinstance(at.does, AllToAll)
        sides: list[list[list[Shape]]] = []
        for blocks in (at.does.give, at.does.take):
            order = [place.get(block.peer, -1) for block in blocks]
            if -1 in order or order != sorted(order):
                checked.wrong(
                    CODE,
                    f"blocks of an all-to-all are not in the order of its members {list(members)}",
                    at,
                    together[-1] if at is not together[-1] else together[0],
                )
                return
            by_member: list[list[Shape]] = [[] for _ in members]
            for k, block in zip(order, blocks, strict=True):
                by_member[k].append(block.shape)
            sides.append(by_member)
            checked.steps += len(blocks)
        for block in at.does.give:
            if size_of(block.box) != block.shape:
                checked.wrong(CODE, f"an all-to-all takes {block.box} and calls it {list(block.shape)}", at)
        lists.append((sides[0], sides[1]))
    for a, giver in enumerate(lists):
        for b, taker in enumerate(lists):
            if giver[0][b] != taker[1][a]:
                checked.wrong(
                    CODE,
                    f"device {members[a]} gives device {members[b]} {giver[0][b]}, which takes {taker[1][a]}",
                    together[a],
                    together[b],
                    help=BOTH,
                )
                return


def _shares(checked: Checked, together: Sequence[At]) -> None:
    """Members that have the same sum already count for it together."""
    alike: dict[tuple[ValueId, ...], list[tuple[At, float]]] = {}
    for at in together:
        if isinstance(at.does, ReduceGradients) and at.does.share is not None:
            alike.setdefault(at.does.writes, []).append((at, at.does.share))
    for same in alike.values():
        odd, share = max(same, key=lambda one: abs(one[1] * len(same) - 1))
        if abs(share * len(same) - 1) > 1e-9:
            checked.wrong(
                CODE,
                f"{len(same)} devices have the same part of a gradient, and one counts for {share:g} of it",
                odd,
                together[0] if odd is not together[0] else together[-1],
            )
            return
