"""Evaluation: of a plan just what its losses need. No gradients, no updates, and nothing is kept for a backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from piperlang.plan.instructions import Collective, Forward, Instruction, Receive, Send
from piperlang.plan.plan import BUNDLES, DevicePlan, Plan, StageProgram


def forward(plan: Plan) -> Plan:
    """Instructions that losses depend on, on any device; the others fall away, and so does what a forward computes for
    a backward."""
    needed = _Needed(plan).all()
    devices = [_only(device, needed[device.device], plan.programs) for device in plan.devices]
    programs = [_unsaved(program) for program in plan.programs]
    return replace(plan, devices=devices, programs=programs)


def _unsaved(program: StageProgram) -> StageProgram:
    return program._replace(outputs=tuple(slot for slot in program.outputs if slot[0] not in BUNDLES))


class _Needed:
    """Walks back from the losses: to who made a value, and to the partners of whoever did so together with others."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.devices = {device.device: device for device in plan.devices}
        self.made = {
            device.device: {key: i for i, x in enumerate(device.instructions) for key in x.writes}
            for device in plan.devices
        }
        self.sends: dict[tuple[int, int, int], int] = {}
        self.recvs: dict[tuple[int, int, int], int] = {}
        self.together: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for device in plan.devices:
            for i, x in enumerate(device.instructions):
                if isinstance(x, Send):
                    self.sends.update({(device.device, one.peer, one.tag): i for one in x.messages})
                elif isinstance(x, Receive):
                    self.recvs.update({(one.peer, device.device, one.tag): i for one in x.messages})
                elif isinstance(x, Collective):
                    self.together.setdefault((x.node, x.group), []).append((device.device, i))

    def all(self) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {number: set() for number in self.devices}
        work = [(device.device, self.made[device.device][key]) for device in self.plan.devices for key in device.losses]
        while work:
            device, i = work.pop()
            if i not in found[device]:
                found[device].add(i)
                work += self._behind(device, i)
        return found

    def _behind(self, device: int, i: int) -> Iterator[tuple[int, int]]:
        x = self.devices[device].instructions[i]
        for key in x.reads:
            if key in self.made[device]:
                yield device, self.made[device][key]
        if isinstance(x, Receive):
            for one in x.messages:
                yield one.peer, self.sends[one.peer, device, one.tag]
        elif isinstance(x, Send):
            for one in x.messages:  # whoever is sent to must take it
                yield one.peer, self.recvs[device, one.peer, one.tag]
        elif isinstance(x, Collective):
            yield from self.together[x.node, x.group]


def _only(device: DevicePlan, needed: set[int], programs: Sequence[StageProgram]) -> DevicePlan:
    place = {old: new for new, old in enumerate(sorted(needed))}
    instructions = [_kept(device.instructions[i], place, programs) for i in sorted(needed)]
    reads = {key for x in instructions for key in x.reads}
    return replace(
        device,
        instructions=instructions,
        feeds=[feed for feed in device.feeds if feed.key in reads],
        weights={key: held for key, held in device.weights.items() if key in reads},
        next={},
    )


def _kept(x: Instruction, place: dict[int, int], programs: Sequence[StageProgram]) -> Instruction:
    if isinstance(x, Forward):
        x = replace(x, outputs=x.outputs[: len(_unsaved(programs[x.program]).outputs)])
    return replace(x, waits=tuple(sorted(place[i] for i in x.waits if i in place)))
