"""What an instruction costs a worker beyond what it computes: plans of 100 and of 1,000 instructions that do nothing.

`copy` makes a tensor without elements. `identity` runs a captured graph that returns its input, each instruction
reading what the one before it wrote. `switch` is `copy` on two streams in turn, each waiting for the other: what it
costs to hand over between threads. One Ray worker; a step is timed inside it, so the call from the driver does not
count.

    python -m benchmarks.host [--json] [--steps 30]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from benchmarks.sleeping import optimizer, options, show
from piperlang.capture.autodiff.cost import Cost
from piperlang.capture.autodiff.pass_graph import PassGraph, PassGraphs
from piperlang.capture.batch.layout import BatchLayout
from piperlang.core.value_id import Kind, ValueId
from piperlang.plan.instructions import Copy, Forward, Instruction
from piperlang.plan.plan import DevicePlan, Feed, Plan, PlanNode, StageProgram
from piperlang.runtime.driver.cluster import Cluster
from piperlang.runtime.driver.job import Job
from piperlang.runtime.driver.training import Training

SIZES = (100, 1_000)
IDENTITY = StageProgram("F", 0, 1, ((), ()), (("input", 0),), (("output", 0),), None, False)


class Identity:
    """Stands for a captured model: one chunk, which returns what it is given."""

    layout = BatchLayout(pytree.tree_structure((0, 0)), ((1,), (1,)), (torch.float32,) * 2, ("x", "y"), None)
    aliases: Mapping[str, Sequence[str]] = {}
    constants: Mapping[str, torch.Tensor] = {}
    unsaved: frozenset[str] = frozenset()
    weight_bytes = 0

    def check_state(self) -> None:
        """There is none."""

    def pass_graphs(self, chunk: int, samples: int, sharding: Any = ((), ())) -> PassGraphs:
        graph = fx.Graph()
        graph.output((graph.placeholder("x"),))
        piece = PassGraph(fx.GraphModule(nn.Module(), graph), (("input", 0),), (("output", 0),), Cost({}, 0, 0))
        return PassGraphs(piece, None, None, None, 0, 0)


def value(i: int) -> ValueId:
    return ValueId(Kind.ACTIVATION, f"v{i}", (), ())


def identity(i: int) -> Instruction:
    return Forward(
        "compute", 0, (), program=0, inputs=((value(i),),), outputs=(value(i + 1),), first_sample=0, coordinates=()
    )


def copy(i: int) -> Instruction:
    return Copy("compute", 0, (), sources=(), target=value(i + 1), copies=(), shape=(0,), dtype="float32")


def switch(i: int) -> Instruction:
    return replace(copy(i), stream=("compute", "other")[i % 2], waits=(i - 1,) if i else ())


def plan(make: Callable[[int], Instruction], count: int) -> Plan:
    device = DevicePlan(0, [make(i) for i in range(count)], feeds=[Feed(value(0), "x", ((0, 1),))])
    return Plan([device], [IDENTITY], [PlanNode("nothing", "", ())], 1, "mean", (), [])


def measure(steps: int) -> list[dict[str, Any]]:
    rows = []
    cluster = Cluster(1)
    try:
        for make in (copy, identity, switch):
            for count in SIZES:
                with Job(plan(make, count), Identity(), Training(nn.Module, optimizer), cluster=cluster) as job:
                    seconds = min(job.step((torch.ones(1), torch.ones(1))).seconds for _ in range(steps))
                rows.append(
                    {
                        "what": make.__name__,
                        "instructions": count,
                        "us_per_instruction": round(1e6 * seconds / count, 2),
                        "ms_per_step": round(1e3 * seconds, 3),
                    }
                )
    finally:
        cluster.close()
    return rows


def main() -> None:
    chosen = options(__doc__, steps=30).parse_args()
    show(measure(chosen.steps), chosen.json)


if __name__ == "__main__":
    main()
