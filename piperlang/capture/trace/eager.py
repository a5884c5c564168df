"""Runs the plain model eagerly, with the random numbers of the traced program.

Private API, kept in this file: `torch._VF`, where nn.Dropout and its functional form look up `dropout` (tried on torch
2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from piperlang.capture.trace.draws import counter_draw, distribution_of
from piperlang.capture.trace.observed import called, total_of
from piperlang.capture.trace.random import DROPOUT, counter_dropout, is_active, mix
from piperlang.capture.trace.rewritten import rewritten
from piperlang.capture.user.user_code import eagerly


class CountedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces dropout and draws from known distributions by the counter-based ones of the traced program.

    A call is identified by a number drawn from torch's generator. Checkpointing, which runs a part of the forward
    again, resets the generator, so the same call draws the same number."""

    def __init__(self, seed: int, step: int, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rng, self.samples = [mix(seed, step), 0], samples
        self.dropouts, self.draws = dict[int, int](), dict[int, int]()
        self.identifying = False

    def dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if not is_active(DROPOUT, (x, p, train)):
            return _dropout(x, p, train)
        return counter_dropout(x, self._state(x.device), self._number(self.dropouts), p, self.samples)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        found = None if self.identifying else distribution_of(function, args, kwargs or {})
        if found is None:
            return result
        number = self._number(self.draws)
        state = self._state(result.device)
        drawn = counter_draw(state, number, list(result.shape), self.samples, result.dtype, found[0], *found[1])
        return result.copy_(drawn) if function._schema.is_mutable else drawn

    def _number(self, calls: dict[int, int]) -> int:
        self.identifying = True
        try:
            return calls.setdefault(int(torch.randint(2**62, ())), len(calls))
        finally:
            self.identifying = False

    def _state(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.rng, device=device)


_dropout = torch.dropout


@contextmanager
def counted_draws(seed: int, step: int, samples: int) -> Iterator[None]:
    """The plain model draws the numbers of the traced program."""
    counted = CountedDraws(seed, step, samples)
    torch.dropout = torch._VF.dropout = counted.dropout  # type: ignore[assignment]
    try:
        with counted, rewritten():
            yield
    finally:
        torch.dropout = _dropout
        del torch._VF.dropout


@dataclass(frozen=True)
class Eager:
    """The results of a forward and backward of the plain model."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    """Gradients by the first name of each parameter; parameters without a gradient are missing."""


def forward_and_backward(
    model: nn.Module, loss: Callable[[Any, Any], Any], batch: tuple[Any, Any], seed: int, step: int, samples: int
) -> Eager:
    """Also leaves the gradients in the parameters."""
    model.zero_grad(set_to_none=True)
    with eagerly(model, loss), counted_draws(seed, step, samples), torch.enable_grad():
        result = loss(called(model, batch[0]), batch[1])
        value = result[0] / result[1] if isinstance(result, tuple | list) else total_of(result)
        if value.requires_grad:
            value.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Eager(float(value.detach()), gradients)
