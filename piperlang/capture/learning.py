"""Which values of a program a gradient flows through, as autograd says when it sees the program run on fake tensors.

That a value is floating and made from others that learn does not say it: zeros in the shape of an activation learn nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree


def learning(graph: fx.Graph, root: fx.GraphModule, mode: FakeTensorMode, trained: Collection[str]) -> set[fx.Node]:
    """`trained`: placeholders of weights that learn."""
    places = [node for node in graph.nodes if node.op == "placeholder"]
    watched = _Learning(root, graph)
    with mode, torch.enable_grad():
        watched.run(*(torch.empty_like(node.meta["val"]).requires_grad_() if node.name in trained else node.meta["val"] for node in places), enable_io_processing=False)
    return watched.found


class _Learning(fx.Interpreter):
    def __init__(self, root: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(root, graph=graph)
        self.found: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if any(isinstance(value, torch.Tensor) and value.requires_grad for value in pytree.tree_leaves(result)):
            self.found.add(n)
        return result
