"""Values between chunks on different meshes, or on different submeshes of one: what arrives is what was made, and every
term of a sum counts once."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.pipeline import representative
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.plan import Plan
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.numerics import gradient_errors
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.result import simulated
from tests.support.equivalence import LIMIT, SAMPLES, assert_same, compiled, optimizer, relative
from tests.support.jobs import Plain
from tests.support.models import WIDTH, Case, square, vectors
from tests.support.plan_runs import right_plan


class Table(nn.Module):
    """Two stages that use a table: it has no samples, every device has all of it, and each has a term of its
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with annotate("stage", 0):
            table = torch.tanh(self.table)
            x = torch.tanh(self.layers[0](x)) * table
        with annotate("stage", 1):
            output: torch.Tensor = self.layers[1](x) * table
            return output


MOVES = ("send", "recv", "all_to_all", "copy")
TABLE = Case("table", Table, square, vectors, 2)


@cache
def program() -> Program:
    return capture(TABLE.model, TABLE.loss, TABLE.batch(SAMPLES))


def planned(script: str) -> Plan:
    """The plan of a script. Its graph, and the plan on simulated devices, train as plain PyTorch does; it can be
    simulated."""
    graph = assert_same(TABLE, program(), script)
    plan = right_plan(graph)
    _, captured = compiled(program(), script)
    plain = Plain(TABLE, program())
    with ThreadJob(plan, captured, Training(TABLE.model, optimizer), 5.0, "float32") as job:
        for step in range(2):
            torch.manual_seed(100 + step)
            batch = TABLE.batch(SAMPLES)
            done = job.step(batch, gradients=True)
            loss, expected = plain.step(batch)
            assert done.loss == pytest.approx(loss, rel=LIMIT)
            devices = [device.device for device in plan.devices]
            assert max(gradient_errors(graph, devices, job.gradients(), expected).values()) <= LIMIT
        weights = job.weights()
    for name, weight in plain.weights().items():
        assert relative(weights[name], weight) <= LIMIT, name
    whole = simulated(plan, graph, MachineCosts(plan, graph, Machine())).timeline
    some, classes = representative(graph)
    part = simulated(some, graph, MachineCosts(some, graph, Machine()), classes).timeline
    assert part.length == pytest.approx(whole.length, rel=0.1)
    return plan


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("d=0:2", "d=1:3"),
        ("d=1:3", "d=0:2"),
        ("d={0, 1}", "d={1, 0}"),
        ("d={0, 1}", "d={2, 0}"),
        ("d=0:4", "d={3, 4, 1, 0}"),
        ("d=0:4", "d=1:5"),
    ],
)
def test_a_tensor_without_samples_between_submeshes_that_overlap(first: str, second: str) -> None:
    """Each device has a term of its gradient: one that keeps its own, where another sends it to somebody else, would
    count it twice."""
    planned(
        f"mesh gpu = d: 5\nplace [stage=0] on gpu[{first}]\nplace [stage=1] on gpu[{second}]\n"
        "replicate [pass=*] over gpu.d\n"
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("a: 4", "b: 2, c: 2"), ("a: 2, b: 2", "c: 4"), ("a: 2, b: 2", "c: 2, d: 2"), ("a: 4", "b: 4")],
)
def test_two_views_that_divide_the_batch_alike_move_nothing(one: str, other: str) -> None:
    def replicated(mesh: str, axes: str, stage: int) -> str:
        return "".join(f"replicate [stage={stage}] over {mesh}.{axis.split(':')[0]}\n" for axis in axes.split(", "))

    plan = planned(
        f"mesh one = {one}\nmesh other = {other}\nplace [stage=0] on one\nplace [stage=1] on other\n"
        + replicated("one", one, 0)
        + replicated("other", other, 1)
    )
    # What is left is the gradient of the table: where views differ, its terms are added up, and one device keeps the sum.
    alike = len(one) == len(other)
    moved = {x.op for device in plan.devices for x in device.instructions} & {*MOVES}
    assert moved == (set() if alike else {"copy"})
