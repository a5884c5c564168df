"""New operators in a traced graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx


def insert(like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the graph's insertion point, in the module, with the tags and the source line of another."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = dict(like.meta)
    values, given = fx.node.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*values, **given)
    return node


def insert_call(like: fx.Node, function: Callable[..., torch.Tensor], *args: fx.Node) -> fx.Node:
    """The operators of a function of tensors; returns its result."""
    with like.meta["val"].fake_mode, torch.no_grad():
        graph = make_fx(lambda *given: function(*given))(*(arg.meta["val"] for arg in args)).graph
    places = [node for node in graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, fx.Node] = dict(zip(places, args, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            given, named = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = insert(like, node.target, *given, **named)
    (result,) = next(node for node in graph.nodes if node.op == "output").all_input_nodes
    return values[result]
