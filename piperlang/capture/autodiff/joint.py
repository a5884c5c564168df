"""The joint graph of a chunk: its forward and backward in one graph, by torch's ahead-of-time autograd.

Private API, kept in this file: `torch._functorch.aot_autograd.aot_export_joint_simple` (tried on torch 2.11 and
2.13)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.multiprocessing.reductions import StorageWeakRef

from piperlang.capture.autodiff.cross_entropy import fused, linear_cross_entropy
from piperlang.capture.autodiff.cut import Subgraph
from piperlang.capture.batch.sizes import Sizes
from piperlang.capture.trace.effects import without_effects
from piperlang.capture.trace.random import PLACE
from piperlang.capture.trace.trace import Traced
from piperlang.capture.trace.untraceable import differentiating, refuse_sparse
from piperlang.ir.model import Slot

LSTM = {torch.ops.aten.lstm.input, torch.ops.aten.lstm.data}


def sources(traced: Traced, chunk: Subgraph) -> list[tuple[Slot, fx.Node, bool]]:
    """The inputs of a chunk: slot, node of the traced graph, and whether it requires a gradient."""
    nodes = {node.name: node for node in traced.graph.nodes}
    found: list[tuple[Slot, fx.Node, bool]] = [
        (("weight", i), nodes[p], traced.weights[p].name in traced.trained) for i, p in enumerate(chunk.weights)
    ]
    found += [(("batch", i), nodes[p], False) for i, p in enumerate(chunk.batch)]
    found += [(("rng", 0), nodes[PLACE], False)] if chunk.random else []
    return found + [(("input", i), nodes[v.name], v.differentiable) for i, v in enumerate(chunk.inputs)]


def _stand_in(slot: Slot, value: torch.Tensor) -> torch.Tensor:
    """A fake tensor for tracing. Tensors that cross between chunks, forward and backward, are contiguous: both sides
    rely on it."""
    return torch.empty_like(
        value, memory_format=torch.contiguous_format if slot[0] == "input" else torch.preserve_format
    )


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Joint:
    """Forward and backward of a chunk, for a batch of `samples`."""

    def __init__(self, traced: Traced, chunk: Subgraph, sizes: Sizes | None = None, samples: int = 0) -> None:
        self.traced, self.chunk, self.sizes = traced, chunk, sizes
        self.samples = samples or traced.samples
        self.sources = sources(traced, chunk)
        self.learns = any(learns for _, _, learns in self.sources)
        self.operators = self._operators()
        self.module = self._trace()
        given = [slot for slot, _, _ in self.sources]
        gradients = (
            [("grad_output", i) for i, value in enumerate(chunk.outputs) if value.differentiable] if self.learns else []
        )
        self.inputs: list[Slot] = [*given, *gradients]
        slots = [("output", i) for i in range(len(chunk.outputs))] + [
            (f"grad_{kind}", i) for kind, i in given if self.learns
        ]
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        self.outputs: list[Slot | None] = [
            slot if isinstance(node, fx.Node) else None for slot, node in zip(slots, output.args[0], strict=False)
        ]
        """None where there is no gradient. A chunk without values that require gradients has outputs only."""

    @property
    def takes(self) -> dict[Slot, torch.Tensor]:
        """Fake tensors of the inputs."""
        places = self.module.graph.find_nodes(op="placeholder")
        return {slot: node.meta["val"] for slot, node in zip(self.inputs, places, strict=True)}

    def _value(self, slot: Slot, node: fx.Node) -> torch.Tensor:
        """A value of the traced graph, at this joint graph's number of samples."""
        value: torch.Tensor = self.traced.value(node)
        if self.sizes is None or self.samples == self.traced.samples or slot[0] in ("weight", "rng"):
            return value
        return torch.empty(self.sizes.shape(node, self.samples), dtype=value.dtype, device=value.device)

    def _trace(self) -> fx.GraphModule:
        # The metadata of each operator, in particular its module, is copied to the joint graph for messages.
        with differentiating(), self.traced.mode, torch.enable_grad(), fx.traceback.preserve_node_meta():
            fakes = [
                _stand_in(slot, self._value(slot, node)).requires_grad_(learns) for slot, node, learns in self.sources
            ]
            joint = aot_export_joint_simple(self._run, tuple(fakes), trace_joint=self.learns)
        assert isinstance(joint, fx.GraphModule)
        without_effects(joint)
        refuse_sparse(joint.graph)
        return joint

    def _run(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Runs the chunk's operators. Outputs to other chunks are contiguous and own their memory: they are neither
        views nor inputs of the chunk. Those that receive no gradient, because the other chunks detach them, are
        detached here."""
        seen = {_storage(tensor) for tensor in given}
        found = []
        results = self.operators.run(*given, enable_io_processing=False)
        for result, value in zip(results, self.chunk.outputs, strict=True):
            storage = _storage(result)
            odd = storage in seen or result._base is not None or not result.is_contiguous()
            owned = result.clone(memory_format=torch.contiguous_format) if odd else result
            found.append(owned if value.differentiable else owned.detach())
            seen.add(storage)
        return tuple(found)

    def _operators(self) -> fx.Interpreter:
        """An interpreter of the chunk's operators as a separate module."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for _, node, _ in self.sources}
        losses = fused(self.chunk.nodes) if self.learns else {}
        replaced = {node for one in losses.values() for node in one.between}
        for node in self.chunk.nodes:
            if node in losses:
                given = fx.node.map_arg(losses[node].arguments, copied.__getitem__)
                copied[node] = graph.call_function(linear_cross_entropy, given)
                copied[node].meta = dict(node.meta)
            if node in losses or node in replaced:
                continue
            copied[node] = graph.node_copy(node, lambda n: copied[n])
            if self.sizes is not None:
                copied[node].args, copied[node].kwargs = self.sizes.arguments(node, self.samples, lambda n: copied[n])
        names = {node.name: node for node in self.chunk.nodes}
        graph.output(tuple(copied[names[value.name]] for value in self.chunk.outputs))
        return _Operators(self.traced.root, graph=graph)


class _Operators(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # An LSTM whose input requires no gradient would become one operator of oneDNN whose forward does not give what
        # its backward needs (torch 2.11 and 2.13). Without oneDNN it becomes matrix products, as with other inputs.
        with torch.backends.mkldnn.flags(enabled=False) if target in LSTM else nullcontext():
            return super().call_function(target, args, kwargs)
