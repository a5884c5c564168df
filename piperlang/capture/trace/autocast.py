"""Regions of `torch.autocast` as explicit casts, so that a region may be cut into chunks and its modules may be tagged.

Autocast casts the operands of an operator, or lets it compute in another dtype. What it does is observed on fake
tensors: casts of operands that come before any other operator become operators of the graph. Where that does not
explain all of it, the operator is replaced by the operators that it runs under autocast.

Private API, kept in this file: the arguments of torch.export's operator for such regions (tried on torch 2.11 and
2.13)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from piperlang.capture.trace.layer_graph import BOUNDS

AUTOCAST = torch.ops.higher_order.wrap_with_autocast
aten = torch.ops.aten
Run: TypeAlias = tuple[Any, tuple[torch.dtype, ...]]
"""An operator that ran, and the dtypes of its operands."""


NO_GRADIENT = "piper_no_gradient"
"""The key in a node's `custom` metadata that says that it ran without gradients inside of autocast."""


class NotedGradients(TorchFunctionMode):
    """Notes which operators run without gradients inside of autocast: torch.export forgets it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        if not autocast or torch.is_grad_enabled():
            return function(*args, **(kwargs or {}))
        with traceback.annotate({NO_GRADIENT: True}):
            return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Autocast:
    device: str
    dtype: torch.dtype | None
    mode: FakeTensorMode

    def explicit(self, node: fx.Node) -> Any:
        """Rewrites an operator so that it computes without autocast what it computes with it. Returns the result."""
        if not isinstance(node.target, torch._ops.OpOverload) or node.target in BOUNDS:
            return node
        values = {source: source.meta["val"] for source in node.all_input_nodes if "val" in source.meta}
        casts, expected = self._observed(node, values, enabled=True)
        with self.mode:
            explicit = values | {source: values[source].to(dtype) for source, dtype in casts.items()}
        try:
            first, found = self._observed(node, explicit, enabled=False)
        except RuntimeError:  # operands of different dtypes
            return self._decomposed(node)
        if first or expected != found:
            return self._decomposed(node)
        for source, dtype in casts.items():
            with node.graph.inserting_before(node):
                cast = node.graph.call_function(aten.to.dtype, (source, dtype))
            cast.meta = {**node.meta, "val": explicit[source]}
            node.replace_input_with(source, cast)
        return node

    def _observed(
        self, node: fx.Node, values: dict[fx.Node, Any], enabled: bool
    ) -> tuple[dict[fx.Node, torch.dtype], list[Run]]:
        """The operands that an operator casts first, and the operators that run after that."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values.get(source))
        seen = _Seen({id(value): source for source, value in values.items()})
        with ExitStack() as stack:
            for context in (self.mode, torch.no_grad(), self._context(enabled), seen):
                stack.enter_context(context)
            node.target(*args, **kwargs)  # type: ignore[operator]
        return seen.casts, seen.runs

    def _context(self, enabled: bool) -> torch.autocast:
        return torch.autocast(self.device, dtype=self.dtype, enabled=enabled, cache_enabled=False)

    def _decomposed(self, node: fx.Node) -> Any:
        """The result, or the list of results, of the operators that an operator runs under autocast."""
        sources = node.all_input_nodes

        def call(*tensors: torch.Tensor) -> Any:
            given = dict(zip(sources, tensors, strict=True))
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            with self._context(True):
                return node.target(*args, **kwargs)  # type: ignore[operator]

        with self.mode, torch.no_grad():
            inner = make_fx(call)(*(source.meta["val"] for source in sources)).graph
        _join_losses(inner)
        copied: dict[fx.Node, Any] = dict(
            zip((place for place in inner.nodes if place.op == "placeholder"), sources, strict=True)
        )
        with node.graph.inserting_before(node):
            for one in inner.nodes:
                if one.op == "output":
                    results = pytree.tree_map_only(fx.Node, copied.__getitem__, one.args[0])
                elif one not in copied:
                    copied[one] = node.graph.node_copy(one, copied.__getitem__)
                    copied[one].meta = {**node.meta, "val": one.meta["val"]}
        node.graph.erase_node(node)
        return results


_LOSSES = {
    aten.nll_loss_forward.default: aten.nll_loss.default,
    aten.nll_loss2d_forward.default: aten.nll_loss2d.default,
}


def _join_losses(graph: fx.Graph) -> None:
    """Losses as the operators that model code calls, with one result: other passes know these as means over targets."""
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.target in _LOSSES and all(user.args[1] == 0 for user in node.users):
            for user in list(node.users):
                with graph.inserting_before(user):
                    joined = graph.call_function(_LOSSES[node.target], node.args, node.kwargs)
                joined.meta = user.meta
                user.replace_all_uses_with(joined)
                graph.erase_node(user)
            graph.erase_node(node)


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operands: dict[int, fx.Node]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands = operands
        self.casts: dict[fx.Node, torch.dtype] = {}
        self.runs: list[Run] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # asks for the device
            return result
        source = self.operands.get(id(args[0])) if args else None
        if function is aten._to_copy.default and source is not None and not self.runs:
            self.casts[source] = result.dtype
        else:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.runs.append((function, tuple(tensor.dtype for tensor in tensors)))
        return result
