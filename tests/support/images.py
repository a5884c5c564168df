"""A model with batch normalization."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate


class Images(nn.Module):
    """Convolutions with all kinds of batch normalization, a residual, and one norm that is called twice. No weight has
    a gradient of zero, as a bias before a norm has."""

    def __init__(self, kind: Callable[..., nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.first, self.one = nn.Conv2d(2, 4, 3, padding=1, bias=False), kind(4)
        self.second, self.two = nn.Conv2d(4, 4, 3, padding=1, bias=False), kind(4, momentum=0.3, eps=1e-3)
        self.head, self.last = nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = f.relu(self.one(self.first(x)), inplace=True)
        with annotate("stage", 1):
            y = self.two(self.second(x))
            y += x
            y = self.two(y * 0.5)
        with annotate("stage", 2):
            return self.last(self.head(f.relu(y).mean((2, 3))))  # type: ignore[no-any-return]


def labelled(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 3 * torch.randn(samples, 2, 4, 4) + 5, torch.randint(3, (samples,))
