"""Cleans up an exported graph: inlines regions without gradients (`with torch.no_grad()`), which export represents as
calls of submodules, and removes unused operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_REGION = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_regions(root: fx.GraphModule) -> None:
    """Replace every such call by its operators. Values that leave a region without gradients are detached."""
    for call in [node for node in root.graph.nodes if node.target is _REGION]:
        enabled, inner, *arguments = call.args
        results = _copy(root, getattr(root, inner.target), arguments, call)
        if not enabled:
            results = [_detached(root.graph, call, node) for node in results]
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            root.graph.erase_node(user)
        root.graph.erase_node(call)
        root.graph.erase_node(inner)
    root.graph.lint()


def drop_unread(graph: fx.Graph) -> None:
    """Removes operators whose result is unused, and checks of shapes and dtypes, which already ran during tracing."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        schema = getattr(node.target, "_schema", None)
        check = node.target is torch.ops.aten._assert_tensor_metadata.default
        if (
            check
            or node.target is operator.getitem
            or (schema is not None and schema.returns and not schema.is_mutable)
        ):
            graph.erase_node(node)


def _copy(root: fx.GraphModule, region: fx.GraphModule, arguments: list[Any], call: fx.Node) -> list[fx.Node]:
    copied: dict[fx.Node, Any] = {}
    given = iter(arguments)
    results: list[fx.Node] = []
    with root.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "placeholder":
                copied[node] = next(given)
            elif node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                results = [copied[output] for output in outputs]
            else:
                copied[node] = root.graph.node_copy(node, lambda n: copied[n])
    return results


def _detached(graph: fx.Graph, call: fx.Node, node: fx.Node) -> fx.Node:
    with graph.inserting_before(call):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached
