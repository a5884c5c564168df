"""Where sums over the samples are computed with: `whole_sum` (sums.py) in a traced graph."""

from __future__ import annotations

import torch
from torch import fx

from piperlang.capture.trace import sums  # noqa: F401
from piperlang.capture.trace.insert import insert
from piperlang.diagnostics import Diagnostic

_WHY = "whole_sum"


def insert_whole_sum(sum: fx.Node, why: Diagnostic) -> fx.Node:
    """The sum over the whole batch, at the graph's insertion point. `why` says why a part of the batch does not do."""
    node = insert(sum, torch.ops.piper.whole_sum.default, sum)
    node.meta[_WHY] = why
    return node


def is_whole_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.piper.whole_sum.default


def reason(node: fx.Node) -> Diagnostic:
    found = node.meta[_WHY]
    assert isinstance(found, Diagnostic)
    return found
