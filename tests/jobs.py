"""Jobs on real workers in tests: one Ray and one set of workers for all of a module's tests."""

from __future__ import annotations

import torch

from piperlang.capture.program import Program
from piperlang.ir.graph import Graph
from piperlang.plan.lower import lower
from piperlang.runtime.cluster import Cluster
from piperlang.runtime.job import Job, Training
from tests.equivalence import LIMIT, SAMPLES, compiled, optimizer, relative
from tests.models import Case


def assert_trains(cluster: Cluster, case: Case, program: Program, script: str, steps: int = 2) -> None:
    """On gloo: losses, gradients and weights of some steps equal those of plain training on one device."""
    graph, captured = compiled(program, script)
    plan = lower(graph)
    torch.manual_seed(0)
    model = case.model()
    eager = optimizer([p for p in model.parameters() if p.requires_grad])
    with Job(plan, captured, Training(case.model, optimizer, None, 0), timeout=30, cluster=cluster) as job:
        for step in range(steps):
            torch.manual_seed(100 + step)
            batch = case.batch(SAMPLES)
            done = job.step(batch, gradients=True)
            eager.zero_grad()
            loss = case.loss(model(batch[0]), batch[1])
            loss.backward()
            assert abs(done.loss - float(loss.detach())) <= LIMIT * abs(float(loss.detach()))
            _same_gradients(job, graph, model)
            eager.step()
        weights = job.weights()
    for name, parameter in model.named_parameters():
        assert relative(weights[name], parameter) <= LIMIT, name


def _same_gradients(job: Job, graph: Graph, model: torch.nn.Module) -> None:
    """Where a device has the whole gradient it equals the plain one; parts are compared through the weights."""
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen = set()
    for found in job.gradients():
        for key, gradient in found.items():
            name = graph.held[key].weight
            seen.add(name)
            if gradient.shape == expected[name].shape:
                assert relative(gradient, expected[name]) <= LIMIT, name
    assert seen == set(expected)
