"""Small random models: a DAG of chunks with skips, several tensors on an edge, tied and frozen weights, values without
samples, dropout."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import capture
from piperlang.fuzz.traits import Traits
from tests.support.equivalence import SAMPLES
from tests.support.models import Case

WIDTH = 8


@dataclass(frozen=True)
class Stage:
    reads: tuple[int, ...]
    """Earlier values, 0 being the model's input."""
    joined: str
    activation: str
    normed: bool
    tied: int | None
    """The stage whose layer it uses."""
    frozen: bool
    shift: bool
    """Gives a learned vector too, without samples, which the last stage adds."""
    masks: bool
    """Multiplies by a mask made of integers from its first input."""
    dropout: float


def plan(seed: int) -> list[Stage]:
    draw = random.Random(seed)
    stages: list[Stage] = []
    for i in range(draw.randint(2, 5)):
        reads = tuple(sorted(draw.sample(range(i + 1), min(i + 1, draw.choice((1, 1, 2, 3))))))
        reads = reads if i in reads else (*reads, i)  # every value is read by somebody
        wide = draw.choice(("add", "cat")) if len(reads) > 1 else "add"
        tied = (
            draw.choice([j for j, s in enumerate(stages) if s.joined == "add"] or [None])
            if wide == "add" and draw.random() < 0.25
            else None
        )
        stages.append(
            Stage(
                reads,
                wide,
                draw.choice(("tanh", "relu", "gelu")),
                draw.random() < 0.3,
                tied,
                tied is None and i > 0 and draw.random() < 0.15,
                draw.random() < 0.2,
                draw.random() < 0.2,
                0.25 if draw.random() < 0.15 else 0.0,
            )
        )
    return stages


class Network(nn.Module):
    def __init__(self, stages: list[Stage]) -> None:
        super().__init__()
        self.stages = stages
        self.layers = nn.ModuleList()
        self.norms = nn.ModuleList()
        self.shifts = nn.ParameterList()
        for i, stage in enumerate(stages):
            wide = WIDTH * (len(stage.reads) if stage.joined == "cat" else 1)
            layer = self.layers[stage.tied] if stage.tied is not None else nn.Linear(wide, WIDTH)
            self.layers.append(layer.requires_grad_(not stage.frozen) if stage.tied is None else layer)
            self.norms.append(nn.LayerNorm(WIDTH) if stage.normed else nn.Identity())
            self.shifts.append(nn.Parameter(torch.linspace(-1, 1, WIDTH) * (i + 1) / 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        shifts: list[torch.Tensor] = []
        for i, stage in enumerate(self.stages):
            with annotate("stage", i):
                inputs = [values[j] for j in stage.reads]
                joined = (
                    torch.cat(inputs, -1)
                    if stage.joined == "cat"
                    else torch.stack(inputs).sum(0)
                    if len(inputs) > 1
                    else inputs[0]
                )
                y = getattr(f, stage.activation)(self.norms[i](self.layers[i](joined)))
                if stage.masks:
                    y = y * ((inputs[0] > 0).long() + 1)
                if stage.shift:
                    shifts.append(torch.tanh(self.shifts[i]))
                if i == len(self.stages) - 1:
                    y = y + sum(shifts) if shifts else y
                values.append(f.dropout(y, stage.dropout, training=self.training))
        return values[-1]


def case(seed: int) -> Case:
    stages = plan(seed)

    def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(samples, WIDTH), torch.randn(samples, WIDTH)

    def loss(output: Any, target: Any) -> torch.Tensor:
        return f.mse_loss(output, target)

    return Case(f"random-{seed}", lambda: Network(stages), loss, batch, len(stages))


@cache
def case_and_traits(seed: int) -> tuple[Case, Traits]:
    found = case(seed)
    return found, Traits(capture(found.model, found.loss, found.batch(SAMPLES)))
