"""Checks that a schedule does not change the mathematics: two training steps both ways, compared.

The plain model runs eagerly on the whole batch; the schedule runs on simulated devices. Both use float64, so that
rounding can neither hide a mistake nor look like one. Dropout in the eager model uses the masks of the schedule.

A gradient can be zero up to rounding (the bias of an attention's keys), and an optimizer like Adam turns it into a
full-size step. Such elements are compared by their gradients only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from piperlang.capture.autodiff.pass_graph import TracedModel
from piperlang.capture.program import Program, capture
from piperlang.capture.trace.eager import forward_and_backward
from piperlang.capture.user.model_file import ModelFile
from piperlang.capture.user.seeding import seed_all
from piperlang.capture.user.user_code import eagerly, located
from piperlang.capture.user.where import line_of_function
from piperlang.core.value_id import ValueId
from piperlang.ir.graph import Graph
from piperlang.ir.layout import devices_of
from piperlang.ir.weight_layout import coordinates, interval, local_box
from piperlang.runtime.box import take
from piperlang.runtime.hardware.room import threads_for
from piperlang.runtime.optimizer.optimize import default_optimizer
from piperlang.runtime.optimizer.user import call_optimizer, call_schedule
from piperlang.runtime.reference.interpreter import GraphInterpreter

STEPS = 2
LIMIT = 1e-5
NOISE = 1e-11
"""Relative to the model's largest gradient: the possible error of a sum of float64 numbers of that size. Smaller
gradients and differences are rounding."""


@dataclass(frozen=True)
class Compared:
    loss_reference: float
    loss: float
    max_grad_rel_err: float
    max_weight_rel_err: float
    worst: str
    """The weight with the largest difference."""
    judged_by_gradient: tuple[str, ...] = ()
    """Weights with elements whose gradient is rounding noise; those elements are not compared after the update."""

    @property
    def ok(self) -> bool:
        loss = abs(self.loss - self.loss_reference) / max(abs(self.loss_reference), 1e-12)
        return max(loss, self.max_grad_rel_err, self.max_weight_rel_err) <= LIMIT


def doubled(file: ModelFile, seed: int) -> tuple[Callable[[], nn.Module], list[tuple[Any, Any]]]:
    """The model and its first batches in float64."""

    @wraps(file.model)
    def make() -> nn.Module:
        seed_all(seed)
        made: nn.Module = copy.deepcopy(file.model()).double()  # `model()` may return the same object again
        return made

    def precise(value: Any) -> Any:
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    seed_all(seed)
    batches = [pytree.tree_map(precise, batch) for batch in islice(file.data(), STEPS)]
    return make, (batches * STEPS)[:STEPS]


def capture_doubled(file: ModelFile, seed: int = 0) -> Program:
    make, batches = doubled(file, seed)
    return capture(make, file.loss, batches[0])


class Candidate(Protocol):
    """An implementation that trains under a schedule, to be compared."""

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        """The loss, and the error of each gradient relative to the expected one."""

    def weights(self) -> Mapping[str, torch.Tensor]: ...


class Simulated:
    """Runs the graph on simulated devices."""

    def __init__(self, interpreter: GraphInterpreter) -> None:
        self.interpreter = interpreter

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        done = self.interpreter.step(batch)
        floor = noise_of(expected) / LIMIT
        extra = dict.fromkeys(done.gradients.keys() - expected.keys(), float("inf"))
        return done.loss, extra | {
            name: _relative(done.gradients.get(name), value, floor) for name, value in expected.items()
        }

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.interpreter.weights()


class Planned:
    """Runs a plan, on workers or in threads."""

    def __init__(self, graph: Graph, job: Any) -> None:
        self.graph, self.job = graph, job

    def step(self, batch: tuple[Any, Any], expected: Mapping[str, torch.Tensor]) -> tuple[float, Mapping[str, float]]:
        done = self.job.step(batch, gradients=True)
        return done.loss, gradient_errors(
            self.graph, [device.device for device in self.job.plan.devices], self.job.gradients(), expected
        )

    def weights(self) -> Mapping[str, torch.Tensor]:
        weights: Mapping[str, torch.Tensor] = self.job.weights()
        return weights


@dataclass(frozen=True)
class InDouble:
    """A picklable function that creates a model in float64."""

    make: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.make()).double()  # `model()` may return the same object again


def compare(
    file: ModelFile,
    program: Program,
    graph: Graph,
    captured: TracedModel,
    seed: int = 0,
    trainer: Candidate | None = None,
) -> Compared:
    """`trainer`: trains under the schedule; by default, simulated devices."""
    make, batches = doubled(file, seed)
    optimizer = file.optimizer or default_optimizer
    run = trainer or Simulated(
        GraphInterpreter(graph, captured, make(), optimizer, seed, file.lr_schedule, file.max_norm)
    )
    plain = _Eager(file, make(), optimizer, seed, graph.model.samples)
    grad, weight, worst = 0.0, 0.0, ("", 0.0)
    noisy: dict[str, torch.Tensor] = {}
    with threads_for(graph.model.flops):
        for batch in batches:
            expected_loss, expected = plain.step(batch)
            with located(line_of_function(file.data)):
                loss, errors = run.step(batch, expected)
            for name, value in expected.items():
                small = value.abs() <= noise_of(expected)
                if bool((small & (value != 0)).any()):  # exact zeros stay zero, unless the gradient also has noise
                    noisy[name] = noisy[name] | small if name in noisy else small
            for name, error in errors.items():
                grad, worst = _larger(grad, error), max(worst, (name, error), key=lambda item: item[1])
    trained = run.weights()
    read = {
        name for chunk in graph.model.chunks for name in chunk.weights
    }  # weights that no chunk reads do not change, and workers do not store them
    for name, value in plain.weights().items():
        error = (
            _relative(trained.get(name), value, judged=~noisy[name] if name in noisy else None) if name in read else 0.0
        )
        weight, worst = _larger(weight, error), max(worst, (name, error), key=lambda item: item[1])
    return Compared(expected_loss, loss, grad, weight, worst[0], tuple(noisy))


def noise_of(gradients: Mapping[str, torch.Tensor]) -> float:
    """The size below which elements of gradients, and differences between them, are rounding."""
    return NOISE * max(
        (float(gradient.abs().max()) for gradient in gradients.values() if gradient.numel()), default=0.0
    )


def _relative(
    got: torch.Tensor | None, expected: torch.Tensor, floor: float = 0.0, judged: torch.Tensor | None = None
) -> float:
    """The largest difference among the selected elements, relative to the largest element, or to `floor` if that is
    larger."""
    if got is None or got.shape != expected.shape:
        return float("inf")
    difference = (got - expected).abs().double()
    difference = difference if judged is None else difference[judged]
    return float(difference.max()) / max(float(expected.abs().max()), floor, 1e-12) if difference.numel() else 0.0


def gradient_errors(
    graph: Graph,
    devices: Sequence[int],
    found: Sequence[Mapping[ValueId, torch.Tensor]],
    expected: Mapping[str, torch.Tensor],
) -> dict[str, float]:
    """The error of each gradient on the devices, relative to the largest element of the plain gradient.

    `found` has, for each of `devices`, gradients by the key of the weight they update, whole or sharded in any way. A
    gradient that is missing in part, or that should not exist, is infinitely far off."""
    had = dict(zip(devices, found, strict=True))
    floor = noise_of(expected) / LIMIT
    errors = dict.fromkeys(expected, 0.0)
    seen = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in expected.items()}
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
                error = (
                    float("inf")
                    if got.shape != wanted.shape
                    else float((got - wanted).abs().max())
                    if got.numel()
                    else 0.0
                )
                errors[held.weight] = _larger(
                    errors[held.weight], error / max(float(whole.abs().max()) if whole.numel() else 0.0, floor, 1e-12)
                )
                mine = take(seen[held.weight], box)
                mark = mine.flatten()
                mark[cut] = True
                mine.copy_(mark.view(mine.shape))
    return {
        name: error if name not in seen or bool(seen[name].all()) else float("inf") for name, error in errors.items()
    }


def _larger(a: float, b: float) -> float:
    """The larger of two errors; NaN is larger than any number."""
    return float("inf") if a != a or b != b else max(a, b)


class _Eager:
    """Plain training of the model on one device."""

    def __init__(
        self,
        file: ModelFile,
        model: nn.Module,
        optimizer: Callable[[Any], torch.optim.Optimizer],
        seed: int,
        samples: int,
    ) -> None:
        self.file, self.model, self.seed, self.samples = file, model, seed, samples
        self.optimizer = call_optimizer(optimizer, model)
        self.schedule = call_schedule(file.lr_schedule, self.optimizer) if file.lr_schedule else None
        self.steps = 0

    def step(self, batch: tuple[Any, Any]) -> tuple[float, Mapping[str, torch.Tensor]]:
        done = forward_and_backward(self.model, self.file.loss, batch, self.seed, self.steps, self.samples)
        grads = {name: gradient.clone() for name, gradient in done.gradients.items()}
        if self.file.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.file.max_norm)
        with eagerly(self.model, self.file.loss, "a step of the optimizer"):
            self.optimizer.step()
        if self.schedule is not None:
            with eagerly(self.model, self.file.loss, "a step of the learning rate schedule"):
                self.schedule.step()
        self.steps += 1
        return done.loss, grads

    def weights(self) -> dict[str, torch.Tensor]:
        """Weights and buffers, which the model may change."""
        return {name: value.detach() for name, value in (*self.model.named_parameters(), *self.model.named_buffers())}
