"""One device's instructions on real tensors: a flat interpreter that knows no strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piperlang.plan.instructions import (
    AllReduce,
    AllToAll,
    Backward,
    Combine,
    Copy,
    Dispatch,
    ExchangeSplits,
    Fetch,
    Forward,
    GatherParameters,
    GradientNorm,
    InputGradient,
    Instruction,
    Offload,
    ParameterUpdate,
    Receive,
    Recompute,
    ReduceGradients,
    ScatterGradients,
    Send,
    Update,
    WeightGradient,
)
from piperlang.runtime.device import activations, parameters
from piperlang.runtime.device.compute import compute
from piperlang.runtime.device.values import DeviceValues
from piperlang.runtime.optimize import DeviceUpdate
from piperlang.runtime.optimizer_copy import Part

EXECUTE: dict[type[Instruction], Callable[[DeviceValues, Any], None]] = {
    **dict.fromkeys((Forward, Backward, InputGradient, WeightGradient, Recompute), compute),
    Send: activations.send,
    Receive: activations.recv,
    Copy: activations.copy,
    AllReduce: activations.all_reduce,
    AllToAll: activations.all_to_all,
    ExchangeSplits: activations.exchange_splits,
    Dispatch: activations.dispatch,
    Combine: activations.combine,
    Offload: activations.offload,
    Fetch: activations.fetch,
    GatherParameters: parameters.gather,
    ScatterGradients: parameters.scatter,
    ReduceGradients: parameters.reduce,
    GradientNorm: parameters.norm,
    Update: parameters.update,
}


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

    def _part_of(self, change: ParameterUpdate) -> Part:
        shard = self.plan.weights[change.old]
        interval = shard.interval
        if change.part is not None:
            start = interval[0] if interval is not None else 0
            interval = start + change.part[0], start + change.part[1]
        now = parameters.updated_part(self.kept[change.old], change)
        return Part(change.weight, now, shard.box, interval, change.sharded)
