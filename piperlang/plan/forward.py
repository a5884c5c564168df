"""Evaluation: of a plan just what its losses need. No gradients, no updates, and nothing is kept for a backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from piperlang.plan.instruction import DevicePlan, Instruction, Plan


def forward(plan: Plan) -> Plan:
    """Instructions that losses depend on, on any device; the others fall away."""
    needed = _Needed(plan).all()
    devices = [_only(device, needed[device.device]) for device in plan.devices]
    return replace(plan, devices=devices)


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
                if x.do == "send":
                    self.sends.update({(device.device, part[0], part[1]): i for part in x.args["parts"]})
                elif x.do == "recv":
                    self.recvs.update({(part[0], device.device, part[1]): i for part in x.args["parts"]})
                elif "group" in x.args:
                    self.together.setdefault((x.node, x.args["group"]), []).append((device.device, i))

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
        if x.do == "recv":
            for source, tag, *_ in x.args["parts"]:
                yield source, self.sends[source, device, tag]
        elif x.do == "send":
            for target, tag, *_ in x.args["parts"]:  # whoever is sent to must take it
                yield target, self.recvs[device, target, tag]
        elif "group" in x.args:
            yield from self.together[x.node, x.args["group"]]


def _only(device: DevicePlan, needed: set[int]) -> DevicePlan:
    place = {old: new for new, old in enumerate(sorted(needed))}
    instructions = [_kept(device.instructions[i], place) for i in sorted(needed)]
    reads = {key for x in instructions for key in x.reads}
    return replace(
        device,
        instructions=instructions,
        feeds=[feed for feed in device.feeds if feed[0] in reads],
        weights={key: held for key, held in device.weights.items() if key in reads},
        next={},
    )


def _kept(x: Instruction, place: dict[int, int]) -> Instruction:
    return x._replace(waits=tuple(sorted(place[i] for i in x.waits if i in place)))
