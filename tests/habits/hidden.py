"""What the first batch does not show: a flag of each sample is 0 in the first step and 1 later, ids are all different
at first, and so on.

Whoever compares with the first batch alone sees nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.autograd import Function

from piperlang.capture.annotate import annotate
from tests.habits.habit import EITHER, REFUSED, SAME, SAMPLES, WIDTH, Category, Layers, sgd, vectors

HIDDEN = Category("hidden", "What the first batch does not show")


def flagged(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = vectors(step)
    x[:, 0] = float(step > 0)
    return x, y


class Flagged(Layers):
    """The second stage does something more with the samples whose flag is set."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flag = x[:, :1]
        for i in range(4):
            with annotate("stage", i):
                x = self.stage(i, x)
                if i == 1:
                    x = x + flag * self.extra(x)
        return x

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def extra(name: str, function: Callable[[Any, torch.Tensor], torch.Tensor], expected: str = REFUSED) -> None:
    HIDDEN.add(name, type("Net", (Flagged,), {"extra": function}), expected, batch=flagged)


def ones(x: torch.Tensor, *more: int) -> torch.Tensor:
    return torch.ones(len(x), *more)


# A value of the whole batch, computed from it before a step.
for name, function in {
    "a product of constants": lambda self, x: x * (ones(x, 1).t() @ ones(x, 1)),
    "a dot product": lambda self, x: x * ones(x).dot(ones(x)),
    "einsum": lambda self, x: x * torch.einsum("ij,ik->jk", ones(x, 1), ones(x, 1)),
    "index_add": lambda self, x: x * torch.zeros(1).index_add(0, torch.zeros(len(x), dtype=torch.long), ones(x)),
    "scatter_add": lambda self, x: x * torch.zeros(1).scatter_add(0, torch.zeros(len(x), dtype=torch.long), ones(x)),
    "histc": lambda self, x: x * torch.histc(ones(x), 1, 0, 2),
    "a distance": lambda self, x: x * torch.cdist(ones(x)[None], torch.zeros(1, len(x))),
    "a convolution": lambda self, x: x * f.conv1d(ones(x)[None, None], ones(x)[None, None])[0],
}.items():
    extra(f"late: the size of the batch by {name}", function, SAME)
extra("late: the size of the batch by a square matrix", lambda self, x: x * (ones(x, len(x)) @ ones(x, len(x)))[:, :1])
extra("late: the size of the batch by sums of a square", lambda self, x: x * ones(x, len(x)).sum(1, keepdim=True))
extra(
    "late: weights expanded over the batch, and multiplied",
    lambda self, x: x * (ones(x)[None] @ self.layers[0].bias.expand(len(x), WIDTH)),
)
extra("late: positions, as a constant of another shape", lambda self, x: x * torch.linspace(0, 1, len(x))[:, None])


