"""Does a schedule change the mathematics? Two training steps both ways, compared.

The plain model runs eagerly on the whole batch; the schedule runs inline on simulated devices. Both in float64: rounding can then
neither hide a mistake nor look like one (an optimizer like Adam makes a step of full size out of a gradient that is zero but for rounding).
A model with dropout is compared with its own unscheduled graph, whose masks it must meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.model_file import ModelFile
from piperlang.capture.program import Program, capture
from piperlang.ir.graph import Graph
from piperlang.passes.scheduler import Scheduler
from piperlang.runtime.inline import Captured, Inline
from piperlang.runtime.optimize import default_optimizer

STEPS = 2
LIMIT = 1e-5


@dataclass(frozen=True)
class Compared:
    loss_reference: float
    loss: float
    max_grad_rel_err: float
    max_weight_rel_err: float
    worst: str
    """The weight that differs most."""

    @property
    def ok(self) -> bool:
        loss = abs(self.loss - self.loss_reference) / max(abs(self.loss_reference), 1e-12)
        return max(loss, self.max_grad_rel_err, self.max_weight_rel_err) <= LIMIT


def doubled(file: ModelFile, seed: int) -> tuple[Callable[[], nn.Module], list[tuple[Any, Any]]]:
    """The model and its first batches in float64."""

    def make() -> nn.Module:
        torch.manual_seed(seed)
        return _in_double(file.model())

    def precise(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    torch.manual_seed(seed)
    batches = [pytree.tree_map(precise, batch) for batch in islice(file.data(), STEPS)]
    return make, (batches * STEPS)[:STEPS]


def _in_double(model: nn.Module) -> nn.Module:
    """As `model.double()`, which cannot convert the fake tensors that a model is traced with. Tied weights stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            for name, old in kind.items():
                if old is not None and old.is_floating_point():
                    if id(old) not in made:
                        new = old.detach().double()
                        made[id(old)] = nn.Parameter(new, old.requires_grad) if kind is module._parameters else new
                    kind[name] = made[id(old)]
    return model


def capture_doubled(file: ModelFile, seed: int = 0) -> Program:
    make, batches = doubled(file, seed)
    return capture(make, file.loss, batches[0])


def compare(file: ModelFile, program: Program, graph: Graph, captured: Captured, seed: int = 0) -> Compared:
    make, batches = doubled(file, seed)
    optimizer = file.optimizer or default_optimizer
    run = Inline(graph, captured, make(), optimizer, seed, file.lr_schedule)
    plain = _Unscheduled(program, make(), optimizer, seed, file) if program.random else _Eager(file, make(), optimizer)
    grad, weight, worst = 0.0, 0.0, ("", 0.0)
    for batch in batches:
        expected_loss, expected = plain.step(batch)
        got = run.step(batch)
        for name, value in expected.items():
            error = _relative(got.gradients.get(name), value)
            grad, worst = max(grad, error), max(worst, (name, error), key=lambda item: item[1])
    for name, value in plain.weights().items():
        error = _relative(run.weights()[name], value)
        weight, worst = max(weight, error), max(worst, (name, error), key=lambda item: item[1])
    return Compared(expected_loss, got.loss, grad, weight, worst[0])


def _relative(got: torch.Tensor | None, expected: torch.Tensor) -> float:
    if got is None:
        return float("inf")
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return float((got - expected).abs().max()) / max(largest, 1e-12) if expected.numel() else 0.0


class _Eager:
    """The model as anyone would train it on one device."""

    def __init__(self, file: ModelFile, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.file, self.model = file, model
        self.optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
        self.schedule = file.lr_schedule(self.optimizer) if file.lr_schedule else None

    def step(self, batch: tuple[Any, Any]) -> tuple[float, Mapping[str, torch.Tensor]]:
        inputs, target = batch
        self.optimizer.zero_grad()
        args = inputs if isinstance(inputs, tuple | list) else (inputs,)
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*args)
        loss = self.file.loss(output, target)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return float(loss.detach()), grads

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class _Unscheduled:
    """The same graph machinery on one device, for masks that eager dropout cannot give again."""

    def __init__(self, program: Program, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], seed: int, file: ModelFile) -> None:
        scheduler = Scheduler(program)
        self.inline = Inline(scheduler.graph(), program.cut(), model, optimizer, seed, file.lr_schedule)

    def step(self, batch: tuple[Any, Any]) -> tuple[float, Mapping[str, torch.Tensor]]:
        done = self.inline.step(batch)
        return done.loss, done.gradients

    def weights(self) -> dict[str, torch.Tensor]:
        return self.inline.weights()
