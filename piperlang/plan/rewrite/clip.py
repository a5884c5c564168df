"""The global norm: updates wait until the norm of all gradients is known, and scale by it, or are left out.

The norm is over all devices, whatever part of the mesh they belong to, so it is no node of the graph, which relates
parts: it is put between the last gradient and the first update of a finished plan. Of each part of a gradient one
device counts, however many have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from piperlang.core.value_id import NORM_FACTOR
from piperlang.plan.instructions import (
    NORM,
    Collective,
    GradientNorm,
    Instruction,
    NormTerm,
    ParameterUpdate,
    Receive,
    Send,
    Update,
)
from piperlang.plan.plan import DevicePlan, Group, Plan, PlanNode


def with_norm(
    plan: Plan, limit: float | None, skips: bool = False, classes: Sequence[tuple[int, ...]] | None = None
) -> Plan:
    """The same plan, with gradients scaled so that the norm of all of them is at most `limit`. `skips`: a step whose
    loss or norm is not finite changes nothing, on no device. `classes`: of a plan that has one device of each, which
    devices do the same as that."""
    alike = [(device.device,) for device in plan.devices] if classes is None else classes
    part = zip(plan.devices, alike, strict=True)
    members = tuple(sorted(chain(*(its for device, its in part if _takes_part(device, skips)))))
    if not any(isinstance(x, Update) for device in plan.devices for x in device.instructions):
        return plan
    late = _late(plan)
    counted: set[object] = set()
    devices = []
    for device, updates in zip(plan.devices, late, strict=True):
        if device.device in members:
            norm = GradientNorm(
                NORM,
                len(plan.nodes),
                (),
                group=len(plan.groups),
                target=NORM_FACTOR,
                limit=limit,
                terms=_terms(device, counted),
                skips=skips,
                losses=tuple(device.losses) if skips else (),
            )
            device = replace(device, instructions=_with_norm(device, updates, norm))
        devices.append(device)
    return replace(
        plan,
        devices=devices,
        nodes=[*plan.nodes, PlanNode("norm of all gradients", "", ())],
        groups=[*plan.groups, Group(members, NORM)],
    )


def skips(plan: Plan) -> bool:
    """Whether steps that are not finite change nothing."""
    return any(isinstance(x, GradientNorm) and x.skips for x in plan.devices[0].instructions)


def _takes_part(device: DevicePlan, skips: bool) -> bool:
    """Whether a device has something to say or to keep."""
    return any(isinstance(x, Update) for x in device.instructions) or (skips and bool(device.losses or device.next))


def _late(plan: Plan) -> list[set[int]]:
    """By device, updates and all that comes after them: by what it reads, by what it waits for, or because its partner
    does."""
    late: list[set[int]] = [
        {i for i, x in enumerate(device.instructions) if isinstance(x, Update)} for device in plan.devices
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
                    or (isinstance(x, Receive) and not sent.isdisjoint(_from(device, x)))
                ):
                    found.add(i)
                if i in found:
                    made.update(x.writes)
                    if isinstance(x, Send):
                        sent.update((device.device, one.peer, one.tag) for one in x.messages)
                    elif isinstance(x, Collective):
                        nodes.add(x.node)  # all members enter it together
        grows = sum(map(len, late)) > before
    return late


def _from(device: DevicePlan, x: Receive) -> set[tuple[int, int, int]]:
    return {(one.peer, device.device, one.tag) for one in x.messages}


def _terms(device: DevicePlan, counted: set[object]) -> tuple[NormTerm, ...]:
    found = []
    for x in device.instructions:
        for change in x.parameters if isinstance(x, Update) else ():
            part = part_of(device, change)
            found.append(NormTerm(change.weight, change.gradients, change.gradient_part, part not in counted))
            counted.add(part)
    return tuple(found)


def part_of(device: DevicePlan, change: ParameterUpdate) -> object:
    """Which part of a weight an update changes; two devices with the same one have the same gradient."""
    shard = device.weights[change.old]
    return change.weight, shard.box, shard.updated(change.part)


def _with_norm(device: DevicePlan, late: set[int], norm: GradientNorm) -> list[Instruction]:
    early = [i for i in range(len(device.instructions)) if i not in late]
    place = {old: new for new, old in enumerate(early)} | {
        old: len(early) + 1 + k for k, old in enumerate(sorted(late))
    }
    found = [_moved(device.instructions[i], place) for i in early]
    makers = {key: i for i, x in enumerate(found) for key in x.writes}
    found.append(replace(norm, waits=_last(found, [makers[key] for key in norm.reads])))
    for i in sorted(late):
        x = _moved(device.instructions[i], place)
        if isinstance(x, Update):
            x = replace(x, scale=NORM_FACTOR, waits=tuple(sorted({*x.waits, len(early)})))
        found.append(x)
    return found


def _moved(x: Instruction, place: dict[int, int]) -> Instruction:
    return replace(x, waits=tuple(sorted(place[i] for i in x.waits)))


def _last(instructions: Sequence[Instruction], waits: Sequence[int]) -> tuple[int, ...]:
    """Of each stream the last one: it ends after the others."""
    return tuple(sorted({instructions[i].stream: i for i in sorted(waits)}.values()))
