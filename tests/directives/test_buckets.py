"""Weights of several chunks on the same devices are reduced together and updated together, up to the size of a bucket,
unless the script tells the chunks apart."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from piperlang.capture.annotate import annotate
from piperlang.capture.program import Program, capture
from piperlang.ir.graph import Graph
from piperlang.pipeline import planned
from piperlang.plan.instructions import Backward, ReduceGradients, ShardCollective, Update
from piperlang.plan.plan import Plan
from piperlang.runtime.driver.cluster import Cluster
from tests.support.equivalence import compiled, program
from tests.support.job_schedules import pipeline_script
from tests.support.jobs import assert_trains
from tests.support.models import CASES, Case, Mlp, square, vectors

WIDE = 968
"""Four linear layers of so many features have 15 MB of weights."""
DP = "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [pass=*] over gpu.dp{}\n"


class Stages(nn.Module):
    def __init__(self, dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            with annotate("stage", i):
                x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float()


@pytest.fixture(scope="module")
def wide() -> Program:
    return capture(Stages, square, (torch.randn(4, WIDE), torch.randn(4, WIDE)))


def ops(graph: Graph) -> Counter[str]:
    return Counter(node.op for node in graph.nodes)


def sent(plan: Plan) -> float:
    return sum(
        x.sent_bytes(len(plan.groups[x.group].members))
        for device in plan.devices
        for x in device.instructions
        if isinstance(x, ShardCollective)
    )


def test_a_model_of_15_mb_is_one_bucket_of_25_mb(wide: Program) -> None:
    assert sum(p.numel() * 4 for p in Stages().parameters()) == pytest.approx(15e6, rel=0.01)
    plans = {}
    for name, options in (("one", ""), ("each", " with bucket=3MB")):
        graph = compiled(wide, DP.format(options))[0]
        plans[name] = planned(graph)
    kinds = {name: Counter(x.op for x in plan.devices[0].instructions) for name, plan in plans.items()}
    assert kinds["one"]["reduce"] == kinds["one"]["update"] == 1
    assert kinds["each"]["reduce"] == kinds["each"]["update"] == 8
    assert sent(plans["one"]) == sent(plans["each"])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("states=sharded", {"all_reduce": 1, "update": 1, "all_gather": 1}),
        ("grads=sharded", {"reduce_scatter": 1, "update": 1, "all_gather": 1}),
        ("params=sharded", {"reduce_scatter": 4, "update": 4, "all_gather": 7}),
        ("grads=sharded, accumulate=sharded", {"reduce_scatter": 4, "update": 4, "all_gather": 4}),
    ],
)
def test_levels(level: str, expected: dict[str, int], wide: Program) -> None:
    """Where weights or sums of gradients are kept in parts, those of one chunk at a time are whole."""
    found = ops(compiled(wide, DP.format(f" with {level}"))[0])
    assert {op: found[op] for op in ("all_reduce", "reduce_scatter", "update", "all_gather") if found[op]} == expected


def test_a_bucket_is_reduced_when_its_last_gradient_is_there(wide: Program) -> None:
    """Two buckets of two stages: the first is reduced beside the backward of the stages of the second."""
    instructions = planned(compiled(wide, DP.format(" with bucket=8MB"))[0]).devices[0].instructions
    reductions = [x for x in instructions if isinstance(x, ReduceGradients)]
    # A bias of the third stage would fit in, and is not there yet.
    ready = [sum(isinstance(x, Backward) for x in instructions[: max(one.waits) + 1]) for one in reductions]
    assert ready == [2, 4]


def test_weights_of_different_types_are_apart() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)
    traced = capture(lambda: Stages(dtypes), square, (torch.randn(4, WIDE), torch.randn(4, WIDE)))
    plan = planned(compiled(traced, DP.format(""))[0])
    assert sorted(x.dtype for x in plan.devices[0].instructions if isinstance(x, ReduceGradients)) == [
        "bfloat16",
        "float32",
    ]


def test_without_a_reduction_updates_are_large(wide: Program) -> None:
    graph = compiled(wide, "mesh gpu = pp: 2\nplace [stage=0:2] on gpu[pp=0]\nplace [stage=2:4] on gpu[pp=1]\n")[0]
    for device in planned(graph).devices:
        assert len([x for x in device.instructions if isinstance(x, Update)]) == 1


@pytest.mark.parametrize(
    ("line", "reductions"),
    [
        ("", 1),
        ('stream [comm=all_reduce] on "gradients"', 1),
        ('stream [comm=all_reduce, stage=0:2] on "gradients"', 2),
        ('stream [comm=all_reduce, stage=1] on "gradients"\nstream [update, stage=3] on "gradients"', 3),
        ("order [stage=3, comm=all_reduce] -> [stage=1, pass=B]", 2),
        ("order on gpu: [pass=B, stage=3], [pass=B, stage=2], [comm=all_reduce, stage=2]", 2),
        ("order on gpu: [pass=B, stage=3], [pass=B, stage=2]", 1),
    ],
)
def test_what_the_script_tells_apart_is_apart(line: str, reductions: int, wide: Program) -> None:
    assert ops(compiled(wide, DP.format("") + line + "\n")[0])["all_reduce"] == reductions


def test_buckets_of_different_sizes_are_apart(wide: Program) -> None:
    script = (
        "mesh gpu = dp: 2\nplace [pass=*] on gpu\nreplicate [stage=0:2] over gpu.dp\n"
        "replicate [stage=2:4] over gpu.dp with bucket=20MB\n"
    )
    assert ops(compiled(wide, script)[0])["all_reduce"] == 2
    assert ops(compiled(wide, script.replace("20MB", "25MB"))[0])["all_reduce"] == 1


def test_a_selector_finds_what_is_for_several_chunks(wide: Program) -> None:
    graph, _ = compiled(
        wide,
        DP.format("")
        + 'require count([comm=all_reduce]) == 1 and count([comm=all_reduce, stage=2]) == 1, "by any of its stages"\n'
        'require count([update, stage=0:2]) == 1 and count([update, !stage]) == 0, "of the stages that there are"\n',
    )
    (reduction,) = [node for node in graph.nodes if node.op == "all_reduce"]
    assert str(reduction) == "all_reduce[stage=0:4] on gpu"
    assert reduction.attributes() == {"comm": "all_reduce"}


# ---------------------------------------------------------------------------------------------------------- training


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)


FROZEN = Case("frozen", Frozen, square, vectors, 4)
DATA = "replicate [pass=*] over gpu.dp with {}"
JOBS = {
    "frozen": (FROZEN, DP.format("")),
    "frozen, zero1": (FROZEN, DP.format(" with states=sharded")),
    "tied, zero2": (CASES["gpt"], DP.format(" with grads=sharded") + "split batch into 2 as mb\n"),
    "1f1b, two stages each, zero1": (
        CASES["gpt"],
        "from std.pipeline import one_f_one_b, loop\nmesh gpu = pp: 2, dp: 2\nsplit batch into 4 as mb\n"
        "place [stage=0] on gpu[pp=0]\nplace [stage=1:4] on gpu[pp=1]\n" + DATA.format("states=sharded") + "\n",
    ),
    "gpipe, zero2": (CASES["mlp"], pipeline_script("gpipe", "loop", 4, 2, DATA.format("grads=sharded"))),
    "looped, ddp": (CASES["gpt"], pipeline_script("looped_bfs", "loop", 2, 2, DATA.format("bucket=25MB"), "2, 2")),
    "reductions on a stream of their own, small buckets": (
        CASES["mlp"],
        DP.format(" with bucket=1500B")
        + 'stream [comm=all_reduce, stage=0:2] on "gradients"\nsplit batch into 2 as mb\n',
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_trains_as_one_device_would(name: str, cluster: Cluster) -> None:
    case, script = JOBS[name]
    traced = program(case.name) if case.name in CASES else capture(case.model, case.loss, case.batch(8))
    assert_trains(cluster, case, traced, script)
