"""Batch normalization in training, written out: sums over the samples, which are added up over the devices that divide
the batch (whole_sum.py), and what is computed from them. Each device normalizes with the statistics of the whole batch,
as SyncBatchNorm does, and computes the same running statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from piperlang.capture.trace.insert import insert_call
from piperlang.capture.trace.random import module_of
from piperlang.capture.trace.statistics import Statistics, insert_statistics
from piperlang.capture.trace.sums import moments
from piperlang.capture.user.where import line_of_operator
from piperlang.diagnostics import Diagnostic, Label


def write_out(node: fx.Node) -> Statistics:
    """Replaces a batch normalization; returns its statistics."""
    given: Any = node.args
    x, weight, bias, *_, eps, _ = given
    line = line_of_operator(node)
    why = Diagnostic(
        "P0805",
        "the batch cannot be divided: batch_norm needs the statistics of the whole batch",
        also=(Label(line, "in the model"),) if line is not None else (),
        notes=(module_of(node),),
        helps=("use a norm within each sample, such as LayerNorm or GroupNorm",),
    )
    rank = x.meta["val"].dim()
    channels = (1, -1, *[1] * (rank - 2))

    def normalized(values: Tensor, sums: Tensor, *affine: Tensor) -> Tensor:
        factors = iter(affine)
        mean, variance, _ = moments(sums)
        scale: Tensor = (variance + eps).rsqrt() * (next(factors).view(channels) if weight is not None else 1.0)
        shift = (next(factors).view(channels) if bias is not None else 0.0) - mean * scale
        exact = torch.promote_types(values.dtype, torch.float32)
        return (values * scale.to(exact) + shift.to(exact)).to(values.dtype)

    with node.graph.inserting_before(node):
        found = insert_statistics(node, x, [dim for dim in range(rank) if dim != 1], why)
        affine = [one for one in (weight, bias) if one is not None]
        result = insert_call(node, normalized, found.values, found.sums, *affine)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return found


def running(statistics: Statistics, old: fx.Node, momentum: float, *, variance: bool) -> fx.Node:
    """The new value of a running mean or variance."""

    def moved(old: Tensor, sums: Tensor, *pivot: Tensor) -> Tensor:
        mean, biased, count = moments(sums.detach())
        now = biased * count / (count - 1) if variance else sum(pivot, mean)
        return old * (1.0 - momentum) + now.view(-1).to(old.dtype) * momentum

    sums, pivot = statistics.sums, statistics.pivot
    with sums.graph.inserting_before(sums.next):
        return insert_call(sums, moved, old, sums, *([] if pivot is None else [pivot]))
