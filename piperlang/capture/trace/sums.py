"""Operators for sums over the samples.

`whole_sum` stands between a sum and those that compute with it. A program is cut after it: where devices divide the
batch, each has a term of the sum, and the terms are added up before other chunks read them. The gradient takes the same
way back.

`batch_sums` gives the sums that means and variances are computed from, for batch normalization and `var`. They are in
float64: the variance is the mean of the squares minus the square of the mean, which loses digits where the mean is
large. For numbers in float64 that is not enough: their mean is subtracted before (statistics.py). It keeps nothing but
its input for its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("piper::whole_sum", mutates_args=(), schema="(Tensor x) -> Tensor")
def _whole(x: Tensor) -> Tensor:
    return x.clone()


@_whole.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _whole_back(ctx: Any, grad: Tensor) -> Tensor:
    return grad


_whole.register_autograd(_whole_back)


@torch.library.custom_op("piper::batch_sums", mutates_args=(), schema="(Tensor x, int[] dims) -> Tensor")
def _sums(x: Tensor, dims: list[int]) -> Tensor:
    """Over `dims`, which stay with size 1: the sum, the sum of squares, and the number of elements."""
    total = x.sum(dims, keepdim=True, dtype=torch.float64)
    squares = torch.linalg.vector_norm(x, 2, dims, keepdim=True, dtype=torch.float64).square()
    return torch.stack([total, squares, torch.full_like(total, x.numel() / max(1, total.numel()))])


@_sums.register_fake
def _(x: Tensor, dims: list[int]) -> Tensor:
    gone = {dim % x.dim() for dim in dims}
    return x.new_empty(3, *(1 if i in gone else size for i, size in enumerate(x.shape)), dtype=torch.float64)


def _sums_keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _sums_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    x: Tensor = ctx.saved_tensors[0]
    total, squares, _ = grad.to(torch.promote_types(x.dtype, torch.float32))
    return (x * (2 * squares) + total).to(x.dtype), None


_sums.register_autograd(_sums_back, setup_context=_sums_keep)


def moments(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, the variance (the mean of squared deviations) and the number of elements."""
    total, squares, count = sums
    mean = total / count
    return mean, (squares / count - mean * mean).clamp_min(0.0), count
