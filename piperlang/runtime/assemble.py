"""Whole weights from what the devices keep."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from piperlang.plan.instruction import Plan
from piperlang.runtime.boxes import take


def assembled(plan: Plan, kept: Sequence[Mapping[str, torch.Tensor]], aliases: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
    """By name, as the plain model has them; `kept` is in the order of the plan's devices, `aliases` are further names of tied weights."""
    flats: dict[str, dict[tuple[tuple[int, int], ...], torch.Tensor]] = {}
    for device, values in zip(plan.devices, kept, strict=True):
        for key, held in device.weights.items():
            box = tuple(map(tuple, held["box"]))
            boxes = flats.setdefault(held["weight"], {})
            if box not in boxes:
                boxes[box] = values[key].new_zeros(torch.Size([high - low for low, high in box]).numel())
            low, high = held["flat"] if held["flat"] is not None else (0, boxes[box].numel())
            boxes[box][low:high] = values[key].flatten()
    whole: dict[str, torch.Tensor] = {}
    for name, boxes in flats.items():
        shape = [max(box[dim][1] for box in boxes) for dim in range(len(next(iter(boxes))))]
        whole[name] = next(iter(boxes.values())).new_zeros(shape)
        for box, flat in boxes.items():
            take(whole[name], box).copy_(flat.view([high - low for low, high in box]))
    return whole | {alias: whole[name] for name, others in aliases.items() if name in whole for alias in others}


@dataclass(frozen=True)
class Rest:
    """What a model saves: all names in order, and those tensors that no device keeps, because nothing reads them."""

    names: tuple[str, ...]
    tensors: Mapping[str, torch.Tensor]

    def complete(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: whole[name] if name in whole else self.tensors[name] for name in self.names}


def rest_of(model: nn.Module, known: Container[str]) -> Rest:
    state = model.state_dict()
    return Rest(tuple(state), {name: value.detach().clone() for name, value in state.items() if name not in known and isinstance(value, torch.Tensor)})


def known_to(plan: Plan, aliases: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Names of all weights that some device keeps."""
    names = {held["weight"] for device in plan.devices for held in device.weights.values()}
    return frozenset(names | {alias for name in names for alias in aliases.get(name, ())})
