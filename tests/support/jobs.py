"""Jobs on real workers in tests: one Ray and one set of workers for all of a module's tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from piperlang.build.scheduler import Scheduler
from piperlang.capture.program import Program
from piperlang.plan.lower import lower
from piperlang.plan.verify import check
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.interpreter import GraphInterpreter
from piperlang.runtime.reference.numerics import gradient_errors
from tests.support.equivalence import LIMIT, compiled, optimizer, relative
from tests.support.models import Case


class Lent:
    """Workers that a job takes for its own, and that outlive it. A job whose devices wait for each other when it fails
    must not have them: they would go on waiting."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.jobs = cluster, 0

    def asked(self, count: int, address: str | None = None, backend: Any = None, patience: Any = None) -> Lent:
        """In place of a new cluster."""
        assert count <= len(self.cluster.workers)
        assert address is None
        self.jobs += 1
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cluster, name)

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass


class Errors(NamedTuple):
    """The largest relative differences from plain training on one device."""

    loss: float
    gradients: float
    weights: float
    devices: int


class Plain:
    """The reference: eager training, or our own unscheduled graph where eager dropout would draw other masks."""

    def __init__(self, case: Case, program: Program) -> None:
        torch.manual_seed(0)
        self.case, self.model = case, case.model()
        self.graph = (
            GraphInterpreter(Scheduler(program).graph(), program.cut(), self.model, optimizer, 0)
            if program.random
            else None
        )
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
        if self.graph is not None:
            done = self.graph.step(batch)
            return done.loss, dict(done.gradients)
        self.optimizer.zero_grad()
        loss = self.case.loss(self.model(batch[0]), batch[1])
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.step()
        return float(loss.detach()), gradients

    def weights(self) -> dict[str, torch.Tensor]:
        return (
            self.graph.weights()
            if self.graph is not None
            else {name: p.detach() for name, p in self.model.named_parameters()}
        )


def trained(cluster: Cluster, case: Case, program: Program, script: str, steps: int = 3) -> Errors:
    """Some steps on workers over gloo, beside plain training: the loss of every step, every part of every gradient, and
    the weights at the end."""
    graph, captured = compiled(program, script)
    plan = lower(graph)
    check(plan)
    plain = Plain(case, program)
    losses, gradients = [], []
    with Job(plan, captured, Training(case.model, optimizer, None, 0), timeout=30, cluster=cluster) as job:
        for step in range(steps):
            torch.manual_seed(100 + step)
            batch = case.batch(graph.model.samples)
            done = job.step(batch, gradients=True)
            loss, expected = plain.step(batch)
            losses.append(abs(done.loss - loss) / abs(loss))
            gradients += gradient_errors(
                graph, [device.device for device in plan.devices], job.gradients(), expected
            ).values()
        weights = job.weights()
    read = {name for chunk in graph.model.chunks for name in chunk.weights}  # what nobody reads, nobody keeps
    errors = [relative(weights[name], value) for name, value in plain.weights().items() if name in read]
    return Errors(_worst(losses), _worst(gradients), _worst(errors), len(plan.devices))


def _worst(errors: list[float]) -> float:
    return float("inf") if any(error != error for error in errors) else max(errors)


def assert_trains(cluster: Cluster, case: Case, program: Program, script: str, steps: int = 3) -> Errors:
    """On gloo: losses, gradients and weights of some steps equal those of plain training on one device."""
    errors = trained(cluster, case, program, script, steps)
    assert max(errors[:3]) <= LIMIT, errors
    return errors
