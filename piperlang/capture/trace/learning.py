"""Which values of a program receive a gradient, according to autograd when the program runs on fake tensors.

The dtype and the inputs of a value do not decide it: zeros in the shape of an activation receive no gradient, nor does
a value that the loss does not depend on. A parameter that receives none is not trained: in plain PyTorch its gradient
is None, and no optimizer changes it.

Autograd's graph is walked, not run: some second derivatives crash on fake tensors (torch 2.13)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree


def learning(graph: fx.Graph, root: fx.GraphModule, mode: FakeTensorMode, requiring: Collection[str]) -> set[fx.Node]:
    """The values that receive a gradient. `requiring`: placeholders of parameters that require gradients; the result
    contains those of them that receive one."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    watched = _Watched(root, graph)
    with mode, torch.enable_grad():
        given = [
            torch.empty_like(node.meta["val"]).requires_grad_() if node.name in requiring else node.meta["val"]
            for node in places
        ]
        loss, *_ = watched.run(*given, enable_io_processing=False)
    reached = _behind(loss) if loss.requires_grad else set()
    return {node for node, edges in watched.edges.items() if not reached.isdisjoint(edges)}


Edge: TypeAlias = tuple[Any, int]
"""A value in autograd's graph: the function that computed it, and the index of the output."""


class _Watched(fx.Interpreter):
    """Records the position of each value in autograd's graph."""

    def __init__(self, root: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.edges: dict[fx.Node, list[Edge]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.edges[n] = [
            _edge(value)
            for value in pytree.tree_leaves(result)
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        return result


def _edge(value: torch.Tensor) -> Edge:
    found = get_gradient_edge(value)
    return found.node, found.output_nr


def _behind(loss: torch.Tensor) -> set[Edge]:
    """All edges that the backward of the loss passes through."""
    found: set[Edge] = {_edge(loss)}
    walked: set[Any] = set()
    todo = [_edge(loss)[0]]
    while todo:
        function = todo.pop()
        if function in walked:
            continue
        walked.add(function)
        for other, number in function.next_functions:
            if other is not None:
                found.add((other, number))
                todo.append(other)
    return found
