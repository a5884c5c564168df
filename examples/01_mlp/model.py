"""Which of three rings is a point of the plane in? A perceptron in four stages learns it in fifty steps."""

from collections.abc import Iterator

import torch
import torch.nn.functional as f
from torch import Tensor, nn

from piperlang import annotate

STAGES, WIDTH, RINGS, SAMPLES = 4, 64, 3, 128


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [2, WIDTH, WIDTH, WIDTH, RINGS]
        self.layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = layer(x)
                if i + 1 < STAGES:
                    x = torch.tanh(x)
        return x


def model() -> nn.Module:
    return Mlp()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return f.cross_entropy(output, target)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    """New points for every step, between -1 and 1; the rings meet at radius 0.6 and 0.9."""
    while True:
        points = 2 * torch.rand(SAMPLES, 2) - 1
        yield points, torch.bucketize(points.norm(dim=1), torch.tensor([0.6, 0.9]))


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    # With its usual eps Adam makes steps of full size out of gradients that are almost zero, and rounding would show in
    # the fifth digit of the loss.
    return torch.optim.Adam(params, lr=0.01, eps=1e-4)
