"""A small model to make mistakes with: four stages, six numbers in, three classes out, 24 samples a batch."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

STAGES, WIDTH, SAMPLES = 4, 6, 24


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        with annotate("stage", STAGES - 1):
            return self.head(x)


def model() -> nn.Module:
    return Chain()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output, target)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """Which third of the numbers has the largest sum."""
    while True:
        numbers = torch.randn(SAMPLES, WIDTH)
        yield numbers, numbers.view(SAMPLES, 3, -1).sum(-1).argmax(-1)


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01, eps=1e-4)
