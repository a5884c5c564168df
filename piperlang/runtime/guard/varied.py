"""Batches like a given one, with different numbers: the first batch does not show what a model does only for some
values.

Examples are a flag that is 0 for every sample at first, sample weights that start later, and indices that are all
different: the first batch may lack what a later one has."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from piperlang.capture.batch.sample_table import name_of

CONVERTS = ("to", "_to_copy", "type_as", "type")


class Whole(Enum):
    """How integers and booleans are changed."""

    KEPT = "unchanged"
    MIXED = "those of other samples"
    MORE = "those of other samples; if all samples have the same value, that value or the next"


def varied(batch: tuple[Any, Any], seed: int, noise: bool = True, more: bool = True) -> Iterator[tuple[Any, Any]]:
    """Batches in which fewer and fewer numbers are changed. A model need not accept all numbers, so the caller uses the
    first batch that it accepts.

    An element is replaced by the element of another sample at the same position, so that columns keep their meaning;
    `noise` is added to floating-point numbers. `more`: also use integers that the batch does not contain."""
    ways = [(noise, Whole.MORE)] if more else []
    for noisy, whole in (*ways, (noise, Whole.MIXED), (noise, Whole.KEPT), (False, Whole.MIXED), (False, Whole.KEPT)):
        generator = torch.Generator().manual_seed(seed)
        yield pytree.tree_map(partial(_other, noise=noisy, whole=whole, generator=generator), batch)


def _other(tensor: torch.Tensor, noise: bool, whole: Whole, generator: torch.Generator) -> torch.Tensor:
    real = tensor.is_floating_point() or tensor.is_complex()
    if not tensor.dim() or not tensor.numel() or (not real and whole is Whole.KEPT):
        return tensor
    rows = torch.randint(len(tensor), tensor.shape, generator=generator).to(tensor.device)
    mixed = tensor.gather(0, rows)
    if real:
        return mixed + _noise(tensor, generator) if noise else mixed
    if whole is Whole.MORE:
        alike = (tensor == tensor[:1]).all(0, keepdim=True)
        more = alike & (torch.rand(tensor.shape, generator=generator) < 0.5).to(tensor.device)
        return mixed ^ more if tensor.dtype is torch.bool else mixed + more.to(tensor.dtype)
    return mixed


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    spread = float(torch.nan_to_num(tensor.detach().abs().double(), posinf=0.0).std(correction=0)) or 1.0
    return (torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * spread).to(
        tensor.device, tensor.dtype
    )


def converts_to_indices(graph: fx.Graph) -> bool:
    """Whether the program converts floating-point numbers to integers, which may be indices."""
    return any(
        name_of(node.target) in CONVERTS and _is_whole(node) and not any(map(_is_whole, node.all_input_nodes[:1]))
        for node in graph.nodes
    )


def _is_whole(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype is not torch.bool
    )
