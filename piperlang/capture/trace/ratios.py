"""Losses that are a sum divided by a count: exact however the batch is divided, even where its parts have different
counts.

`loss` may return (sum, count), such as the sum of token losses and the number of tokens that are not masked. A cross
entropy with reduction "mean" is such a ratio, too: it divides by the number of targets that are not `ignore_index`, or
by the sum of their class weights. Both are written as quotients of the graph. A count that depends on the batch alone
is then computed from the whole batch (batch/whole.py)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from piperlang.capture.trace.buffers import ancestors
from piperlang.capture.trace.insert import insert
from piperlang.capture.trace.random import module_of
from piperlang.diagnostics import error

aten = torch.ops.aten
MEAN, SUM = 1, 2
_OVER_CLASSES = {
    aten.cross_entropy_loss.default,
    aten.nll_loss.default,
    aten.nll_loss_nd.default,
    aten.nll_loss2d.default,
}


def write_ratios(root: fx.GraphModule, leaves: int, of_batch: Collection[str]) -> None:
    """`leaves`: how many of the graph's outputs belong to the loss: it, or a sum and a count. `of_batch`: placeholders
    of the batch and of constants."""
    (output,) = (node for node in root.graph.nodes if node.op == "output")
    results, others = list(output.args[0][:leaves]), output.args[0][leaves:]
    if not all(isinstance(node, fx.Node) for node in results):
        raise error("P0807", "the loss returns no tensor", help="return a scalar, or (sum, count)")
    if len(results) == 2:
        total, count = results
        if not _depends_on(count, of_batch):
            raise error(
                "P0807",
                "the count of the loss depends on the model",
                notes=[module_of(count)],
                help=(
                    "compute the count from the batch alone, such as the number of targets that are not masked; return"
                    " several losses as a dict"
                ),
            )
        with root.graph.inserting_before(output):
            output.args = ((insert(total, aten.div.Tensor, total, count), *others),)
    for node in list(root.graph.nodes):
        if node.target in _OVER_CLASSES and _is_mean(node) and _depends_on(node.args[1], of_batch):
            node.replace_all_uses_with(_ratio(root.graph, node))
            root.graph.erase_node(node)
    root.recompile()


def _depends_on(node: fx.Node, allowed: Collection[str]) -> bool:
    """Whether a value depends on these placeholders alone."""
    return all(found.name in allowed for found in ancestors([node]) if found.op == "placeholder")


def cross_entropy_settings(node: fx.Node) -> dict[str, Any]:
    """The options of a cross entropy."""
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given = dict(zip(names, node.args[2:], strict=False)) | dict(node.kwargs)
    return {"weight": None, "reduction": MEAN, "ignore_index": -100} | given


def _is_mean(node: fx.Node) -> bool:
    target: Any = node.args[1]
    return cross_entropy_settings(node)["reduction"] == MEAN and not target.meta["val"].is_floating_point()


def _ratio(graph: fx.Graph, mean: fx.Node) -> fx.Node:
    """The sum of the losses over the targets that count, divided by their number or by the sum of their weights."""
    scores, target = mean.args[:2]
    settings = cross_entropy_settings(mean)
    with graph.inserting_before(mean):
        total = insert(mean, mean.target, scores, target, **settings | {"reduction": SUM})
        valid = insert(mean, aten.ne.Scalar, target, settings["ignore_index"])
        weight = settings["weight"]
        count = insert(mean, aten.sum.default, valid) if weight is None else _weighted(mean, target, valid, weight)
        return insert(mean, aten.div.Tensor, total, count)


def _weighted(mean: fx.Node, target: Any, valid: fx.Node, weight: fx.Node) -> fx.Node:
    """Counts the targets of each class first: that depends on the batch alone, while the weights may be the model's."""
    value = weight.meta["val"]
    where = insert(mean, aten.reshape.default, insert(mean, aten.mul.Tensor, target, valid), [-1])
    ones = insert(mean, aten.to.dtype, insert(mean, aten.reshape.default, valid, [-1]), value.dtype)
    none = insert(mean, aten.zeros.default, list(value.shape), dtype=value.dtype, device=value.device)
    counts = insert(mean, aten.scatter_add.default, none, 0, where, ones)
    return insert(mean, aten.sum.default, insert(mean, aten.mul.Tensor, weight, counts))
