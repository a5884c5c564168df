"""Learns to sort eight numbers: four stages of two residual blocks each, almost all of it weights."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

STAGES, BLOCKS, NUMBERS, WIDTH, SAMPLES = 4, 8, 8, 64, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(f.gelu(self.up(self.norm(x))))


class Sorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(NUMBERS, WIDTH), nn.Linear(WIDTH, NUMBERS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("stage", 0):
            x = self.first(x)
        for i, block in enumerate(self.blocks):
            with annotate("stage", i * STAGES // BLOCKS):
                x = block(x)
        with annotate("stage", STAGES - 1):
            return self.last(x)


def model() -> nn.Module:
    return Sorter()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.mse_loss(output, target)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        numbers = torch.randn(SAMPLES, NUMBERS)
        yield numbers, numbers.sort(dim=1).values


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=2e-3, eps=1e-4)
