"""Does a schedule change the mathematics? Two training steps both ways, compared.

The plain model runs eagerly on the whole batch; the schedule runs inline on simulated devices. Both in float64: rounding can then
neither hide a mistake nor look like one (an optimizer like Adam makes a step of full size out of a gradient that is zero but for rounding).
A model with dropout is compared with its own unscheduled graph, whose masks it must meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.model_file import ModelFile
from piperlang.capture.program import Program, capture
from piperlang.ir.graph import Graph, Key
from piperlang.ir.held import coordinates, interval, local_box
from piperlang.ir.layout import devices_of
from piperlang.passes.scheduler import Scheduler
from piperlang.runtime.boxes import take
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


class Trainer(Protocol):
    """Somebody who trains under a schedule, and is compared."""

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        """The loss, and how far each gradient is from what is expected."""

    def weights(self) -> Mapping[str, torch.Tensor]: ...


class Simulated:
    """The graph on simulated devices."""

    def __init__(self, inline: Inline) -> None:
        self.inline = inline

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        done = self.inline.step(batch)
        return done.loss, {name: _relative(done.gradients.get(name), value) for name, value in expected.items()}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.inline.weights()


class Planned:
    """A plan, on workers or in threads."""

    def __init__(self, graph: Graph, job: Any) -> None:
        self.graph, self.job = graph, job

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        done = self.job.step(batch, gradients=True)
        return done.loss, gradient_errors(self.graph, [device.device for device in self.job.plan.devices], self.job.gradients(), expected)

    def weights(self) -> Mapping[str, torch.Tensor]:
        weights: Mapping[str, torch.Tensor] = self.job.weights()
        return weights


@dataclass(frozen=True)
class InDouble:
    """A function that makes a model, in float64; it can travel to workers."""

    make: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return _in_double(self.make())


def compare(file: ModelFile, program: Program, graph: Graph, captured: Captured, seed: int = 0, trainer: Trainer | None = None) -> Compared:
    """`trainer`: who trains under the schedule, the simulated devices if nobody is given."""
    make, batches = doubled(file, seed)
    optimizer = file.optimizer or default_optimizer
    run = trainer or Simulated(Inline(graph, captured, make(), optimizer, seed, file.lr_schedule, file.max_norm))
    plain = _Unscheduled(program, make(), optimizer, seed, file) if program.random else _Eager(file, make(), optimizer)
    grad, weight, worst = 0.0, 0.0, ("", 0.0)
    for batch in batches:
        expected_loss, expected = plain.step(batch)
        loss, errors = run.step(batch, expected)
        for name, error in errors.items():
            grad, worst = _larger(grad, error), max(worst, (name, error), key=lambda item: item[1])
    trained = run.weights()
    read = {name for chunk in graph.model.chunks for name in chunk.weights}  # what nobody reads, nobody changes, and workers do not keep it
    for name, value in plain.weights().items():
        error = _relative(trained.get(name), value) if name in read else 0.0
        weight, worst = _larger(weight, error), max(worst, (name, error), key=lambda item: item[1])
    return Compared(expected_loss, loss, grad, weight, worst[0])


def _relative(got: torch.Tensor | None, expected: torch.Tensor) -> float:
    if got is None:
        return float("inf")
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return float((got - expected).abs().max()) / max(largest, 1e-12) if expected.numel() else 0.0


def gradient_errors(graph: Graph, devices: Sequence[int], found: Sequence[Mapping[Key, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """How far what every device had of each gradient is from the plain one, relative to its largest number.

    `found` has, for each of `devices`, gradients by the key of the weight they update, whole or in whatever parts the graph divides them.
    A gradient of which no device had some part, or that should not be there, is infinitely far off."""
    had = dict(zip(devices, found, strict=True))
    errors = dict.fromkeys(expected, 0.0)
    seen = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in expected.items()}
    for node in graph.nodes:
        for i in range(len(node.writes) if node.op == "update" else 0):
            (old,), parts = node.reads[2 * i : 2 * i + 2]
            held = graph.held[parts[0]]
            whole = expected.get(held.weight)
            if whole is None:
                errors[held.weight] = float("inf")
                continue
            for device, at in zip(devices_of(held.where), coordinates(held.where), strict=True):
                box, cut = local_box(held, whole.shape, at), slice(*interval(held, whole.shape, at))
                got, wanted = had[device][old].flatten(), take(whole, box).flatten()[cut]
                error = float("inf") if got.shape != wanted.shape else float((got - wanted).abs().max()) if got.numel() else 0.0
                errors[held.weight] = _larger(errors[held.weight], error / max(float(whole.abs().max()), 1e-12))
                mine = take(seen[held.weight], box)
                mark = mine.flatten()
                mark[cut] = True
                mine.copy_(mark.view(mine.shape))
    return {name: error if name not in seen or bool(seen[name].all()) else float("inf") for name, error in errors.items()}


def _larger(a: float, b: float) -> float:
    """Of two errors; one that is no number is larger than any."""
    return float("inf") if a != a or b != b else max(a, b)


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
        if self.file.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.file.max_norm)
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
        self.inline = Inline(scheduler.graph(), program.cut(), model, optimizer, seed, file.lr_schedule, file.max_norm)

    def step(self, batch: tuple[Any, Any]) -> tuple[float, Mapping[str, torch.Tensor]]:
        done = self.inline.step(batch)
        return done.loss, done.gradients

    def weights(self) -> dict[str, torch.Tensor]:
        return self.inline.weights()
