"""Comparing a schedule with the plain model, in float32: the loss, every gradient and every updated weight."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from piperlang.build.scheduler import Scheduler
from piperlang.capture.program import CutProgram, Program, capture
from piperlang.diagnostics import PiperError
from piperlang.ir.graph import Graph
from piperlang.ir.sort import topological
from piperlang.pipeline import schedule
from piperlang.runtime.reference.interpreter import GraphInterpreter
from piperlang.source import Source
from tests.support.models import CASES, Case

torch.set_num_threads(1)
SAMPLES = 8
LIMIT = 1e-5


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@cache
def program(name: str) -> Program:
    case = CASES[name]
    return capture(case.model, case.loss, case.batch(SAMPLES))


def compiled(traced: Program, script: str) -> tuple[Graph, CutProgram]:
    """The verified graph of a script, or its diagnostics as an error."""
    found = schedule(traced, Source("s.piper", script))
    if found.problems:
        raise PiperError(*found.problems)
    graph = found.graph()
    topological(graph)
    captured = found.captured
    assert isinstance(captured, CutProgram)
    return graph, captured


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def differences(
    case: Case, traced: Program, graph: Graph, captured: CutProgram, steps: int = 2
) -> tuple[float, float, float]:
    """The largest relative difference of losses, gradients and weights over some steps, against plain training."""
    torch.manual_seed(0)
    model = case.model()
    run = GraphInterpreter(graph, captured, model, optimizer, seed=3)
    # Eager dropout draws other masks: there our own unscheduled graph is the reference.
    plain = (
        GraphInterpreter(Scheduler(traced).graph(), traced.cut(), model, optimizer, seed=3) if traced.random else None
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    eager = optimizer(trained)
    worst = [0.0, 0.0, 0.0]
    for step in range(steps):
        torch.manual_seed(100 + step)
        batch = case.batch(SAMPLES)
        got = run.step(batch)
        if plain is not None:
            reference = plain.step(batch)
            loss, grads, weights = reference.loss, reference.gradients, plain.weights()
        else:
            eager.zero_grad()
            value = case.loss(model(batch[0]), batch[1])
            value.backward()  # type: ignore[no-untyped-call]
            loss, grads = float(value.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            eager.step()
            weights = {n: p.detach() for n, p in model.named_parameters()}
        assert set(got.gradients) == set(grads)
        now = run.weights()
        worst[0] = max(worst[0], abs(got.loss - loss) / abs(loss))
        worst[1] = max(worst[1], *(relative(got.gradients[n], g) for n, g in grads.items()))
        worst[2] = max(worst[2], *(relative(now[n], w) for n, w in weights.items()))
    return worst[0], worst[1], worst[2]


def assert_same(case: Case, traced: Program, script: str) -> Graph:
    """The graph of the script, which trains as plain training does."""
    graph, captured = compiled(traced, script)
    loss, gradients, weights = differences(case, traced, graph, captured)
    assert max(loss, gradients, weights) <= LIMIT, (loss, gradients, weights)
    return graph
