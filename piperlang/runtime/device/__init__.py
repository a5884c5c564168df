"""One device's instructions on real tensors: a flat interpreter that knows no strategy. A function per instruction, in
compute.py, activations.py and parameters.py."""

from __future__ import annotations

from piperlang.plan.instructions import INSTRUCTIONS, Instruction, ParameterUpdate, Update
from piperlang.runtime.device import activations, compute, parameters
from piperlang.runtime.device.values import EXECUTE, DeviceValues
from piperlang.runtime.optimizer.copies import DeviceUpdate, WeightPart

assert set(INSTRUCTIONS.values()) == EXECUTE.keys(), "an instruction that no function executes"
__all__ = ["Device", "activations", "compute", "parameters"]


class Device(DeviceValues):
    def execute(self, instruction: Instruction) -> None:
        EXECUTE[type(instruction)](self, instruction)
        left = self.left
        for key in self.reads[id(instruction)]:
            remaining = left[key] = left[key] - 1
            if not remaining and key not in self.kept and key not in self.permanent:
                self.values.pop(key, None)

    def updates(self) -> list[DeviceUpdate]:
        """What each update instruction changes."""
        return [
            DeviceUpdate(self.plan.device, x.writes[0], [self._part_of(change) for change in x.parameters])
            for x in self.plan.instructions
            if isinstance(x, Update)
        ]

    def _part_of(self, change: ParameterUpdate) -> WeightPart:
        shard = self.plan.weights[change.old]
        now = parameters.updated_part(self.kept[change.old], change)
        return WeightPart.of_shard(change.weight, now, shard.box, shard.updated(change.part), change.sharded)
