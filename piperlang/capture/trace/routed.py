"""Dropless routing: each token is processed by the expert it is routed to, without a capacity limit.

On one device no size depends on the data: there are as many routed tokens as tokens times choices. Where experts are
sharded over devices, each device gets all tokens of its experts, however many there are. So these operators must not
depend on the order or the number of tokens.

Private API, kept in this file: `torch._grouped_mm` (tried on torch 2.11; used on CUDA alone)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piperlang.core.placement import PARTIAL, REPLICATE, Placement, Shard

_ALIGNED = 16
"""Alignment in bytes of the rows that a grouped product reads."""


def routed_linear(rows: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Row i of `rows` [n, in] times the matrix of its expert, `weight[chosen[i]]` of `weight` [experts, in, out], plus
    `bias[chosen[i]]` of `bias` [experts, out]."""
    if (
        rows.dim() != 2
        or chosen.dim() != 1
        or weight.dim() != 3
        or rows.shape[0] != chosen.shape[0]
        or rows.shape[1] != weight.shape[1]
    ):
        raise ValueError(
            f"routed_linear needs rows [n, in], choices [n] and weights [experts, in, out], not {list(rows.shape)},"
            f" {list(chosen.shape)} and {list(weight.shape)}"
        )
    done: Tensor = torch.ops.piper.routed_linear(rows, chosen, weight)
    return done if bias is None else done + torch.ops.piper.routed_rows(bias, chosen)


# -------------------------------------------------------------------------------------------------------- operators


