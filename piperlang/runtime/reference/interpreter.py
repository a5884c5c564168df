"""The graph on one process, with simulated devices: the reference that everything else is compared with.

Each node runs on every device of its part, one after the other; a value is a list of what each device has.
Communication is done by what it must achieve (boxes.py), not by how a backend does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from piperlang.capture.autodiff.pass_graph import PassGraph, TracedModel
from piperlang.capture.trace.random import mix
from piperlang.capture.user.tensors import named_tensors
from piperlang.core.placement import dispatched
from piperlang.core.value_id import Kind, ValueId
from piperlang.ir.graph import COMPUTE, Graph, Node
from piperlang.ir.layout import axes_of, devices_of
from piperlang.ir.model import Slot, Tensor
from piperlang.ir.sort import topological
from piperlang.ir.weight_layout import along
from piperlang.runtime.box import take
from piperlang.runtime.device.failure import failed, failure_of
from piperlang.runtime.device.splits import leaving
from piperlang.runtime.optimizer.optimize import Optimizers
from piperlang.runtime.reference.boxes import boxes, move
from piperlang.runtime.reference.shards import ShardedWeights

SAMPLE = Tensor("sample", ((1, 0),), "int64", 8, 0)


@dataclass(frozen=True)
class Stepped:
    loss: float
    gradients: Mapping[str, torch.Tensor]
    """Of the whole batch, by the name of the weight."""


@contextmanager
def _located(node: Node, piece: PassGraph | None = None) -> Iterator[None]:
    """What the user's operators or optimizer raise inside is a diagnostic at the user's line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as problem:
        raise failed(
            "the simulated device", failure_of(problem), piece, [f"it was running {node}"], here=True
        ) from problem


