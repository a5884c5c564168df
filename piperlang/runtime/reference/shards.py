"""Weights, gradients and optimizer states on simulated devices, in the parts that the graph says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import Graph, Node, WeightLayout
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import coordinates, dividing, flat_part, in_pieces, interval, local_box
from piperlang.runtime.box import take
from piperlang.runtime.optimizer.copies import DeviceUpdate, WeightPart
from piperlang.runtime.optimizer.optimize import Optimizers, added


class ShardedWeights:
    optimizers: Optimizers

    def __init__(self, graph: Graph, weights: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self.given = weights
        self.shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        self.current: dict[ValueId, list[Any]] = {}
        self.first: dict[str, ValueId] = {}
        for key, held in graph.held.items():
            if key.kind is Kind.WEIGHT and key not in graph.made:
                self.current[key] = self._divided(weights[held.weight], held)
                self.first.setdefault(held.weight, key)

    def _divided(self, whole: torch.Tensor, held: WeightLayout) -> list[torch.Tensor]:
        found = []
        for at in coordinates(held.where):
            local = take(whole, local_box(held, whole.shape, at)).clone()
            if held.flat:
                low, high = flat_part(held, at, local.numel())
                local = local.flatten()[low:high].clone()
            found.append(local)
        return found

    def whole(self, name: str) -> torch.Tensor:
        if name not in self.first:
            return self.given[name]  # no chunk reads it, so nobody keeps or changes it
        key = self.first[name]
        return self._joined(self.graph.held[key], self.current[key])

    def _joined(self, held: WeightLayout, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        out = parts[0].new_zeros(self.shapes[held.weight])
        every = coordinates(held.where)
        for at in every:
            local = self._gathered(held, held._replace(flat=()), parts, at)
            take(out, local_box(held, out.shape, at)).copy_(local)
        return out

    def _gathered(
        self, have: WeightLayout, want: WeightLayout, parts: Sequence[torch.Tensor], at: Mapping[str, int]
    ) -> torch.Tensor:
        """What a device at `at` has after a gather from `have` to `want`, which divides along fewer axes."""
        every = coordinates(have.where)
        shape = [high - low for low, high in local_box(have, self.shapes[have.weight], at)]
        length = torch.Size(shape).numel()
        missing = [axis for axis in have.flat if axis not in want.flat]
        low, high = flat_part(want, dict(at), length)
        out = parts[0].new_zeros(high - low)
        for k, other in enumerate(every):
            if all(other[axis] == at[axis] for axis in other if axis not in missing):
                a, b = flat_part(have, other, length)
                out[a - low : b - low] = parts[k].flatten()
        return out if want.flat else out.view(shape)

    # ------------------------------------------------------------------------------------------ communication

    def communicate(self, node: Node, values: dict[ValueId, list[Any]]) -> None:
        if node.op == "all_gather":
            for (source,), target in zip(node.reads, node.writes, strict=True):
                have, want = self.graph.held[source], self.graph.held[target]
                values[target] = [self._gathered(have, want, values[source], at) for at in coordinates(have.where)]
        elif node.template.beyond:
            self._across(node, values)
        else:
            for sources, target in zip(node.reads, node.writes, strict=True):
                have, want = self.graph.held[sources[0]], self.graph.held[target]
                local = _added([values[key] for key in sources])
                summed = self._summed(have, local, node.template.axes)
                values[target] = self._part(have, want, summed)

    def _summed(self, held: WeightLayout, parts: Sequence[torch.Tensor], axes: Sequence[str]) -> list[torch.Tensor]:
        every = coordinates(held.where)
        found = []
        for at in every:
            group = [
                parts[k]
                for k, other in enumerate(every)
                if all(other[axis] == at[axis] for axis in at if axis not in axes)
            ]
            found.append(torch.stack(group).sum(0))
        return found

    def _part(self, have: WeightLayout, want: WeightLayout, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of what each device has, the part that it keeps where `want` divides along more axes."""
        if have.flat == want.flat:
            return list(parts)
        found = []
        for at, part in zip(coordinates(have.where), parts, strict=True):
            length = torch.Size([high - low for low, high in local_box(have, self.shapes[have.weight], at)]).numel()
            start, _ = flat_part(have, at, length)
            low, high = flat_part(want, at, length)
            found.append(part.flatten()[low - start : high - start])
        return found

    def _across(self, node: Node, values: dict[ValueId, list[Any]]) -> None:
        """Add up over parts of the mesh: each device with those that have the same part of the weight."""
        homes = 1 + len(node.template.beyond)
        for first in range(0, len(node.writes), homes):
            sources = node.reads[first : first + homes]
            local = [(self.graph.held[keys[0]], _added([values[key] for key in keys])) for keys in sources]
            for target in node.writes[first : first + homes]:
                want = self.graph.held[target]
                values[target] = [
                    torch.stack([_counterpart(want, at, held, parts) for held, parts in local]).sum(0)
                    for at in coordinates(want.where)
                ]

    # ------------------------------------------------------------------------------------------------- update

    def gradients(self, node: Node, values: dict[ValueId, list[Any]]) -> dict[str, torch.Tensor]:
        """The whole gradients that an update uses."""
        found: dict[str, torch.Tensor] = {}
        for parts in node.reads[1::2]:
            held = self.graph.held[parts[0]]
            found[held.weight] = self._joined(held, _added([values[key] for key in parts]))
        return found

    def updates(self) -> list[DeviceUpdate]:
        """What each update changes on each device."""
        found: list[DeviceUpdate] = []
        for node in self.graph.nodes:
            if node.op == "update":
                parts = [
                    self._updated(old, target) for (old,), target in zip(node.reads[::2], node.writes, strict=True)
                ]
                for device, its in zip(devices_of(node.template.where), zip(*parts, strict=True), strict=True):
                    found.append(DeviceUpdate(device, node.writes[0], its, node.template.by))
        return found

    def _updated(self, old: ValueId, target: ValueId) -> list[WeightPart]:
        """Of one weight, what each device changes."""
        have, want = self.graph.held[old], self.graph.held[target]
        shape, partial = self.shapes[want.weight], in_pieces(want)
        return [
            WeightPart.of_shard(
                want.weight, now, local_box(want, shape, at), interval(want, shape, at) if want.flat else None, partial
            )
            for now, at in zip(self._part(have, want, self.current[old]), coordinates(want.where), strict=True)
        ]

    def update(
        self, node: Node, values: dict[ValueId, list[Any]], scale: torch.Tensor | float = 1.0
    ) -> dict[str, torch.Tensor]:
        """One step of the optimizer on each device's part; gives the whole gradients before they are scaled, for
        whoever compares them."""
        gradients: list[list[torch.Tensor]] = []
        for i, target in enumerate(node.writes):
            (old,), parts = node.reads[2 * i : 2 * i + 2]
            have, want, grad = self.graph.held[old], self.graph.held[target], self.graph.held[parts[0]]
            values[target] = [
                part.clone() for part in self._part(have, want, values[old])
            ]  # others may still read the old ones
            gradients.append([part * scale for part in self._part(grad, want, _added([values[key] for key in parts]))])
        for k, device in enumerate(devices_of(node.template.where)):
            weights = [values[target][k] for target in node.writes]
            self.optimizers.update(device, node.writes[0], weights, [of_weight[k] for of_weight in gradients])
        return self.gradients(node, values)


def _added(values: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [added(parts) for parts in zip(*values, strict=True)]


def _counterpart(
    want: WeightLayout, at: Mapping[str, int], other: WeightLayout, parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The device of another part that has what the one at `at` has: the same positions along all axes that divide the
    weight."""
    mine = [at[axis] for axis in dividing(want)]
    return next(
        parts[k]
        for k, there in enumerate(coordinates(other.where))
        if [there[axis] for axis in dividing(other)] == mine
    )
