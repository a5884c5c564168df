"""The share of the samples that a part of the batch has, as a value of the program."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from piperlang.capture.trace.insert import insert
from piperlang.capture.trace.trace import Traced

aten = torch.ops.aten
SAMPLES = "whole_samples"
"""The placeholder of the number of samples of the whole batch."""


def share_of(like: fx.Node, value: fx.Node, samples: int, whole: fx.Node) -> fx.Node:
    """A value times the share of the samples; in float32, because a share of bfloat16 has three digits."""
    return insert(like, aten.div.Tensor, insert(like, aten.mul.Tensor, exact(like, value), samples), whole)


def exact(like: fx.Node, value: fx.Node) -> fx.Node:
    """A value in at least float32, if it is not an integer."""
    given = value.meta["val"].dtype
    exact = torch.promote_types(given, torch.float32) if given.is_floating_point else given
    return value if exact == given else insert(like, aten.to.dtype, value, exact)


def in_dtype_of(value: fx.Node, made: fx.Node) -> fx.Node:
    dtype = value.meta["val"].dtype
    return made if made.meta["val"].dtype == dtype else insert(made, aten.to.dtype, made, dtype)


def number_of_samples(traced: Traced) -> tuple[Traced, fx.Node]:
    """The number of samples of the whole batch."""
    for node in traced.graph.nodes:
        if node.name == SAMPLES:
            return traced, node
    result = traced.result
    with traced.graph.inserting_before(result):
        number = insert(
            result, aten.full.default, [], traced.samples, dtype=torch.int64, device=result.meta["val"].device
        )
    place = placeholder(traced.graph, SAMPLES, number)
    return replace(traced, whole={**traced.whole, place.name: number}), place


def placeholder(graph: fx.Graph, name: str, value: fx.Node) -> fx.Node:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        place = graph.placeholder(name)
    place.meta = {"val": value.meta["val"]}
    return place
