"""Whole weights from what the devices keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

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
