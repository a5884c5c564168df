"""The part of a tensor that a box of a layout says."""

from __future__ import annotations

import torch

from piperlang.ir.layout import Box


def take(whole: torch.Tensor, box: Box, origin: Box | None = None) -> torch.Tensor:
    """A box of a tensor whose own box is `origin` (from zero if it is left out)."""
    for dim, (low, high) in enumerate(box):
        whole = whole.narrow(dim, low - (origin[dim][0] if origin else 0), high - low)
    return whole