class GraphInterpreter:
    def __init__(
        self,
        graph: Graph,
        captured: TracedModel,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        seed: int = 0,
        lr_schedule: Callable[[Any], Any] | None = None,
        max_norm: float | None = None,
    ) -> None:
        """`model` gives the first weights; it is not changed."""
        self.graph, self.captured, self.seed, self.max_norm = graph, captured, seed, max_norm
        tensors = named_tensors(model) | dict(captured.constants)
        self.shards = ShardedWeights(graph, {name: tensors[name].detach() for name in graph.model.weights})
        self.shards.optimizers = Optimizers(model, optimizer, lr_schedule, self.shards.updates())
        self.order = [graph.nodes[i] for i in topological(graph)]
        self.steps = 0

    @torch.no_grad()
    def step(self, batch: tuple[Any, Any]) -> Stepped:
        """Forward, backward and update on one global batch."""
        self.batch = self.captured.layout.named(batch)
        self.values: dict[ValueId, list[Any]] = dict(self.shards.current)
        self.collected: dict[str, torch.Tensor] = {}
        self.scale: torch.Tensor | float = 1.0
        if self.max_norm is None:
            for node in self.order:
                self._run(node)
        else:
            self._clipped(self.max_norm)
        for old, new in self.graph.next.items():
            self.shards.current[old] = self.values[new]
        self.shards.optimizers.advance()
        self.steps += 1
        return Stepped(self._loss(), self.collected)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights as they are now, whole."""
        return {name: self.shards.whole(name) for name in self.graph.model.weights}

    def _clipped(self, limit: float) -> None:
        """Updates, and what comes after them, when all gradients are there and their norm is known."""
        made: set[ValueId] = set()
        late = []
        for node in self.order:
            if node.op == "update" or any(not made.isdisjoint(keys) for keys in node.reads):
                made.update(node.writes)
                late.append(node)
            else:
                self._run(node)
        whole = {
            name: gradient
            for node in late
            if node.op == "update"
            for name, gradient in self.shards.gradients(node, self.values).items()
        }
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient) for gradient in whole.values()])
        )
        self.scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for node in late:
            self._run(node)

    def _run(self, node: Node) -> None:
        op = node.op
        if op in COMPUTE:
            self._compute(node)
        elif op in ("offload", "fetch"):
            self.values[node.writes[0]] = self.values[node.reads[0][0]]
        elif op == "update":
            with _located(node):
                self.collected |= self.shards.update(node, self.values, self.scale)
        elif node.writes[0] in self.graph.held:
            self.shards.communicate(node, self.values)
        elif op == "recv":
            self.values[node.writes[0]] = self.values[node.reads[0][0]]
        elif node.splits is not None:
            self._route(node)
        else:
            sources = [(self.graph.values[key], self.values[key]) for key in node.reads[0]]
            self.values[node.writes[0]] = move(sources, self.graph.values[node.writes[0]])

    def _route(self, node: Node) -> None:
        """Rows to the devices that have their experts, and back; all of a group at once, so that nobody has to be told
        how many come."""
        given = self.values[node.reads[0][0]]
        after = self.graph.values[node.writes[0]].layout
        routed = dispatched(after.placements)
        chooses = node.splits in node.writes
        ways: list[Any] = [None] * len(given) if chooses else self.values[node.reads[1][0]]
        found: list[Any] = [None] * len(given)
        for members in along(node.template.where, node.template.axes):
            if chooses and routed is not None:
                for k in members:
                    ways[k] = leaving(given[k], routed.experts, len(members))
            for place, k in enumerate(members):
                if routed is not None:
                    found[k] = torch.cat([given[other][ways[other][place]] for other in members])
                    continue
                found[k] = given[k].new_empty(sum(map(len, ways[k])), *given[k].shape[1:])
                for there, other in enumerate(members):
                    came = [len(ways[member][there]) for member in members]
                    found[k][ways[k][there]] = given[other].split(came)[place]
            if chooses and routed is not None:
                for place, k in enumerate(members):
                    found[k] = found[k] - place * (routed.experts // len(members))
        self.values |= dict(zip(node.writes, (found, ways), strict=False))

    # ------------------------------------------------------------------------------------------------ compute

    def _compute(self, node: Node) -> None:
        template = node.template
        assert template.chunk is not None
        pieces = self.captured.pass_graphs(template.chunk, template.samples, template.sharding)
        piece: PassGraph = getattr(pieces, "F" if template.op == "R" else template.op)
        results: dict[ValueId, list[Any]] = {key: [] for key in node.writes}
        for k in range(len(devices_of(template.where))):
            given = self._given(node, piece, k)
            with _located(node, piece):
                gave = piece.run(given)
            for key, value in zip(node.writes, self._written(node, gave), strict=True):
                results[key].append(value)
        self.values |= results

    def _given(self, node: Node, piece: PassGraph, device: int) -> dict[Slot, torch.Tensor]:
        given: dict[Slot, torch.Tensor] = {}
        for slot, keys in zip(node.template.slots, node.reads, strict=True):
            kind = slot[0]
            if kind in ("saved", "kept"):
                given |= self.values[keys[0]][device]
            elif kind == "rng":
                given[slot] = self._rng(node, device)
            elif kind == "batch":
                value = self.graph.values[keys[0]]
                given[slot] = take(self.batch[value.tensor.name], boxes(value)[device])
            elif kind == "grad_output":
                given[slot] = self._gradient(node, slot, keys, device)
            else:
                given[slot] = self.values[keys[0]][device]
        return {slot: given[slot] for slot in piece.inputs}

    def _gradient(self, node: Node, slot: Slot, keys: Sequence[ValueId], device: int) -> torch.Tensor:
        """The sum of what the readers of an output gave; the loss starts with the device's share of the batch."""
        model = self.graph.model
        name = model.chunks[node.template.chunk or 0].outputs[slot[1]]
        if name == model.loss:
            return torch.tensor(self._share(node), dtype=getattr(torch, model.tensors[name].dtype))
        if not keys:
            output = self.graph.values[ValueId(Kind.ACTIVATION, name, (), node.point)]
            return torch.zeros(
                [high - low for low, high in boxes(output)[device]], dtype=getattr(torch, output.tensor.dtype)
            )
        total: torch.Tensor = self.values[keys[0]][device]
        for key in keys[1:]:
            total = total + self.values[key][device]
        return total

    def _share(self, node: Node) -> float:
        """What the loss on one device counts for in the loss of the whole batch."""
        model = self.graph.model
        return node.template.samples / model.samples if model.combine == "mean" else 1.0

    def _rng(self, node: Node, device: int) -> torch.Tensor:
        """[seed and step, first sample here, position along each axis that divides the weights]"""
        layout = node.template.layout
        assert layout is not None
        site_first, site_samples, inner = self._span(node)
        first = list(layout.boxes(SAMPLE, site_first, site_samples, inner))[device][0][0]
        axes = axes_of(layout.where)
        at = list(product(*(range(size) for _, size in axes)))[device]
        position = dict(zip((axis for axis, _ in axes), at, strict=True))
        return torch.tensor(
            [mix(self.seed, self.steps), first, *(position[divide.axis] for divide in node.template.sharding[0])]
        )

    def _span(self, node: Node) -> tuple[int, int, tuple[tuple[int, int], ...]]:
        """The samples of a node, from one of the values that it or its forward makes."""
        name = self.graph.model.chunks[node.template.chunk or 0].outputs[0]
        value = self.graph.values[ValueId(Kind.ACTIVATION, name, (), node.point)]
        return value.first, value.samples, value.inner

    def _written(self, node: Node, gave: Mapping[Slot, torch.Tensor]) -> Iterable[Any]:
        """What a piece gave, as the graph's values: activations are bundles."""
        saved = {slot: value for slot, value in gave.items() if slot[0] == "saved"}
        kept = {slot: value for slot, value in gave.items() if slot[0] == "kept"}
        if node.op == "R":
            return [saved]
        single = [gave[slot] for slot in node.template.outputs if slot[0] not in ("saved", "kept")]
        bundles = [saved] if node.op == "F" else [kept] if kept else []
        return (single + bundles)[: len(node.writes)]

    def _loss(self) -> float:
        """The mean (or the sum) over everything that had a part of the batch."""
        total = 0.0
        for key in self.graph.losses:
            value = self.graph.values[key]
            whole = move([(value, self.values[key])], value._replace(layout=value.layout.finished()))
            node = self.graph.nodes[self.graph.made[key]]
            share = self._share(node)
            parts = node.template.layout.separate() if node.template.layout else [0]
            total += sum(float(whole[k]) * share for k in parts)
        return total
