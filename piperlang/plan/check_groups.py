"""All members of a group must mean the same, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from piperlang.plan.check import COLLECTIVE, At, Checked
from piperlang.plan.check_partners import BOTH, CODE, size_of
from piperlang.plan.instruction import ROUTES


def collectives(checked: Checked) -> None:
    """All members of a group do the same things in the same order."""
    plan = checked.plan
    numbers = [device.device for device in plan.devices]
    rounds: dict[int, dict[int, list[At]]] = {}
    # By device and place: a group's stream has them in this order.
    for at in sorted(checked.all(*COLLECTIVE), key=lambda at: (at.device, at.place)):
        args, me = at.does.args, numbers[at.device]
        group = args["group"]
        if not 0 <= group < len(plan.groups):
            checked.wrong(CODE, f"{at.does.do} in group {group}, and there are {len(plan.groups)}", at)
            continue
        members, stream = plan.groups[group]
        if me not in members or stream != at.does.stream or tuple(args.get("members", members)) != tuple(members):
            checked.wrong(
                CODE,
                f"group {group} is of devices {list(members)} on stream {stream}, not of {args.get('members', me)} on"
                f" {at.does.stream}",
                at,
            )
            continue
        rounds.setdefault(group, {}).setdefault(me, []).append(at)
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
    if about[2] not in (None, "sum"):
        checked.wrong(
            CODE,
            f"`{about[2]}` is no way to reduce that a device knows",
            first,
            together[-1],
            help="only sums are reduced",
        )
        return
    for other in together[1:]:
        if first.does.node != other.does.node:
            checked.wrong(CODE, "members of a group would meet in different nodes", first, other, help=BOTH)
            return
        if _about(other) != about:
            names = ("what they do", "dtypes", "ways to reduce", "sizes")
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
    if first.does.do == "exchange":
        _exchanged(checked, together, members)
    elif first.does.do == "reduce":
        _shares(checked, together)


def _about(at: At) -> tuple[Any, ...]:
    """What all members must say alike."""
    do, args = at.does.do, at.does.args
    if do == "exchange":
        return do, args["dtype"], None, None
    if do in ROUTES:
        return do, args["dtype"], None, (args["experts"], args["shape"][1:])
    if do == "all_reduce":
        return do, args["dtype"], args["reduce"], args["shape"]
    if do == "norm":
        return do, args["dtype"], args["reduce"], args["limit"]
    return do, args["dtype"], args["reduce"], [(entry["cuts"], entry["shape"]) for entry in args["weights"]]


def _exchanged(checked: Checked, together: Sequence[At], members: Sequence[int]) -> None:
    """What a gives b is what b takes from a, in the order in which it lies in the message."""
    place = {member: k for k, member in enumerate(members)}
    lists: list[dict[str, list[list[Any]]]] = []
    for at in together:
        sides: dict[str, list[list[Any]]] = {}
        for side in ("give", "take"):
            parts = at.does.args[side]
            order = [place.get(peer, -1) for peer, _, _ in parts]
            if -1 in order or order != sorted(order):
                checked.wrong(
                    CODE,
                    f"parts of an exchange are not in the order of its members {list(members)}",
                    at,
                    together[-1] if at is not together[-1] else together[0],
                )
                return
            sides[side] = [[] for _ in members]
            for k, (_, box, shape) in zip(order, parts, strict=True):
                sides[side][k].append(tuple(shape))
                if side == "give" and box is not None and size_of(box) != tuple(shape):
                    checked.wrong(CODE, f"an exchange takes {box} and calls it {list(shape)}", at)
            checked.steps += len(parts)
        lists.append(sides)
    for a, giver in enumerate(lists):
        for b, taker in enumerate(lists):
            if giver["give"][b] != taker["take"][a]:
                checked.wrong(
                    CODE,
                    f"device {members[a]} gives device {members[b]} {giver['give'][b]}, which takes {taker['take'][a]}",
                    together[a],
                    together[b],
                    help=BOTH,
                )
                return


def _shares(checked: Checked, together: Sequence[At]) -> None:
    """Members that have the same sum already count for it together."""
    alike: dict[Any, list[At]] = {}
    for at in together:
        if "share" in at.does.args:
            alike.setdefault(at.does.writes, []).append(at)
    for same in alike.values():
        if any(abs(at.does.args["share"] * len(same) - 1) > 1e-9 for at in same):
            odd = max(same, key=lambda at: abs(at.does.args["share"] * len(same) - 1))
            checked.wrong(
                CODE,
                f"{len(same)} devices have the same part of a gradient, and one counts for {odd.does.args['share']:g}"
                " of it",
                odd,
                together[0] if odd is not together[0] else together[-1],
            )
            return
