"""Routed operators as Inductor compiles them on a GPU: tokens are sorted by expert once for all products that share a
choice, nothing is copied to the host, and what brings rows into that order and back fuses with what surrounds it.

Eagerly an index without an expert is an error. Here, where a host must not look, its row becomes NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piperlang.capture.trace.routed import grouped, grouped_linear, grouped_outer, is_routed, operators

_NARROW = 1 << 15
"""Up to so many experts are sorted as 16-bit numbers, which takes a quarter of the passes of 64-bit ones."""


def with_groups(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with the routed products as functions, which are traced into the operators that they consist of.
    Each distinct choice is sorted once."""
    if not any(operators(module.graph.nodes)):
        return module
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    orders: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        function = _FUNCTIONS.get(str(node.target)) if is_routed(node.target) else None
        if function is None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        chosen = copies[node.args[names.index("chosen")]]
        arguments = fx.map_arg(node.args, copies.__getitem__)
        if chosen not in orders:
            orders[chosen] = graph.call_function(_order, (chosen, arguments[-1]))
        copies[node] = graph.call_function(function, (*arguments, orders[chosen]))
    return fx.GraphModule(module, graph)


def _order(chosen: Tensor, table: Tensor | int) -> tuple[Tensor, Tensor, Tensor]:
    """Which row comes at which place when rows are sorted by expert, where each row has gone, and the sorted choices.
    `table` has a matrix for each expert, or is their number."""
    count = table if isinstance(table, int) else table.shape[0]
    experts, order = torch.sort(chosen.to(torch.int16) if count <= _NARROW else chosen, stable=True)
    places = torch.arange(len(chosen), device=chosen.device)
    return order, torch.zeros_like(order).scatter(0, order, places), experts


def _ends(experts: Tensor, count: int) -> Tensor:
    """Where the rows of each expert end, from the experts of sorted rows."""
    last = torch.arange(count, device=experts.device, dtype=experts.dtype)
    return torch.searchsorted(experts, last, right=True, out_int32=True)


def _linear(rows: Tensor, chosen: Tensor, weight: Tensor, by_expert: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    order, inverse, experts = by_expert
    given, count = rows[order], weight.shape[0]
    if not grouped(given, weight):
        return torch.ops.piper.routed_linear(rows, chosen, weight)  # type: ignore[no-any-return]
    done: Tensor = torch.ops.piper.grouped_linear(given, weight, _ends(experts, count))
    there = (chosen >= 0) & (chosen < count)
    return torch.where(there.unsqueeze(1), done[inverse], torch.nan)


def _outer(rows: Tensor, grads: Tensor, chosen: Tensor, count: int, by_expert: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    order, _, experts = by_expert
    given, arrived = rows[order], grads[order]
    if not grouped(given, arrived):
        return torch.ops.piper.routed_outer(rows, grads, chosen, count)  # type: ignore[no-any-return]
    done: Tensor = torch.ops.piper.grouped_outer(given, arrived, _ends(experts, count))
    return done


# Operators of their own, because Inductor gives them tensors as they are laid out here. It lays out those of
# torch._grouped_mm as it likes, and not all ways are right (grouped_outer says why).


@torch.library.custom_op(
    "piper::grouped_linear", mutates_args=(), schema="(Tensor given, Tensor weight, Tensor ends) -> Tensor"
)
def _grouped_linear(given: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_linear(given, weight, ends)


@torch.library.custom_op(
    "piper::grouped_outer", mutates_args=(), schema="(Tensor given, Tensor arrived, Tensor ends) -> Tensor"
)
def _grouped_outer(given: Tensor, arrived: Tensor, ends: Tensor) -> Tensor:
    return grouped_outer(given, arrived, ends)


@_grouped_linear.register_fake
def _(given: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return given.new_empty(given.shape[0], weight.shape[2])


@_grouped_outer.register_fake
def _(given: Tensor, arrived: Tensor, ends: Tensor) -> Tensor:
    return given.new_empty(ends.shape[0], given.shape[1], arrived.shape[1])


_FUNCTIONS: dict[str, Any] = {"piper.routed_linear.default": _linear, "piper.routed_outer.default": _outer}
