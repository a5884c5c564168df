"""What a backward is given, where it may recompute what is cheap: the values with the fewest bytes from which cheap
operators compute the rest. That is a minimum cut of the graph between what is never computed twice (matrix products,
attention, random numbers, whatever is not known to be cheap) and what the backward reads.

Of several such cuts it is the one nearest to the backward, which recomputes least."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable

import networkx as nx  # which torch requires
import torch
from torch import fx
from torch._ops import OpOverload

from piperlang.capture.autodiff.cost import size, storages

aten = torch.ops.aten

VIEWS = {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.detach.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.alias.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.reshape.default,
}
"""View operators: they compute nothing."""

CHEAP = {
    aten._to_copy.default,
    aten._unsafe_view.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.full.default,
    aten.full_like.default,
    aten.lift_fresh_copy.default,
    aten.mean.default,
    aten.mean.dim,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
    aten.ones.default,
    aten.ones_like.default,
    aten.repeat.default,
    aten.scalar_tensor.default,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.stack.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.tril.default,
    aten.triu.default,
    aten.unbind.int,
    aten.var.correction,
    aten.var_mean.correction,
    aten.zeros.default,
    aten.zeros_like.default,
}
"""Operators that take about as long as to read and write their values once, besides the pointwise ones."""

SMALL = 4
"""A result so many times smaller than what it is computed from is saved: that costs next to nothing."""

_SOURCE, _SINK = "source", "sink"


def is_cheap(node: fx.Node) -> bool:
    """Whether an operator may run again in the backward."""
    target = node.target
    if target in VIEWS or target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target not in CHEAP and torch.Tag.pointwise not in target.tags:
        return False
    read = sum(size(source.meta["val"]) for source in node.all_input_nodes)
    return SMALL * size(node.meta["val"]) >= read


def fewest_bytes(read: Iterable[fx.Node], made: Collection[fx.Node], free: Collection[fx.Node]) -> set[fx.Node]:
    """The values with the fewest bytes from which those in `read` can be computed again. `made`: operators that may run
    again if they are cheap. `free`: values that are there anyway."""
    network = nx.DiGraph()
    seen: set[fx.Node] = set()
    todo = [node for node in read if node not in free]
    for node in todo:
        network.add_edge((node, "out"), _SINK)
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        network.add_edge((node, "in"), (node, "out"), capacity=_held(node))
        if node not in made or not is_cheap(node):
            network.add_edge(_SOURCE, (node, "in"))
            continue
        sources = [source for source in node.all_input_nodes if source not in free]
        network.add_edges_from(((source, "out"), (node, "in")) for source in sources)
        todo += sources
    if _SOURCE not in network:
        return set()
    _, (before, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    return {node for node in seen if (node, "in") in before and (node, "out") not in before}


def _held(node: fx.Node) -> float:
    """The bytes that saving a value keeps in memory: of a view, all that it is a view of. What cannot be saved by
    itself, such as a number, has infinitely many, and so have several tensors that others read one by one."""
    value = node.meta["val"]
    apart = not isinstance(value, torch.Tensor) and all(user.target is operator.getitem for user in node.users)
    if apart or not isinstance(value, torch.Tensor | tuple | list):
        return math.inf
    return sum(storages(value).values())
