"""The way that rows go to the devices that have their experts, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from piperlang.capture.routed import by_expert


class Way(NamedTuple):
    """Of one device, by member of its group."""

    order: torch.Tensor
    """Its own rows, by where they go."""
    give: list[int]
    take: list[int]


def leaving(chosen: torch.Tensor, experts: int, members: int) -> tuple[torch.Tensor, ...]:
    """Which rows go to each member: experts lie on them in order, as many on each."""
    order, counts = by_expert(chosen, experts)
    return torch.split(order, counts.view(members, -1).sum(1).tolist())
