"""Which stream communication is on can be seen: one for all, one each, and gradients in one bucket."""

from __future__ import annotations

import importlib.util
from functools import cache

import pytest

from piperlang.capture.program import Program, capture
from piperlang.pipeline import planned, schedule
from piperlang.plan.estimate.machine import Interconnect, Machine
from piperlang.simulate.costs import MachineCosts
from piperlang.simulate.execute import execute
from piperlang.simulate.timeline import Ran, Timeline
from piperlang.source import Source
from tests.support import ROOT

SLOW = Machine(
    name="slow links",
    flops={"float32": 4e10},
    memory_bandwidth=1e11,
    launch=0.0,
    node=Interconnect(20e6, 1e-6),
    network=Interconnect(20e6, 1e-6),
)
SCRIPT = """
mesh gpu = dp: 2
place [stage=*] on gpu
replicate [!expert] over gpu.dp with bucket={bucket}
shard [expert=*] over gpu.dp with style=experts
stream [comm=all_to_all] on "{tokens}"
stream [comm=all_reduce] on "{gradients}"
"""


@cache
def program() -> Program:
    spec = importlib.util.spec_from_file_location("moe_example", ROOT / "examples" / "03_moe" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return capture(module.model, module.loss, next(iter(module.data())))


@cache
def drawn(bucket: str, tokens: str, gradients: str) -> Timeline:
    found = schedule(program(), Source("s.piper", SCRIPT.format(bucket=bucket, tokens=tokens, gradients=gradients)))
    assert not found.problems, found.problems
    graph = found.graph()
    plan = planned(graph)
    return execute(plan, MachineCosts(plan, graph, SLOW)).timeline


def of(timeline: Timeline, op: str) -> list[Ran]:
    return [one for one in timeline.of_row()[0] if one.what.op == op]


def overlaps(timeline: Timeline) -> list[tuple[Ran, Ran]]:
    return [
        (one, other)
        for one in of(timeline, "all_to_all")
        for other in of(timeline, "reduce")
        if one.start < other.end and other.start < one.end
    ]


def test_one_stream_two_streams_and_a_bucket() -> None:
    one = drawn("2KB", "comm", "comm")
    two = drawn("2KB", "tokens", "gradients")
    bucketed = drawn("25MB", "tokens", "gradients")
    assert len({round(found.length, 9) for found in (one, two, bucketed)}) == 3
    # One stream: one after the other. Two: side by side, and what shares a link takes longer for it.
    assert not overlaps(one)
    assert overlaps(two)
    alone = [found.end - found.start for found in of(one, "all_to_all")]
    shared = {found for found, _ in overlaps(two)}
    for found, before in zip(of(two, "all_to_all"), alone, strict=True):
        took = found.end - found.start
        assert took > 1.02 * before if found in shared else took == pytest.approx(before)
    # Buckets: fewer all-reduces, of the same bytes.
    assert len(of(bucketed, "reduce")) == 4
    assert len(of(two, "reduce")) > 8
    sent = [sum(found.what.bytes for found in of(timeline, "reduce")) for timeline in (one, two, bucketed)]
    assert sent == pytest.approx([sent[0]] * 3)


def test_all_do_the_same_work() -> None:
    busy = [
        sum(found.end - found.start for found in drawn(*words).of_row()[0] if found.what.computes)
        for words in (("2KB", "comm", "comm"), ("2KB", "tokens", "gradients"), ("25MB", "tokens", "gradients"))
    ]
    assert busy == pytest.approx([busy[0]] * 3)
