"""Cleans up an exported graph: inlines regions (`with torch.no_grad()`, `with torch.autocast(...)`), which export
represents as calls of submodules, and removes unused operators."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from piperlang.capture.trace.autocast import AUTOCAST, NO_GRADIENT, Autocast

_GRADIENTS = torch.ops.higher_order.wrap_with_set_grad_enabled
_REGIONS = (_GRADIENTS, AUTOCAST)


def inline_regions(root: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Replaces every such call by its operators. Values that leave a region without gradients are detached; casts of
    autocast become operators."""
    for call in [node for node in root.graph.nodes if node.target in _REGIONS]:
        results = _Region(root, call, mode).inline(root, call, list(call.args), None)
        for user in list(call.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(results[user.args[1]])
            root.graph.erase_node(user)
        root.graph.erase_node(call)
    for node in [node for node in root.graph.nodes if node.op == "get_attr" and not node.users]:
        root.graph.erase_node(node)
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


class _Region:
    """Copies the operators of a region, and of the regions in it, to before its call."""

    def __init__(self, root: fx.GraphModule, call: fx.Node, mode: FakeTensorMode) -> None:
        self.root, self.call, self.mode = root, call, mode

    def inline(
        self, owner: fx.GraphModule, call: fx.Node, arguments: list[Any], cast: Autocast | None
    ) -> list[fx.Node]:
        """`owner`: the module whose graph has the call. `cast`: the autocast around it."""
        detaches = False
        if call.target is _GRADIENTS:
            enabled, inner, *given = arguments
            detaches = not enabled
        else:
            device, dtype, enabled, _, inner, *given = arguments
            cast = Autocast(device, dtype, self.mode) if enabled else None
        results = self._copy(getattr(owner, inner.target), given, cast)
        return [_detached(self.root.graph, self.call, node) for node in results] if detaches else results

    def _copy(self, region: fx.GraphModule, arguments: list[Any], cast: Autocast | None) -> list[fx.Node]:
        copied: dict[fx.Node, Any] = {}
        given = iter(arguments)
        results: list[fx.Node] = []
        for node in region.graph.nodes:
            if node.op == "placeholder":
                copied[node] = next(given)
            elif node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], tuple | list) else (node.args[0],)
                results = [copied[output] for output in outputs]
            elif node.target in _REGIONS:
                inside = [copied.get(value, value) if isinstance(value, fx.Node) else value for value in node.args]
                copied[node] = self.inline(region, node, inside, cast)
            elif node.target is operator.getitem and isinstance(copied[node.args[0]], list):
                copied[node] = copied[node.args[0]][node.args[1]]
            elif node.op != "get_attr" or not isinstance(getattr(region, node.target), fx.GraphModule):
                made = self._operator(node, copied, cast)
                forgotten = NO_GRADIENT in (node.meta.get("custom") or {})
                copied[node] = _without_gradient(self.root.graph, self.call, made) if forgotten else made
        return results

    def _operator(self, node: fx.Node, copied: dict[fx.Node, Any], cast: Autocast | None) -> fx.Node:
        with self.root.graph.inserting_before(self.call):
            made = self.root.graph.node_copy(node, lambda n: copied[n])
        return cast.explicit(made) if cast is not None else made


def _without_gradient(graph: fx.Graph, call: fx.Node, made: Any) -> Any:
    """A result, or the list of results of an operator, detached."""
    if isinstance(made, fx.Node):
        tensor = isinstance(made.meta.get("val"), torch.Tensor)
        return _detached(graph, call, made) if tensor else made
    return [_without_gradient(graph, call, one) for one in made]


def _detached(graph: fx.Graph, call: fx.Node, node: fx.Node) -> fx.Node:
    with graph.inserting_before(call):
        detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached
