"""Batch normalization in training, written out: sums over the samples, which are added up over the devices that divide
the batch (whole_sum.py), and what is computed from them. Each device normalizes with the statistics of the whole batch,
as SyncBatchNorm does, and computes the same running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piperlang.capture.trace.insert import insert, insert_call
from piperlang.capture.trace.random import module_of
from piperlang.capture.trace.sums import moments
from piperlang.capture.trace.whole_sum import insert_whole_sum
from piperlang.diagnostics import Diagnostic


def write_out(node: fx.Node) -> fx.Node:
    """Replaces a batch normalization; returns its sums."""
    given: Any = node.args
    x, weight, bias, *_, eps, _ = given
    why = Diagnostic(
        "P0805",
        "the batch cannot be divided: batch_norm needs the statistics of the whole batch",
        notes=(module_of(node),),
        helps=("use a norm within each sample, such as LayerNorm or GroupNorm",),
    )
    rank = x.meta["val"].dim()
    channels = (1, -1, *[1] * (rank - 2))

    def normalized(x: Tensor, sums: Tensor, *affine: Tensor) -> Tensor:
        factors = iter(affine)
        mean, variance, _ = moments(sums)
        scale: Tensor = (variance + eps).rsqrt() * (next(factors).view(channels) if weight is not None else 1.0)
        shift = (next(factors).view(channels) if bias is not None else 0.0) - mean * scale
        exact = torch.promote_types(x.dtype, torch.float32)
        return (x * scale.to(exact) + shift.to(exact)).to(x.dtype)

    with node.graph.inserting_before(node):
        dims = [dim for dim in range(rank) if dim != 1]
        sums = insert_whole_sum(insert(node, torch.ops.piper.batch_sums.default, x, dims), why)
        affine = [one for one in (weight, bias) if one is not None]
        result = insert_call(node, normalized, x, sums, *affine)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return sums


def running(sums: fx.Node, old: fx.Node, momentum: float, *, variance: bool) -> fx.Node:
    """The new value of a running mean or variance."""

    def moved(old: Tensor, sums: Tensor) -> Tensor:
        mean, biased, count = moments(sums.detach())
        now = biased * count / (count - 1) if variance else mean
        return old * (1.0 - momentum) + now.view(-1).to(old.dtype) * momentum

    with sums.graph.inserting_before(sums.next):
        return insert_call(sums, moved, old, sums)
