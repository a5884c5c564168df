"""Which tokens go to which rank: the splits of the all-to-alls around divided experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from piperlang.capture.trace.routed import by_expert


class Splits(NamedTuple):
    """Of one device, by member of its group."""

    order: torch.Tensor
    """Its own tokens, sorted by the rank they go to."""
    give: list[int]
    take: list[int]


def leaving(chosen: torch.Tensor, experts: int, members: int) -> tuple[torch.Tensor, ...]:
    """Which tokens go to each member: experts are on them in order, equally many on each."""
    order, counts = by_expert(chosen, experts)
    return torch.split(order, counts.view(members, -1).sum(1).tolist())
