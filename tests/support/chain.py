"""A chain of equal stages, and its plan under a script."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn
from torch.nn.functional import mse_loss

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.ir.graph import Graph
from piperlang.pipeline import schedule
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.source import Source

WIDTH = 8


class Chain(nn.Module):
    """A stage per layer, after an entry that takes no time: with it the first layer, too, has an input gradient."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0), annotate("part", "entry"):
            x = x * self.scale
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
        return x


@cache
def chain(stages: int, samples: int) -> Program:
    return capture(lambda: Chain(stages), mse_loss, (torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)))


def planned(stages: int, samples: int, script: str) -> tuple[Graph, Plan]:
    found = schedule(chain(stages, samples), Source("test.piper", script))
    assert not found.problems, found.problems
    graph = found.graph()
    return graph, lower(graph)
