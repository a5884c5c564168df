"""Makes operators that choose dimensions by size use the dimensions that they chose for the whole batch.

`squeeze()` removes every dimension of size 1, and `cross` without a dimension uses the first of size 3. In a part of
the batch that could be the batch dimension."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def name_dims(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            _squeeze(node)
        elif node.target is aten.cross.default:
            _cross(node)


def _squeeze(node: fx.Node) -> None:
    shape = _shape(node.args[0])
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", range(len(shape)))
    dims = [given] if isinstance(given, int) else list(given)  # type: ignore[arg-type]
    node.target = aten.squeeze.dims
    node.args, node.kwargs = (
        (node.args[0], sorted({dim % len(shape) for dim in dims if shape[dim] == 1} if shape else ())),
        {},
    )


def _cross(node: fx.Node) -> None:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if dim is None:
        node.args, node.kwargs = (*node.args[:2], _shape(node.args[0]).index(3)), {}


def _shape(node: object) -> list[int]:
    assert isinstance(node, fx.Node)
    return list(node.meta["val"].shape)
