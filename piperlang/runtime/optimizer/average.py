"""Exponential moving averages of weights, as torch.optim.swa_utils.AveragedModel computes them with
get_ema_multi_avg_fn: the first step copies the weights. They are sharded as the updates are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from piperlang.diagnostics import PiperError, error
from piperlang.runtime.box import take
from piperlang.runtime.optimizer.copies import WeightPart


class MovingAverages:
    """Of all weights that one process updates."""

    def __init__(self, decay: float, weights: Sequence[tuple[WeightPart, nn.Parameter]]) -> None:
        """`weights`: what is updated, and the parameters that optimizers step: float32 masters where there are any."""
        self.decay, self.weights = decay, weights
        self.averages: list[torch.Tensor] = []

    @torch.no_grad()
    def update(self) -> None:
        """After a step of the optimizers."""
        now = [parameter.detach() for _, parameter in self.weights]
        if not self.averages:
            self.averages = [value.clone() for value in now]
            return
        for average, value in zip(self.averages, now, strict=True):
            average.lerp_(value, 1 - self.decay)

    def restore(self, averages: list[torch.Tensor]) -> None:
        """As they were; an empty list before the first step."""
        self.averages = averages

    def parts(self) -> list[WeightPart]:
        """What has been averaged so far; nothing before the first step."""
        return [
            part._replace(now=average.cpu()) for (part, _), average in zip(self.weights, self.averages, strict=False)
        ]


def no_averages() -> PiperError:
    return error("P0801", "the job has no moving averages of weights", help="set `ema`, such as `ema=0.999`")


def set_averages(weights: Mapping[str, torch.Tensor], parts: Iterable[WeightPart]) -> None:
    """Changes unsharded weights in place. What is not trained stays as it is."""
    for part in parts:
        local = take(weights[part.weight], part.box)
        flat = local.flatten()
        flat[slice(*(part.flat or (0, flat.numel())))] = part.now.flatten().to(flat.dtype)
        local.copy_(flat.view_as(local))
