"""Runs the plain model eagerly, with the dropout masks of the traced program.

Private API, kept in this file: `torch._VF`, where nn.Dropout and its functional form look up `dropout` (tried on torch
2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from piperlang.capture.trace.observed import called
from piperlang.capture.trace.random import DROPOUT, counter_dropout, is_active, mix
from piperlang.capture.user.user_code import eagerly


@contextmanager
def counted_dropout(seed: int, step: int, samples: int) -> Iterator[None]:
    """Replaces dropout by the counter-based dropout of the traced program.

    A call is identified by a number drawn from torch's generator. Checkpointing, which runs a part of the forward
    again, resets the generator, so the same call draws the same number."""
    plain = torch.dropout
    rng, calls = [mix(seed, step), 0], dict[int, int]()

    def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not is_active(DROPOUT, (x, p, train)):
            return plain(x, p, train)
        number = calls.setdefault(int(torch.randint(2**62, ())), len(calls))
        return counter_dropout(x, torch.tensor(rng, device=x.device), number, p, samples)

    torch.dropout = torch._VF.dropout = dropout  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.dropout = plain
        del torch._VF.dropout


@dataclass(frozen=True)
class Eager:
    """The results of a forward and backward of the plain model."""

    loss: float
    count: float | None
    """The count that the loss was divided by, where the model file returns (sum, count)."""
    gradients: Mapping[str, torch.Tensor]
    """Gradients by the first name of each parameter; parameters without a gradient are missing."""


def forward_and_backward(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: tuple[Any, Any], seed: int, step: int, samples: int
) -> Eager:
    """Also leaves the gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    with eagerly(model, loss), counted_dropout(seed, step, samples), torch.enable_grad():
        result = loss(called(model, batch[0]), batch[1])
        total, count = result if isinstance(result, tuple | list) else (result, None)
        value = total if count is None else total / count
        if value.requires_grad:
            value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Eager(float(value.detach()), None if count is None else float(count), gradients)
