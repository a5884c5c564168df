"""Optimizers on what each device has: one for every weight, so that parts of weights need nothing of each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import optim

from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.elaborate.directive import Written

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers whose step of an element does not look at others: only those may work on a part of a weight."""


def default_optimizer(params: Any) -> optim.Optimizer:
    """Where a model file has none."""
    return optim.AdamW(params, lr=1e-3)


class Optimizers:
    def __init__(self, make: Callable[[Any], optim.Optimizer], make_schedule: Callable[[Any], Any] | None = None, masters: bool = False) -> None:
        """`masters`: weights in half precision have a master in float32, which is what is updated."""
        self.make, self.make_schedule, self.masters = make, make_schedule, masters
        self.made: dict[object, tuple[optim.Optimizer, Any]] = {}
        self.owned: dict[object, list[torch.nn.Parameter]] = {}

    def step(self, key: object, weight: torch.Tensor, gradient: torch.Tensor, partial: str = "", by: Written | None = None) -> torch.Tensor:
        """The weight after one step. `partial` names the weight where this is only a part of it, and `by` is who divided it."""
        half = self.masters and weight.dtype in (torch.bfloat16, torch.float16)
        if key not in self.made:
            optimizer = self.make([torch.nn.Parameter(weight.detach().to(torch.float32 if half else weight.dtype, copy=True))])
            if partial and not isinstance(optimizer, ELEMENTWISE):
                raise _needs_whole(optimizer, partial, by)
            self.made[key] = optimizer, self.make_schedule(optimizer) if self.make_schedule else None
        optimizer, schedule = self.made[key]
        (parameter,) = optimizer.param_groups[0]["params"]
        if not half:
            parameter.copy_(weight)
        parameter.grad = gradient.view_as(weight).to(parameter.dtype)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return parameter.detach().to(weight.dtype, copy=True)  # type: ignore[no-any-return]


    def update(self, key: object, weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], partial: str = "") -> None:
        """One step for several weights, in place."""
        half = self.masters and weights[0].dtype in (torch.bfloat16, torch.float16)
        if key not in self.made:
            owned = [torch.nn.Parameter(weight.detach().float() if half else weight.detach()) for weight in weights]
            optimizer = self.make(owned)
            if partial and not isinstance(optimizer, ELEMENTWISE):
                raise _needs_whole(optimizer, partial, None)
            self.made[key] = optimizer, self.make_schedule(optimizer) if self.make_schedule else None
            self.owned[key] = owned
        optimizer, schedule = self.made[key]
        for parameter, weight, gradient in zip(self.owned[key], weights, gradients, strict=True):
            if not half:
                parameter.data = weight
            parameter.grad = gradient.view_as(weight).to(parameter.dtype)
        optimizer.step()
        for parameter, weight in zip(self.owned[key], weights, strict=True):
            parameter.grad = None
            if half:
                weight.copy_(parameter)
        if schedule is not None:
            schedule.step()


def _needs_whole(optimizer: optim.Optimizer, weight: str, by: Written | None) -> PiperError:
    return PiperError(Diagnostic(
        "P0601", f"{type(optimizer).__name__} would see only a part of weight {weight}", by.span if by else None, "divided here" if by else "",
        helps=("use an optimizer that works element by element, such as AdamW, or leave `states=sharded` and `shard` out",), trail=by.trail if by else (),
    ))  # fmt: skip


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A sum of gradients, in float32 where they are in half precision."""
    if len(parts) == 1:
        return parts[0]
    half = parts[0].dtype in (torch.bfloat16, torch.float16)
    total = parts[0].to(torch.float32) if half else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
