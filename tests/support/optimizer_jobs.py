"""A model whose weights are of all kinds, trained under schedules and by plain PyTorch: for tests of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import CutProgram, Program, capture
from piperlang.ir.graph import Graph
from piperlang.plan.lower import lower
from piperlang.plan.plan import Plan
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.interpreter import GraphInterpreter
from tests.support.equivalence import compiled, relative

WIDTH, SAMPLES, STEPS, LIMIT = 6, 12, 3, 1e-9


class Net(nn.Module):
    """Matrices, biases, norms, a scalar and a tied weight on two stages; a frozen layer, and a weight that nothing
    reads. In float64."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, dtype=torch.float64)
        self.first, self.norm, self.middle = (
            linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH, dtype=torch.float64),
            linear(WIDTH, 2 * WIDTH),
        )
        self.frozen = linear(2 * WIDTH, 2 * WIDTH).requires_grad_(False)
        self.last, self.again = linear(2 * WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.scale, self.spare = (nn.Parameter(torch.full(shape, 0.7, dtype=torch.float64)) for shape in ((), (3,)))
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            x = torch.tanh(self.norm(self.first(x)))
        with annotate("stage", 1):
            x = torch.tanh(self.middle(x))
        with annotate("stage", 2):
            return self.again(self.last(torch.tanh(self.frozen(x)))) * self.scale  # type: ignore[no-any-return]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.sin(3 * x)


PLACED = "place [stage=0:2] on gpu[pp=0]\nplace [stage=2] on gpu[pp=1]\nsplit batch into 2 as mb\n"
REPLICAS = "mesh gpu = dp: 3\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp"
COLUMNS = "place [pass=*] on gpu\nshard [stage=1] over gpu.tp with style=columns\nreplicate [stage!=1] over gpu.tp\n"
SCRIPTS = {
    "one": "split batch into 2 as mb\n",
    "ddp": "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp\n",
    "zero1": "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with states=sharded\n",
    "zero3": "mesh gpu = dp: 4\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp with params=sharded\n",
    "pp": f"mesh gpu = pp: 2\n{PLACED}",
    "pp zero1": f"mesh gpu = pp: 2, dp: 2\n{PLACED}replicate [pass=*] over gpu.dp with states=sharded\n",
    "pp zero3": f"mesh gpu = pp: 2, dp: 2\n{PLACED}replicate [pass=*] over gpu.dp with params=sharded\n",
    "columns": f"mesh gpu = tp: 2\n{COLUMNS}",
    "columns zero1": f"mesh gpu = dp: 2, tp: 2\n{COLUMNS}replicate [pass=*] over gpu.dp with states=sharded\n",
}

IN_PIPELINE = f"mesh gpu = pp: 2, dp: 2\n{PLACED}replicate [pass=*] over gpu.dp"
OWNED = {
    "states": f"{REPLICAS} with states=sharded, partition=weights\n",
    "gradients": f"{REPLICAS} with grads=sharded, partition=weights, bucket=300B\n",
    "weights": f"{REPLICAS} with params=sharded, partition=weights\n",
    "pp gradients": f"{IN_PIPELINE} with grads=sharded, partition=weights\n",
    "pp weights": f"{IN_PIPELINE} with params=sharded, partition=weights, accumulate=sharded\n",
    "two axes": "mesh gpu = dp: 2, ep: 2\nplace [pass=*] on gpu\n"
    "replicate [pass=*] over gpu.dp with states=sharded, partition=weights\n"
    "replicate [pass=*] over gpu.ep with params=sharded, partition=weights\n",
    "columns": f"mesh gpu = dp: 2, tp: 2\n{COLUMNS}"
    "replicate [pass=*] over gpu.dp with states=sharded, partition=weights\n",
}
"""ZeRO that gives every weight to one device."""


@cache
def program() -> Program:
    return capture(Net, f.mse_loss, batch(0))


@cache
def scheduled(name: str) -> tuple[Graph, CutProgram, Plan]:
    graph, captured = compiled(program(), SCRIPTS[name] if name in SCRIPTS else OWNED[name.removeprefix("owned ")])
    return graph, captured, lower(graph)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


Make = Callable[[Any], Any]
Rates = Callable[[Any], Any] | None
Weights = dict[str, torch.Tensor]


def _several(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def plain(make: Make, schedule: Rates = None, steps: int = STEPS) -> Weights:
    """Weights after some steps of plain PyTorch."""
    model = net()
    made = make(model)
    rates = schedule(made) if schedule else []
    for step in range(steps):
        model.zero_grad()
        x, y = batch(step)
        f.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        for one in (*_several(made), *_several(rates)):
            one.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def simulated(script: str, make: Make, schedule: Rates = None, steps: int = STEPS) -> Weights:
    graph, captured, _ = scheduled(script)
    run = GraphInterpreter(graph, captured, net(), make, 0, schedule)
    for step in range(steps):
        run.step(batch(step))
    return run.weights()


def threads(script: str, make: Make, schedule: Rates = None, steps: int = STEPS) -> Weights:
    _, captured, plan = scheduled(script)
    with ThreadJob(plan, captured, Training(Net, make, schedule), 20.0, "float64") as job:
        for step in range(steps):
            job.step(batch(step))
        return job.weights()


def workers(cluster: Cluster, script: str, make: Make, schedule: Rates = None, steps: int = STEPS) -> Weights:
    _, captured, plan = scheduled(script)
    with Job(plan, captured, Training(Net, make, schedule), timeout=30, loss_dtype="float64", cluster=cluster) as job:
        for step in range(steps):
            job.step(batch(step))
        return job.weights()


def assert_equal(got: Weights, expected: Weights) -> None:
    errors = {name: relative(got[name], value) for name, value in expected.items() if name in got}
    assert len(errors) >= len(expected) - 1  # simulated devices do not keep a weight that nothing reads
    assert max(errors.values()) <= LIMIT, errors


def assert_same(script: str, make: Make, reference: Make, schedule: Rates = None) -> None:
    """`reference` makes the optimizer of the plain model from the model."""
    expected = plain(reference, schedule)
    assert_equal(simulated(script, make, schedule), expected)
    assert_equal(threads(script, make, schedule), expected)
