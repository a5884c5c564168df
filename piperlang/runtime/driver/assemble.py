"""Whole weights from what the devices keep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piperlang.core.value_id import ValueId
from piperlang.plan.plan import Plan
from piperlang.runtime.box import take


def assembled(
    plan: Plan, kept: Sequence[Mapping[ValueId, torch.Tensor]], aliases: Mapping[str, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """By name, as the plain model has them; `kept` is in the order of the plan's devices, `aliases` are further names
    of tied weights."""
    flats: dict[str, dict[tuple[tuple[int, int], ...], torch.Tensor]] = {}
    for device, values in zip(plan.devices, kept, strict=True):
        for key, held in device.weights.items():
            box = held.box
            boxes = flats.setdefault(held.weight, {})
            if box not in boxes:
                boxes[box] = values[key].new_zeros(torch.Size([high - low for low, high in box]).numel())
            low, high = held.interval if held.interval is not None else (0, boxes[box].numel())
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
    """What a model saves: all entries in order, with the weight that each is, and what no device keeps, because nothing
    reads it."""

    entries: Mapping[str, str]
    """Names in the state dict, which hooks may have changed, and of weights; empty for what is no weight."""
    others: Mapping[str, Any]
    configs: Mapping[str, Any] = field(default_factory=dict)
    """Configurations of models of transformers, by the path of the module."""

    def complete(self, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        return {entry: whole[name] if name in whole else self.others[entry] for entry, name in self.entries.items()}


def rest_of(model: nn.Module, weights: Mapping[str, torch.Tensor], known: Container[str]) -> Rest:
    """`weights`: the values of the model's tensors; `known`: those that devices keep."""
    names = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
    state = model.state_dict(keep_vars=True)
    entries = {entry: entry if entry in known else names.get(id(value), "") for entry, value in state.items()}

    def value(entry: str) -> Any:
        found = weights.get(names.get(id(state[entry]), ""), state[entry])
        return found.detach().clone() if isinstance(found, torch.Tensor) else found

    others = {entry: value(entry) for entry, name in entries.items() if name not in known}
    return Rest(entries, others, dict(_configs(model)))


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """As transformers writes them with a model."""
    for path, module in model.named_modules():
        write = getattr(getattr(module, "config", None), "to_json_string", None)
        if write is not None and hasattr(module, "save_pretrained"):
            with suppress(Exception):  # not ours, and for export only
                yield path, {**json.loads(write()), "architectures": [type(module).__name__]}


def fingerprint(model: nn.Module) -> str:
    """Equal for models that start from the same weights and buffers."""
    found = hashlib.blake2b(digest_size=16)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def known_to(plan: Plan, aliases: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """Names of all weights that some device keeps."""
    names = {held.weight for device in plan.devices for held in device.weights.values()}
    return frozenset(names | {alias for name in names for alias in aliases.get(name, ())})