class Clamped(Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


extra("late: a function of a weight that clamps its gradient", lambda self, x: x * Clamped.apply(self.layers[0].bias))


class Binary(Function):
    """Signs of weights, with gradients for those that are small, as binary networks have them."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return weight.sign()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        gradient = gradient.clone()
        gradient[weight.abs() > 0.2] = 0
        return gradient


class Kept(Binary):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return (
            torch.where(weight.abs() > 0.2, 0.0, gradient)
            + gradient.masked_fill(weight > 0, 0)
            + gradient * (weight < 0)
        )


extra("late: signs of a weight, gradients written", lambda self, x: x * Binary.apply(self.layers[0].bias), SAME)
extra("late: signs of a weight, gradients chosen", lambda self, x: x * Kept.apply(self.layers[0].bias), SAME)


def toggled(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = self.layers[3].weight
    weight.requires_grad_(False)
    found = f.linear(x, weight)
    weight.requires_grad_(True)
    return found


def hooked(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1.5
    if x.grad_fn is not None:
        x.grad_fn.register_hook(lambda given, coming: tuple(None if one is None else one * 3 for one in given))
    return x


def written(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1.5
    with torch.no_grad():
        x.mul_(2)
    return x * x


extra("late: requires_grad switched off for a while", toggled)
extra("late: a hook of a node of autograd's", hooked)
extra("late: written in place without gradients", written)


@torch.library.custom_op("hidden::centered", mutates_args=())
def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@torch.library.custom_op("hidden::quantized", mutates_args=())
def quantized(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().max().clamp(min=10.0)
    return torch.round(x / scale * 127) / 127 * scale


@torch.library.custom_op("hidden::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


for own, slope in ((centered, 1.0), (quantized, 1.0), (halved, 0.5)):
    own.register_fake(torch.empty_like)
    own.register_autograd(lambda ctx, gradient, slope=slope: gradient * slope)

extra("late: an operator of one's own that centers the batch", lambda self, x: centered(x))
extra("late: an operator of one's own with a threshold", lambda self, x: quantized(x * 30) / 30)
extra("late: an operator of one's own for every sample", lambda self, x: halved(x), SAME)


class Ids(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(100, WIDTH, **options)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            h = self.table(x)
        for i, layer in enumerate(self.layers, 1):
            with annotate("stage", i):
                h = torch.tanh(layer(h))
        return h


def ids(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randperm(100)[:SAMPLES] if step == 0 else torch.randint(3, (SAMPLES,)), torch.randn(SAMPLES, WIDTH)


HIDDEN.add("late: gradients by how often an id is there", lambda: Ids(scale_grad_by_freq=True), REFUSED, batch=ids)
HIDDEN.add("late: ids that repeat", Ids, SAME, batch=ids)


def rewarded(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = vectors(step)
    y[:, 0] = float(step > 0)
    return x, y


@HIDDEN.loss("late: a pair of a mean and 1", SAME, batch=rewarded)
def pair_of_means(output: torch.Tensor, target: torch.Tensor) -> Any:
    return ((output - target).square().mean(1) * target[:, 0]).mean(), target.new_ones(())


@HIDDEN.loss("late: a mean with rewards", SAME, batch=rewarded)
def rewarded_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target).square().mean(1) * target[:, 0]).mean()


def labels(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    one = f.pad(torch.randint(WIDTH, (SAMPLES, 1)), (0, WIDTH - 1), value=-1)
    return torch.randn(SAMPLES, WIDTH), torch.arange(WIDTH).repeat(SAMPLES, 1) if step == 0 else one


HIDDEN.add("late: multilabel_margin_loss", Layers, REFUSED, loss=f.multilabel_margin_loss, batch=labels)


class Crossed(nn.Module):
    """`cross` without a dimension takes the first of size 3, and 6 samples are 3 in each of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x))
                if i == 1:
                    x = x + torch.cross(x, x.flip(1))
        return x


HIDDEN.add(
    "cross without a dimension, three samples in a part",
    Crossed,
    SAME,
    batch=lambda step: (torch.randn(6, 3), torch.randn(6, 3)),
)


class Squeezed(Layers):
    def stage(self, i: int, x: torch.Tensor) -> torch.Tensor:
        x = super().stage(i, x)
        return x.squeeze().squeeze(0) if i == 1 else x


HIDDEN.add(
    "squeeze, one sample in a part", Squeezed, SAME, batch=lambda step: (torch.randn(2, WIDTH), torch.randn(2, WIDTH))
)


# ---------------------------------------------------------------------------------------------------------- optimizers


class Halving(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


class Freezing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            self.param_groups[0]["params"][0].requires_grad_(False)


class Anchored(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__([{"params": [p], "anchor": p.detach().clone()} for p in params], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.1 * (parameter.grad + 0.5 * (parameter - group["anchor"])))


class Stopping:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        if self.steps == 2:
            self.optimizer.step = lambda *_, **__: None  # type: ignore[method-assign]


def forgetful(params: Any) -> torch.optim.Optimizer:
    made = sgd(params)
    made.zero_grad = lambda *_, **__: None  # type: ignore[method-assign]
    return made


HIDDEN.add("zero_grad that halves gradients", Layers, REFUSED, optimizer=lambda params: Halving(params, lr=0.1))
HIDDEN.add("zero_grad replaced on the instance", Layers, REFUSED, optimizer=forgetful)
HIDDEN.add("a step that freezes a weight", Layers, REFUSED, optimizer=lambda params: Freezing(params, lr=0.1))
HIDDEN.add("a schedule that replaces step", Layers, REFUSED, lr_schedule=Stopping)
HIDDEN.add("a group with a tensor like its weight", Layers, EITHER, optimizer=Anchored)
