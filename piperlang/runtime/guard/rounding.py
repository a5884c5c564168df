"""Whether a difference from eager PyTorch is rounding: eager PyTorch itself differs as much when weights change in
their last digit. A gradient that is a difference of large numbers, such as that of a bias before a batch normalization,
is mostly rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from piperlang.capture.trace.eager import Eager
from piperlang.capture.user.held import restore, saved

FACTOR = 4.0
"""Rounding may be this many times that of one trial."""
_SAME = 1e-2
"""A second call of the same model differs by less than this fraction of what a changed digit makes."""


@dataclass(frozen=True)
class Rounding:
    """How far rounding takes a loss and gradients."""

    loss: float
    gradients: Mapping[str, float]


def rounding_of(
    model: nn.Module, call: Callable[[], Eager], plain: Eager, before: Mapping[str, torch.Tensor], epsilon: float
) -> Rounding | None:
    """`plain` is the result of a `call`, and buffers had the values `before`. None where the model does not compute the
    same when it is called again: it has state, and that is no rounding."""
    after = saved(model)
    try:
        again = _changes(plain, _called(model, call, before))
        _round(model, epsilon)
        found = _changes(plain, _called(model, call, before))
    finally:
        restore(model, after)
    same = again.loss <= _SAME * found.loss or again.loss == 0.0
    if not same or any(value > _SAME * found.gradients[name] for name, value in again.gradients.items() if value):
        return None
    return found


def _called(model: nn.Module, call: Callable[[], Eager], before: Mapping[str, torch.Tensor]) -> Eager:
    for name, buffer in model.named_buffers():
        if name in before:
            buffer.data = before[name].clone()
    return call()


@torch.no_grad()
def _round(model: nn.Module, epsilon: float) -> None:
    """Changes every weight by half of its last digit, up or down."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            exact = parameter.detach().double()
            signs = torch.randint_like(exact, 0, 2).mul_(2).sub_(1)
            parameter.data = (exact * (1 + epsilon * signs)).to(parameter.dtype)


def _changes(one: Eager, other: Eager) -> Rounding:
    gradients = {
        name: float((gradient - other.gradients[name]).abs().max())
        for name, gradient in one.gradients.items()
        if name in other.gradients and gradient.numel()
    }
    return Rounding(abs(one.loss - other.loss), gradients)
