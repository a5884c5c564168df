"""Attention with a mask that is the causal one: `is_causal` says the same, and kernels then compute half as much and
read no mask. Libraries leave such a mask out in eager PyTorch, and make it where they are traced.

The mask is computed, not recognized by how it is written: its elements are what `is_causal` means, or it stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from piperlang.capture.trace.buffers import ancestors, root_of, written

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MOST = 2**30
"""Bytes of a mask, and of each value that it is computed from, that are looked at."""


def use_causal(graph: fx.Graph) -> None:
    """Write `is_causal` in place of masks that mean it and depend on shapes alone."""
    found = {node: mask for node in graph.nodes if (mask := _mask(node)) is not None}
    changed = {root_of(target) for node in graph.nodes for target in written(node)} if found else set()
    causal = {mask for mask in set(found.values()) if _is_causal(mask, changed)}
    for node, mask in found.items():
        query, key, value = node.args[:3]
        if mask in causal and _same_attention(*(one.meta["val"].shape for one in (query, key, mask))):
            dropout = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
            node.args = (query, key, value, None, dropout, True)
            node.kwargs = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}


def _same_attention(query: torch.Size, key: torch.Size, mask: torch.Size) -> bool:
    """Whether `is_causal` means this square mask, and the result has the shape that it has with the mask."""
    repeated = zip(reversed(query[:-2]), reversed(mask[:-2]), strict=False)
    fits = len(mask) <= len(query) and all(of_mask in (1, of_query) for of_query, of_mask in repeated)
    return fits and query[-2] == key[-2] == mask[-1]


def _mask(node: fx.Node) -> fx.Node | None:
    """Of an attention that is not causal besides."""
    if node.op != "call_function" or node.target is not ATTENTION or len(node.args) > 5 or "is_causal" in node.kwargs:
        return None
    mask: Any = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    return mask if isinstance(mask, fx.Node) else None


def _is_causal(mask: fx.Node, changed: set[fx.Node]) -> bool:
    """`changed`: tensors that are written to in place, also through views."""
    behind, like = ancestors([mask]), mask.meta["val"]
    if like.dim() < 2 or like.shape[-1] != like.shape[-2] or not all(map(_is_fixed, behind)):
        return False
    if not changed.isdisjoint(map(root_of, behind)):
        return False
    value = _computed(mask, behind)
    allowed = torch.ones(value.shape[-2:], dtype=torch.bool).tril()
    if value.dtype == torch.bool:
        return bool((value == allowed).all())
    # It is added to the scores: the lowest number of its dtype leaves nothing of them, as minus infinity does.
    return bool(torch.where(allowed, value == 0, value <= torch.finfo(value.dtype).min).all())


def _is_fixed(node: fx.Node) -> bool:
    """Whether a value depends on shapes alone, and is small enough to look at."""
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in target.tags
        and sum(one.nbytes for one in pytree.tree_leaves(node.meta["val"])) <= MOST
    )


def _computed(wanted: fx.Node, behind: set[fx.Node]) -> torch.Tensor:
    """A value, on the host, once where it is expanded over samples or heads."""
    graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in wanted.graph.nodes:
        if node in behind:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(copied[wanted])
    value: torch.Tensor = _OnHost(torch.nn.Module(), graph=graph).run()
    for dim in range(value.dim() - 2):
        value = value.narrow(dim, 0, 1) if value.stride(dim) == 0 else value
    return value


class _OnHost(fx.Interpreter):
    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda one: torch.device("cpu") if isinstance(one, torch.device) else one
        )
        return super().call_function(target, args, kwargs)
