"""Means and variances over the whole batch, in a traced graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from piperlang.capture.trace.insert import insert, insert_call
from piperlang.capture.trace.sums import moments
from piperlang.capture.trace.whole_sum import insert_whole_sum
from piperlang.diagnostics import Diagnostic


@dataclass(frozen=True)
class Statistics:
    """Of a tensor, or of its differences from `pivot`."""

    values: fx.Node
    sums: fx.Node
    pivot: fx.Node | None
    """The mean of a tensor in float64, in which sums of squares lose digits where it is large. A constant for autograd:
    the variance does not depend on it."""


def insert_statistics(like: fx.Node, x: fx.Node, dims: list[int], why: Diagnostic) -> Statistics:
    """Over `dims`, at the graph's insertion point."""

    def sums(values: fx.Node) -> fx.Node:
        return insert_whole_sum(insert(like, torch.ops.piper.batch_sums.default, values, dims), why)

    if x.meta["val"].dtype != torch.float64:
        return Statistics(x, sums(x), None)
    pivot = insert_call(like, _mean, sums(insert(like, torch.ops.aten.detach.default, x)))
    values = insert(like, torch.ops.aten.sub.Tensor, x, pivot)
    return Statistics(values, sums(values), pivot)


def _mean(sums: Tensor) -> Tensor:
    return moments(sums)[0]