@torch.library.custom_op(
    "piper::routed_linear", mutates_args=(), schema="(Tensor rows, Tensor chosen, Tensor weight) -> Tensor"
)
def _linear(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    order, counts = by_expert(chosen, weight.shape[0])
    given = rows[order]
    if grouped(given, weight):
        done = grouped_linear(given, weight, counts.cumsum(0).to(torch.int32))
    else:
        done = torch.cat(
            [part @ matrix for part, matrix in zip(torch.split(given, counts.tolist()), weight, strict=True)]
        )
    return torch.empty_like(done).index_copy_(0, order, done)


@torch.library.custom_op(
    "piper::routed_outer", mutates_args=(), schema="(Tensor rows, Tensor grads, Tensor chosen, int experts) -> Tensor"
)
def _outer(rows: Tensor, grads: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """For every expert the sum over its rows of row times gradient, which is the gradient of its matrix."""
    order, counts = by_expert(chosen, experts)
    given, arrived = rows[order], grads[order]
    if grouped(given, arrived):
        return grouped_outer(given, arrived, counts.cumsum(0).to(torch.int32))
    sizes = counts.tolist()
    return torch.stack(
        [part.t() @ grad for part, grad in zip(torch.split(given, sizes), torch.split(arrived, sizes), strict=True)]
    )


@torch.library.custom_op("piper::routed_rows", mutates_args=(), schema="(Tensor table, Tensor chosen) -> Tensor")
def _rows(table: Tensor, chosen: Tensor) -> Tensor:
    return table[chosen]


@torch.library.custom_op(
    "piper::routed_sum", mutates_args=(), schema="(Tensor grads, Tensor chosen, int experts) -> Tensor"
)
def _sum(grads: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return grads.new_zeros(experts, grads.shape[1]).index_add_(0, chosen, grads)


@torch.library.custom_op(
    "piper::slice_backward",
    mutates_args=(),
    schema="(Tensor grad, int size, int dim, int start, int end, int step) -> Tensor",
)
def _slice_backward(grad: Tensor, size: int, dim: int, start: int, end: int, step: int) -> Tensor:
    """Like aten's operator, whose argument is the whole shape: here the other dimensions are those of the gradient, so
    that a graph is the same for any number of tokens."""
    return torch.ops.aten.slice_backward(grad, _with(grad.shape, dim, size), dim, start, end, step)  # type: ignore[no-any-return]


def _with(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [size if i == dim % len(shape) else length for i, length in enumerate(shape)]


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order that groups rows by expert (stable within an expert), and the number of rows of each expert."""
    counts = torch.bincount(chosen, minlength=experts)
    if len(counts) != experts:
        raise ValueError(f"expert index {len(counts) - 1} is out of range: there are {experts} experts")
    return torch.argsort(chosen, stable=True), counts


def grouped(first: Tensor, second: Tensor) -> bool:
    """Whether one grouped kernel can compute all experts, without copying the number of rows of each to the host."""
    aligned = all(
        max(one.stride()) * one.element_size() % _ALIGNED == 0 and one.shape[-1] * one.element_size() % _ALIGNED == 0
        for one in (first, second)
    )
    return first.is_cuda and first.dtype == second.dtype == torch.bfloat16 and first.shape[0] > 0 and aligned


def grouped_linear(given: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows sorted by expert times the matrices of their experts, in one kernel. `ends`: where each expert's rows do."""
    return torch._grouped_mm(given.contiguous(), weight, offs=ends)


def grouped_outer(given: Tensor, arrived: Tensor, ends: Tensor) -> Tensor:
    """The kernel stops the whole process if its tokens are contiguous along dim 1 of the first operand, and an expert
    begins at one that is not aligned: the first operand must be a view of rows."""
    return torch._grouped_mm(given.contiguous().t(), arrived.contiguous(), offs=ends)


@_linear.register_fake
def _(rows: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


@_outer.register_fake
def _(rows: Tensor, grads: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return rows.new_empty(experts, rows.shape[1], grads.shape[1])


@_rows.register_fake
def _(table: Tensor, chosen: Tensor) -> Tensor:
    return table.new_empty(chosen.shape[0], table.shape[1])


@_sum.register_fake
def _(grads: Tensor, chosen: Tensor, experts: int) -> Tensor:
    return grads.new_empty(experts, grads.shape[1])


@_slice_backward.register_fake
def _(grad: Tensor, size: int, dim: int, start: int, end: int, step: int) -> Tensor:
    return grad.new_empty(_with(grad.shape, dim, size))


# -------------------------------------------------------------------------------------------------------- gradients


def _linear_keeps(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _rows_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.experts = inputs[0].shape[0]


def _linear_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, chosen, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (
        torch.ops.piper.routed_linear(grad, chosen, weight.transpose(1, 2)) if wanted[0] else None,
        None,
        torch.ops.piper.routed_outer(rows, grad, chosen, weight.shape[0]) if wanted[2] else None,
    )


def _rows_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (chosen,) = ctx.saved_tensors
    return torch.ops.piper.routed_sum(grad, chosen, ctx.experts), None


_linear.register_autograd(_linear_back, setup_context=_linear_keeps)
_rows.register_autograd(_rows_back, setup_context=_rows_keep)


@register_flop_formula(torch.ops.piper.routed_linear)
def _(rows: Any, chosen: Any, weight: Any, **_: Any) -> int:
    return int(2 * rows[0] * weight[1] * weight[2])


@register_flop_formula(torch.ops.piper.routed_outer)
def _(rows: Any, grads: Any, chosen: Any, experts: int, **_: Any) -> int:
    return int(2 * rows[0] * rows[1] * grads[1])


# ------------------------------------------------------------------------------------------------- on several devices

_ROWS = {
    "routed_linear": ("rows", "chosen"),
    "routed_outer": ("rows", "grads", "chosen"),
    "routed_rows": ("chosen",),
    "routed_sum": ("grads", "chosen"),
}
"""The arguments of each operator that have one row per token."""
_FEATURES: dict[str, list[dict[str, int | None]]] = {
    "routed_linear": [{"weight": 2, "result": 1}, {"rows": 1, "weight": 1, "result": None}],
    "routed_outer": [{"rows": 1, "result": 1}, {"grads": 1, "result": 2}],
    "routed_rows": [{"table": 1, "result": 1}],
    "routed_sum": [{"grads": 1, "result": 1}],
}
"""Dims of arguments that may be sharded together, and the dim of the result that is then sharded; None where the result
is a partial sum."""


def operators(nodes: Any) -> Iterator[Any]:
    """The routed operators among nodes of a graph."""
    return (node for node in nodes if is_routed(node.target))


def is_routed(target: Any) -> bool:
    return getattr(target, "namespace", "") == "piper" and _name(target) in _ROWS


def _name(target: Any) -> str:
    return str(target._schema.name).removeprefix("piper::")


def choice_of(node: Any) -> tuple[str, int]:
    """The tensor of expert indices of a routed operator in a forward graph, and the number of experts."""
    arguments = dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=True))
    table = arguments["weight" if "weight" in arguments else "table"]
    return arguments["chosen"].name, table.meta["val"].shape[0]


def divided(target: Any, dims: dict[str, int | None]) -> Placement:
    """The placement of the result along one axis, for given shard dims of the arguments (None: replicated). Tokens
    and experts are sharded together, each token on the device of its expert."""
    name = _name(target)
    given = {key: dim for key, dim in dims.items() if dim is not None}
    rows = dict.fromkeys(_ROWS[name], 0)
    tables = [key for key in dims if key in ("weight", "table")]
    if not given:
        return REPLICATE
    if given == rows | dict.fromkeys(tables, 0):
        return Shard(0)
    for way in _FEATURES[name]:
        if given == {key: dim for key, dim in way.items() if key != "result"}:
            return PARTIAL if way["result"] is None else Shard(way["result"])
    raise ValueError("its tokens and its experts are sharded differently")
