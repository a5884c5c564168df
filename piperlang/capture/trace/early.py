"""An operator that marks a value of a joint graph: the forward computes it, though only the backward reads it. Stage
programs do not have the operator."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("piper::early", mutates_args=(), schema="(Tensor x) -> Tensor")
def _early(x: Tensor) -> Tensor:
    return x.clone()


@_early.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


EARLY = torch.ops.piper.early.default
