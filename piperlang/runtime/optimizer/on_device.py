"""Updates within a CUDA graph: it reads learning rates from the device, where they change between its replays. All
other options are part of the graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import optim

from piperlang.runtime.optimizer.copies import options, same_option
from piperlang.runtime.optimizer.user import step_hooks

COUNTING = {optim.Adam, optim.AdamW}
"""Those whose steps read a learning rate on the device, and count there, if they are fused or capturable (torch 2.11 to
2.13)."""


def counts_on_device(optimizer: optim.Optimizer) -> bool:
    return (
        type(optimizer) in COUNTING
        and not step_hooks(optimizer)
        and all(group["fused"] or group["capturable"] for group in optimizer.param_groups)
    )


class DeviceRates:
    """Of groups of optimizers with the same options: copies of one group of the user's."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.groups = groups
        self.rate = torch.zeros((), device=groups[0]["params"][0].device)
        self.now: Any = None
        """What `rate` was set to, on the host."""
        self.others: dict[str, Any] = {}
        """Options that are part of the graph."""

    @contextmanager
    def used(self) -> Iterator[None]:
        """The steps of optimizers in this block read the rate from the device."""
        own = [(group["lr"], group["capturable"]) for group in self.groups]
        self.others = copy.deepcopy(_others(self.groups[0]))
        for group in self.groups:
            group["lr"], group["capturable"] = self.rate, True
        try:
            yield
        finally:
            for group, (rate, capturable) in zip(self.groups, own, strict=True):
                group["lr"], group["capturable"] = rate, capturable

    def refresh(self) -> bool:
        """Sets the rate for the next step. False if another option has changed since the graph was made."""
        rate = self.groups[0]["lr"]
        if isinstance(rate, torch.Tensor):
            self.rate.copy_(rate)
        elif rate != self.now:
            self.rate.fill_(rate)
            self.now = rate
        now = _others(self.groups[0])
        return now.keys() == self.others.keys() and all(same_option(now[name], self.others[name]) for name in now)


def _others(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options(group).items() if name not in ("lr", "capturable")}
