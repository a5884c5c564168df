"""What a habit is: a small model, its loss, batches and optimizer, and what a schedule may make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate

WIDTH, SAMPLES, STEPS, WORDS, LENGTH = 8, 8, 3, 20, 6
SAME, REFUSED, EITHER = "same", "refused", "same or refused"
SUMMED = "same, refused with microbatches"
"""Devices add up their sums over the samples; microbatches come one after another."""
LIMIT = 1e-5
"""The largest relative difference that rounding explains."""


# ------------------------------------------------------------------------------------------------------ common parts


class Layers(nn.Module):
    """Four layers in four stages. A habit overrides `stage`, or the whole forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        for i in range(4):
            with annotate("stage", i):
                x = self.stage(i, x)
        return x

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layers[i](x))


class Between(Layers):
    """A habit that is one operation on the activations between the layers of a stage."""

    at = 1

    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        return self.between(x) if i == self.at else x

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.mse_loss(output, target)


def words(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output.flatten(0, 1), target.flatten())


def classes(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return f.cross_entropy(output, target)


def vectors(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)


def tokens(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randint(WORDS, (SAMPLES, LENGTH))


def labelled(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, WIDTH), torch.randint(WIDTH, (SAMPLES,))


def sgd(params: Any) -> torch.optim.Optimizer:
    """Without momentum: a constant factor in a gradient shows, where Adam would hide it."""
    return torch.optim.SGD(params, lr=0.1)


# ------------------------------------------------------------------------------------------------------------ habits


@dataclass(frozen=True)
class Habit:
    name: str
    category: str
    model: Callable[[], nn.Module]
    expected: str = SAME
    """Where the batch is divided: `same`, `refused`, `same or refused` where that depends on the schedule, or `same,
    refused with microbatches`."""
    whole: str = ""
    """The same for a pipeline that does not split the batch. Only for habits that mix samples."""
    loss: Callable[[Any, Any], Any] = square
    batch: Callable[[int], tuple[Any, Any]] = vectors
    """The batch of a step; torch's generator is seeded for each."""
    optimizer: Callable[[Any], Any] = sgd
    lr_schedule: Callable[[Any], Any] | None = None
    max_norm: float | None = None
    dropout: bool = False
    """Eager training then draws piperlang's masks, which depend on the seed, the step and the position alone."""
    limit: float = LIMIT
    floor: float = 1e-12
    """Weights whose largest element is below it are compared as if it was this: a bias that starts at zero and has no
    gradient but rounding (that of attention's keys)."""
    only: tuple[str, ...] = ()
    """Schedules that make sense for it, if not all do."""
    note: str = ""
    """What is special about it, for the page."""


@dataclass
class Category:
    """Collects the habits of one file, by decorating their models."""

    name: str
    title: str
    habits: list[Habit] = field(default_factory=list)

    def habit(self, name: str, expected: str = SAME, **others: Any) -> Callable[[_Make], _Make]:
        def add(model: _Make) -> _Make:
            self.add(name, model, expected, **others)
            return model

        return add

    def add(self, name: str, model: Callable[[], nn.Module] = Layers, expected: str = SAME, **others: Any) -> None:
        self.habits.append(Habit(name, self.name, model, expected, **others))

    def loss(self, name: str, expected: str = SAME, **others: Any) -> Callable[[_Make], _Make]:
        """For habits of the loss."""

        def add(loss: _Make) -> _Make:
            self.add(name, others.pop("model", Layers), expected, loss=loss, **others)
            return loss

        return add

    def optimizer(self, name: str, expected: str = SAME, **others: Any) -> Callable[[_Make], _Make]:
        """For habits of the optimizer."""

        def add(optimizer: _Make) -> _Make:
            self.add(name, others.pop("model", Layers), expected, optimizer=optimizer, **others)
            return optimizer

        return add


_Make = TypeVar("_Make", bound=Callable[..., Any])
