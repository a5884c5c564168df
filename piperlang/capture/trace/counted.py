"""Losses that are a sum divided by a count: exact however the batch is divided, even where its parts have different
counts.

`loss` may return (sum, count), such as the sum of token losses and the number of tokens that are not masked. A cross
entropy with reduction "mean" is such a loss, too: it divides by the number of targets that are not `ignore_index`. The
count of the whole batch is computed from the batch alone before a step. The graph then computes only the sum, and its
gradient starts from 1 / count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from piperlang.capture.trace.random import module_of
from piperlang.diagnostics import error

aten = torch.ops.aten
MEAN, SUM = 1, 2


def take_count(
    root: fx.GraphModule, batch: list[str], leaves: int, constants: Mapping[str, torch.Tensor]
) -> fx.GraphModule | None:
    """Leave only the sum of the loss in the graph. Returns a module that computes the count from the tensors of the
    batch, or None where there is no count.

    `leaves`: how many of the graph's outputs belong to the loss; the outputs after them stay. `constants`: tensors made
    of numbers in the code, by placeholder."""
    (output,) = (node for node in root.graph.nodes if node.op == "output")
    results, others = list(output.args[0][:leaves]), output.args[0][leaves:]
    if len(results) > 2 or not all(isinstance(node, fx.Node) for node in results):
        raise error(
            "P0807",
            "the loss returns no tensor" if len(results) == 1 else f"the loss returns {len(results)} values",
            help="return a scalar, or (sum, count)",
        )
    if len(results) == 1 and not _is_mean_of_targets(results[0]):
        return None
    total, count = results if len(results) == 2 else _apart(root.graph, results[0])
    counting = _counting(root, count, batch, constants)
    output.args = ((total, *others),)
    root.graph.eliminate_dead_code()
    root.recompile()
    return counting


def _is_mean_of_targets(node: fx.Node) -> bool:
    if node.target is not aten.cross_entropy_loss.default:
        return False
    target: Any = node.args[1]
    weight, reduction, _, smoothing = _settings(node)
    return weight is None and reduction == MEAN and smoothing == 0.0 and not target.meta["val"].is_floating_point()


def _settings(node: fx.Node) -> tuple[Any, int, int, float]:
    names = ("weight", "reduction", "ignore_index", "label_smoothing")
    given: dict[str, Any] = dict(zip(names, node.args[2:], strict=False)) | dict(node.kwargs)
    return (
        given.get("weight"),
        given.get("reduction", MEAN),
        given.get("ignore_index", -100),
        given.get("label_smoothing", 0.0),
    )


def _apart(graph: fx.Graph, mean: fx.Node) -> tuple[fx.Node, fx.Node]:
    logits, target = mean.args[:2]
    ignored = _settings(mean)[2]
    with graph.inserting_before(mean):
        total = _insert(graph, mean, aten.cross_entropy_loss.default, (logits, target, None, SUM, ignored))
        valid = _insert(graph, mean, aten.ne.Scalar, (target, ignored))
        count = _insert(graph, mean, aten.sum.default, (valid,))
    return total, count


def _insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    values: list[Any] = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    with values[0].fake_mode:
        node.meta["val"] = target(*values)
    return node


def _counting(
    root: fx.GraphModule, count: fx.Node, batch: list[str], constants: Mapping[str, torch.Tensor]
) -> fx.GraphModule:
    """The part of the graph that computes the count. It may depend only on the batch and on constants."""
    wanted: set[fx.Node] = set()
    todo = [count]
    while todo:
        node = todo.pop()
        if node in wanted:
            continue
        wanted.add(node)
        todo += node.all_input_nodes
        if node.op == "placeholder" and node.name not in batch and node.name not in constants:
            raise error(
                "P0807",
                "the count of the loss depends on the model",
                notes=[f"{module_of(count)}"],
                help="compute the count from the batch alone, such as the number of targets that are not masked",
            )
    graph, held = fx.Graph(), nn.Module()
    copied = {node: graph.placeholder(node.name) for name in batch for node in root.graph.nodes if node.name == name}
    for node in root.graph.nodes:
        if node in wanted and node.name in constants:
            held.register_buffer(node.name, constants[node.name])
            copied[node] = graph.get_attr(node.name)
    for node in root.graph.nodes:
        if node in wanted and node not in copied:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output(copied[count])
    return fx.GraphModule(held, graph)
