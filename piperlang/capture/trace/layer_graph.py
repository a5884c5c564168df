"""Layers in an exported graph: one that was traced stands between operators that say where it begins and ends, and one
that is a copy is one operator, until its operators are copied."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, fx

from piperlang.capture.trace.calls import changed, empty
from piperlang.diagnostics import error


@dataclass(frozen=True)
class LayerCall:
    path: str
    """Of the layer, in what is exported."""
    tags: Mapping[str, Any]
    """Annotations around the call."""
    original: int | None = None
    """The number of the traced layer that it is a copy of."""


_shapes: list[Sequence[Tensor]] = []
"""The results of the copy that is being made."""
_library = torch.library.Library("piper", "FRAGMENT")  # type: ignore[no-untyped-call]
for _declared in (
    "layer_reads(Tensor[] tensors, int trace) -> ()",
    "layer_input(Tensor input, int trace) -> Tensor",
    "layer_outputs(Tensor[] outputs, Tensor[] weights, int trace) -> Tensor[]",
    "copy_layer(Tensor[] inputs, Tensor[] weights, int copy) -> Tensor[]",
):
    _library.define(_declared)  # type: ignore[no-untyped-call]
_READS, _INPUT, _OUTPUTS, _COPY = BOUNDS = (
    *(torch.ops.piper.layer_reads.default, torch.ops.piper.layer_input.default),
    *(torch.ops.piper.layer_outputs.default, torch.ops.piper.copy_layer.default),
)
"""Operators that say where layers begin and end."""


@torch.library.register_fake("piper::layer_reads", lib=_library)  # type: ignore[untyped-decorator]
def _reads(tensors: Sequence[Tensor], trace: int) -> None:
    pass


# torch.export computes with constants while it traces.
_library.impl("layer_reads", _reads, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


@torch.library.register_fake("piper::layer_input", lib=_library)  # type: ignore[untyped-decorator]
def _input(input: Tensor, trace: int) -> Tensor:
    return empty(input)


@torch.library.register_fake("piper::layer_outputs", lib=_library)  # type: ignore[untyped-decorator]
def _outputs(outputs: Sequence[Tensor], weights: Sequence[Tensor], trace: int) -> list[Tensor]:
    return [empty(tensor) for tensor in outputs]


@torch.library.register_fake("piper::copy_layer", lib=_library)  # type: ignore[untyped-decorator]
def _copy(inputs: Sequence[Tensor], weights: Sequence[Tensor], copy: int) -> list[Tensor]:
    return [empty(tensor) for tensor in _shapes[-1]]


def begin(inputs: Sequence[Tensor], reads: Sequence[Tensor], number: int) -> list[Tensor]:
    """A traced layer begins. Returns the tensors that it is given instead of its inputs."""
    read_too(reads, number)
    return [torch.ops.piper.layer_input(tensor, number) for tensor in inputs]


def read_too(tensors: Sequence[Tensor], number: int) -> None:
    """The traced layer reads other tensors than its inputs."""
    torch.ops.piper.layer_reads(tensors, number)


def end(outputs: Sequence[Tensor], weights: Sequence[Tensor], number: int) -> Sequence[Tensor]:
    """It ends. Returns the tensors that others are given instead of its outputs, which may require gradients because of
    its weights."""
    found: Sequence[Tensor] = torch.ops.piper.layer_outputs(outputs, weights, number)
    return found


def stand_in(
    inputs: Sequence[Tensor], reads: Sequence[Tensor], outputs: Sequence[Tensor], number: int
) -> Sequence[Tensor]:
    """A copy. Returns tensors like its outputs."""
    _shapes.append(outputs)
    try:
        found: Sequence[Tensor] = torch.ops.piper.copy_layer(inputs, reads, number)
    finally:
        _shapes.pop()
    return found


def copy_layers(graph: fx.Graph, traced: Sequence[LayerCall], copies: Sequence[LayerCall]) -> None:
    """Replaces the operators that stand for layers. Layers are numbered in the order of the two lists."""
    bounds = {node.args[2]: _Bounds(node) for node in graph.nodes if node.target is _OUTPUTS}
    for node in graph.nodes:
        if node.target is _READS:
            bounds[node.args[1]].reads.append(node)
        elif node.target is _INPUT:
            bounds[node.args[1]].inputs.append(node)
    for node in [node for node in graph.nodes if node.target is _COPY]:
        copy = copies[node.args[2]]
        first, original = bounds[copy.original], traced[copy.original]
        read = [one for reads in first.reads for one in _nodes(reads)]
        copied: dict[fx.Node, fx.Node] = dict(zip((*first.inputs, *read), (*node.args[0], *node.args[1]), strict=True))
        with graph.inserting_before(node):
            for one in first.body:
                copied[one] = graph.node_copy(one, lambda n, copied=copied: copied.get(n, n))  # type: ignore[misc]
                copied[one].meta = _moved(one.meta, original, first.reads[0], copy, node)
        _replace(node, [copied.get(one, one) for one in _nodes(first.outputs)])
    for bound in bounds.values():
        _replace(bound.outputs, _nodes(bound.outputs))
        for node in bound.reads:
            graph.erase_node(node)
        for node in bound.inputs:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)


class _Bounds:
    """Where a traced layer begins and ends in the graph."""

    def __init__(self, outputs: fx.Node) -> None:
        self.outputs = outputs
        self.inputs: list[fx.Node] = []
        self.reads: list[fx.Node] = []
        """Its weights, and after that other tensors, one by one."""

    @cached_property
    def body(self) -> list[fx.Node]:
        known = {*self.inputs, *(one for reads in self.reads for one in _nodes(reads))}
        found: list[fx.Node] = []
        node = self.inputs[-1].next
        while node is not self.outputs:
            if node.op == "call_function" and node.target is not _READS:
                unseen = any(one not in known and one.op == "call_function" for one in node.all_input_nodes)
                if unseen or node in known:
                    raise error("P0802", "a layer reads a tensor that it was not seen to read")  # traced without copies
                found.append(node)
                known.add(node)
            node = node.next
        return found


def _nodes(call: fx.Node) -> Sequence[fx.Node]:
    """The tensors that an operator at the bounds of a layer is given."""
    found: Any = call.args[0]
    return cast("Sequence[fx.Node]", found)


def _replace(node: fx.Node, results: Sequence[fx.Node]) -> None:
    for user in list(node.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _moved(meta: dict[str, Any], old: LayerCall, entry: fx.Node, new: LayerCall, call: fx.Node) -> dict[str, Any]:
    """Metadata of an operator in another layer, which is called elsewhere."""
    old_stack, stack = entry.meta.get("nn_module_stack") or {}, dict(call.meta.get("nn_module_stack") or {})
    for key, (path, kind) in list((meta.get("nn_module_stack") or {}).items())[len(old_stack) :]:
        moved = new.path + path.removeprefix(old.path) if f"{path}.".startswith(f"{old.path}.") else path
        stack[key.removesuffix(path) + moved] = moved, kind
    above, below = entry.meta.get("stack_trace") or "", meta.get("stack_trace") or ""
    lines = (call.meta.get("stack_trace") or "") + below.removeprefix(above) if below.startswith(above) else below
    custom = {**new.tags, **changed(old.tags, meta.get("custom") or {})}
    return {**meta, "nn_module_stack": stack, "stack_trace": lines, "custom": custom}
