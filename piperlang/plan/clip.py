"""Clipping by global norm: a plan whose updates wait until the norm of all gradients is known, and scale by it.

The norm is over all devices, whatever part of the mesh they belong to, so it is no node of the graph, which relates
parts: it is put between the last gradient and the first update of a finished plan. Of each part of a gradient one
device counts, however many have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from piperlang.plan.instruction import NORM, DevicePlan, Instruction, Plan


def clipped(plan: Plan, limit: float) -> Plan:
    """The same plan, with gradients scaled so that the norm of all of them is at most `limit`."""
    late = _late(plan)
    counted: set[object] = set()
    members = tuple(device.device for device in plan.devices if any(x.do == "update" for x in device.instructions))
    if not members:
        return plan
    entries = {device.device: _entries(device, counted) for device in plan.devices if device.device in members}
    args = {"group": len(plan.groups), "limit": float(limit), "dtype": "float64", "reduce": "sum"}
    devices = [
        (
            replace(
                device,
                instructions=_with_norm(
                    device,
                    late[d],
                    Instruction(
                        "norm", NORM, len(plan.names), (), (NORM,), (), {**args, "weights": entries[device.device]}
                    ),
                ),
            )
            if device.device in members
            else device
        )
        for d, device in enumerate(plan.devices)
    ]
    return replace(
        plan,
        devices=devices,
        names=[*plan.names, "norm of all gradients"],
        lines=[*plan.lines, ""],
        groups=[*plan.groups, (members, NORM)],
    )


def _late(plan: Plan) -> list[set[int]]:
    """By device, updates and all that comes after them: by what it reads, by what it waits for, or because its partner
    does."""
    late: list[set[int]] = [
        {i for i, x in enumerate(device.instructions) if x.do == "update"} for device in plan.devices
    ]
    sent: set[tuple[int, int, int]] = set()
    nodes: set[int] = set()
    grows = True
    while grows:
        before = sum(map(len, late))
        for found, device in zip(late, plan.devices, strict=True):
            made = {key for i in found for key in device.instructions[i].writes}
            for i, x in enumerate(device.instructions):
                if i not in found and (
                    not made.isdisjoint(x.reads)
                    or not found.isdisjoint(x.waits)
                    or x.node in nodes
                    or (x.do == "recv" and not sent.isdisjoint(_from(device, x)))
                ):
                    found.add(i)
                if i in found:
                    made.update(x.writes)
                    if x.do == "send":
                        sent.update((device.device, part[0], part[1]) for part in x.args["parts"])
                    elif "group" in x.args:
                        nodes.add(x.node)  # all members enter it together
        grows = sum(map(len, late)) > before
    return late


def _from(device: DevicePlan, x: Instruction) -> set[tuple[int, int, int]]:
    return {(part[0], device.device, part[1]) for part in x.args["parts"]}


def _entries(device: DevicePlan, counted: set[object]) -> list[dict[str, Any]]:
    found = []
    for x in device.instructions:
        for entry in x.args["weights"] if x.do == "update" else ():
            part = part_of(device, entry)
            found.append(
                {
                    "weight": entry["weight"],
                    "grads": entry["grads"],
                    "take_grad": entry["take_grad"],
                    "counts": part not in counted,
                }
            )
            counted.add(part)
    return found


def part_of(device: DevicePlan, entry: dict[str, Any]) -> object:
    """Which part of a weight an update changes; two devices with the same one have the same gradient."""
    held = device.weights[entry["old"]]
    start = held["flat"][0] if held["flat"] is not None else 0
    part = (start + entry["take"][0], start + entry["take"][1]) if entry["take"] is not None else held["flat"]
    return entry["weight"], tuple(held["box"]), None if part is None else tuple(part)


def _with_norm(device: DevicePlan, late: set[int], norm: Instruction) -> list[Instruction]:
    early = [i for i in range(len(device.instructions)) if i not in late]
    place = {old: new for new, old in enumerate(early)} | {
        old: len(early) + 1 + k for k, old in enumerate(sorted(late))
    }
    found = [_moved(device.instructions[i], place) for i in early]
    reads = tuple(key for entry in norm.args["weights"] for key in entry["grads"])
    makers = {key: i for i, x in enumerate(found) for key in x.writes}
    found.append(norm._replace(reads=reads, waits=_last(found, [makers[key] for key in reads])))
    for i in sorted(late):
        x = _moved(device.instructions[i], place)
        found.append(
            x._replace(reads=(*x.reads, NORM), waits=tuple(sorted({*x.waits, len(early)}))) if x.do == "update" else x
        )
    return found


def _moved(x: Instruction, place: dict[int, int]) -> Instruction:
    return x._replace(waits=tuple(sorted(place[i] for i in x.waits)))


def _last(instructions: Sequence[Instruction], waits: Sequence[int]) -> tuple[int, ...]:
    """Of each stream the last one: it ends after the others."""
    return tuple(sorted({instructions[i].stream: i for i in sorted(waits)}.values()))
