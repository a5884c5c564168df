"""Values between chunks on different meshes, or on different submeshes of one: what arrives is what was made, and every
term of a sum counts once."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.ir.graph import Graph
from piperlang.pipeline import representative
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.estimate.summary import SentBytes
from piperlang.plan.instructions import AllToAll
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.thread_job import ThreadJob
from piperlang.runtime.driver.training import Training
from piperlang.runtime.reference.numerics import gradient_errors
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.result import simulated
from tests.support import equivalence
from tests.support.equivalence import LIMIT, SAMPLES, assert_same, compiled, optimizer, relative
from tests.support.jobs import Plain, assert_trains
from tests.support.models import CASES, WIDTH, Case, square, vectors
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
    ("one", "other"), [("a: 4", "b: 2, c: 2"), ("a: 2, b: 2", "c: 4"), ("a: 2, b: 2", "c: 2, d: 2"), ("a: 4", "b: 4")]
)
def test_two_views_that_divide_the_batch_alike_move_nothing(one: str, other: str) -> None:
    def replicated(mesh: str, axes: str, stage: int) -> str:
        return "".join(f"replicate [stage={stage}] over {mesh}.{axis.split(':')[0]}\n" for axis in axes.split(", "))

    plan = planned(
        f"mesh one = {one}\nmesh other = {other}\nplace [stage=0] on one\nplace [stage=1] on other\n"
        + replicated("one", one, 0)
        + replicated("other", other, 1)
    )
    # What is left is the gradient of the table: where views differ, its terms are added up, and one device keeps them.
    alike = len(one) == len(other)
    moved = {x.op for device in plan.devices for x in device.instructions} & {*MOVES}
    assert moved == (set() if alike else {"copy"})


def test_a_sum_along_two_axes_is_added_up_once() -> None:
    """The gradient of a table, from devices along two axes to devices along one."""
    planned(
        "mesh gpu = p: 2, x: 2, y: 2\nplace [stage=0] on gpu[p=0, x=0]\nplace [stage=1] on gpu[p=1]\n"
        "replicate [pass=*] over gpu.y\nreplicate [stage=1] over gpu.x\n"
    )


CAPACITY = 3
EXPERTS = """mesh rest = dp: 4
mesh experts = ep: 2, dp: 2
split batch into 2 as mb
place [!expert] on rest
place [expert=*] on experts
replicate [!expert] over rest.dp
replicate [expert=*] over experts.dp
shard [expert=*] over experts.ep
"""
"""Four devices, of which the experts see pairs: those of one half of the samples are 0 and 2, those of the other 1 and
3. The samples of the rest are one quarter on each device, in order."""


def exchange(device: DevicePlan) -> AllToAll:
    """The first on a device."""
    return next(x for x in device.instructions if isinstance(x, AllToAll))


def sent(plan: Plan, device: DevicePlan) -> float:
    """Bytes that a device gives to others in all-to-alls."""
    bytes_of = SentBytes(plan)
    return sum(bytes_of.of(device, x) for x in device.instructions if isinstance(x, AllToAll))


def experts(script: str) -> tuple[Graph, Plan]:
    graph = assert_same(CASES["moe"], equivalence.program("moe"), script)
    return graph, right_plan(graph)


def test_experts_on_a_mesh_of_their_own_exchange_in_one_all_to_all() -> None:
    graph, plan = experts(EXPERTS)
    exchanges = [node for node in graph.nodes if node.op == "all_to_all"]
    assert not [node for node in graph.nodes if node.op in ("send", "recv")]
    # Tokens to the experts and back, in the forward and in the backward, for each of two microbatches.
    assert len(exchanges) == 8
    assert {node.attributes()["expert"] for node in exchanges} == {0}
    for device in plan.devices:
        its = [x for x in device.instructions if isinstance(x, AllToAll)]
        assert [x.node for x in its] == [x.node for x in plan.devices[0].instructions if isinstance(x, AllToAll)]
        assert {x.stream for x in its} == {"comm"}
        assert {plan.groups[x.group].members for x in its} == {(0, 1, 2, 3)}
    # A microbatch has one sample on each device, and each goes to the two devices that have the halves of the experts:
    # devices 0 and 3 are one of those for their own sample, 1 and 2 send theirs whole.
    half = 2 * CAPACITY * WIDTH * 4
    assert [sent(plan, device) for device in plan.devices] == [8 * half * n for n in (1, 2, 2, 1)]
    machine = Machine()
    longest = [MachineCosts(plan, graph, machine).cost(device, exchange(device)).shared for device in plan.devices]
    assert longest == pytest.approx([half * n / machine.node.bandwidth for n in (1, 2, 2, 1)])


def test_an_exchange_between_views_is_on_the_stream_that_the_script_names() -> None:
    _, plan = experts(EXPERTS + 'stream [comm=all_to_all, pass=F] on "there"\n')
    exchanges = [x for x in plan.devices[0].instructions if isinstance(x, AllToAll)]
    streams = [(x.stream, dict(plan.nodes[x.node].tags)["pass"]) for x in exchanges]
    assert sorted(streams) == [("comm", "B")] * 4 + [("there", "F")] * 4
    assert {group.stream for group in plan.groups} == {"comm", "there"}


@pytest.mark.parametrize("stream", ["", 'stream [comm=all_to_all] on "exchange"\n'])
def test_experts_on_a_mesh_of_their_own_on_workers(stream: str, cluster: Cluster) -> None:
    assert_trains(cluster, CASES["moe"], equivalence.program("moe"), EXPERTS + stream)


def test_a_table_between_submeshes_that_overlap_on_workers(cluster: Cluster) -> None:
    assert_trains(
        cluster,
        TABLE,
        program(),
        "mesh gpu = d: 3\nplace [stage=0] on gpu[d=0:2]\nplace [stage=1] on gpu[d=1:3]\n"
        "replicate [pass=*] over gpu.d\n",
    )


@pytest.mark.parametrize("counts", [(4, 2), (2, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_table_is_read_across_splits(counts: tuple[int, int], devices: int) -> None:
    """A microbatch of the second stage reads the table that another one of the first has made."""
    place = f"mesh gpu = pp: {devices}\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp={devices - 1}]\n"
    planned(f"split [stage=0] into {counts[0]} as mb\nsplit [stage=1] into {counts[1]} as mc\n{place}")
