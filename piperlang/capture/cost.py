"""What a piece costs: floating-point operations and bytes moved, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    flops: int
    """Of matrix products, convolutions and attention, as torch counts them."""
    read_bytes: int
    written_bytes: int


def cost(module: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode) -> Cost:
    counter = FlopCounterMode(display=False)
    with mode, counter, torch.no_grad():
        results = module(*inputs)
    return Cost(int(counter.get_total_flops()), sum(map(size, inputs)), sum(map(size, results)))


def size(value: Any) -> int:
    if isinstance(value, tuple | list):
        return sum(map(size, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def bytes_of(nodes: Iterable[fx.Node]) -> int:
    return sum(size(node.meta["val"]) for node in nodes)
