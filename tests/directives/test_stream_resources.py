"""Resources of streams: what a script gives, what is refused, and what reaches the communicators and CUDA streams."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piperlang.core.streams import DEFAULT, StreamResources
from piperlang.diagnostics import Diagnostic, PiperError
from piperlang.pipeline import outline, schedule
from piperlang.plan import files
from piperlang.plan.estimate.summary import as_json, summary
from piperlang.plan.instructions import SYNC
from piperlang.plan.lower import lower
from piperlang.plan.plan import Group, Pair, Plan
from piperlang.plan.text import text
from piperlang.plan.verify import check
from piperlang.runtime.driver.job import WorkerInputs
from piperlang.source import Source
from tests.support.equivalence import program
from tests.support.job_schedules import JOB_SCHEDULES
from tests.support.plan_runs import planned, right_plan

MESH = """mesh gpu = pp: 2, dp: 2
place [stage=0:2] on gpu[pp=0]
place [stage=2:4] on gpu[pp=1]
split batch into 2 as mb
replicate [pass=*] over gpu.dp with grads=sharded
"""
EIGHT = StreamResources(high_priority=True, ctas=8)


def refused(lines: str) -> Diagnostic:
    (problem,) = schedule(program("mlp"), Source("s.piper", MESH + lines)).problems
    assert (problem.code, problem.span is not None, len(problem.helps)) == ("P0405", True, 1)
    return problem


def plan_of(lines: str) -> Plan:
    found = schedule(program("mlp"), Source("s.piper", MESH + lines))
    assert not found.problems
    return right_plan(found.graph())


def test_a_stream_has_the_resources_of_all_its_lines() -> None:
    plan = plan_of(
        'stream [comm=p2p, pass=F] on "x" with priority=high\nstream [comm=p2p, pass=B] on "x" with ctas=8\n'
        'stream [comm=reduce_scatter] on "x" with ctas=8\nstream [pass=F] on "compute" with priority=normal\n'
    )
    assert plan.resources("x") == plan.resources("x>") == plan.resources("x<0") == EIGHT
    assert plan.resources("compute") == StreamResources(high_priority=False)
    assert plan.resources("comm") == DEFAULT
    assert plan.streams.keys() == {
        x.stream for device in plan.devices for x in device.instructions if x.stream[0] == "x" or x.stream == "compute"
    }
    assert {group.stream: plan.resources(group.stream) for group in plan.groups} == {"x": EIGHT, "comm": DEFAULT}


def test_a_group_on_two_streams_is_two_communicators() -> None:
    plan = plan_of('stream [comm=reduce_scatter, stage=0:2] on "a" with ctas=4\n')
    assert {Group((0, 1), "a"), Group((0, 1), "comm")} <= set(plan.groups)
    assert [plan.resources(stream).ctas for stream in ("a", "comm")] == [4, None]


def test_devices_have_a_communicator_for_each_kind_of_their_messages() -> None:
    """The messages without data, which a chain of an order asks for, stay on their own stream."""
    graph, captured, plan = planned(*JOB_SCHEDULES["ranks wait for each other"])
    assert graph.streams == {"pp": EIGHT}
    assert SYNC not in "".join(plan.streams)
    assert WorkerInputs(plan, captured).pairs() == [Pair(0, 1, EIGHT), Pair(1, 0, DEFAULT), Pair(1, 0, EIGHT)]


def test_shown_and_saved() -> None:
    line = 'stream [comm=p2p] on "pp" with priority=high, ctas=8\n'
    with_resources, without = plan_of(line), plan_of('stream [comm=p2p] on "pp"\n')
    shown = text(with_resources).splitlines()
    assert "stream pp>: priority=high, ctas=8" in shown
    assert "stream pp<1: priority=high, ctas=8" in shown
    assert [one for one in shown if not one.startswith("stream ")] == text(without).splitlines()
    assert files.digest(with_resources) != files.digest(without)
    assert files.load(files.dump(with_resources)).streams == with_resources.streams != {}
    graph = schedule(program("mlp"), Source("s.piper", MESH + line)).graph()
    assert "streams  pp           priority=high, ctas=8" in summary(with_resources, graph).splitlines()
    assert as_json(with_resources, graph)["streams"] == {"pp": {"high_priority": True, "ctas": 8}}


def test_two_values_of_one_stream() -> None:
    lines = 'stream [comm=p2p] on "x" with ctas=8\nstream [comm=reduce_scatter] on "x" with ctas=4\n'
    found = refused(lines)
    assert found.message == 'stream "x" has `ctas=8`, and `ctas=4` here'
    assert found.span is not None
    assert [found.span.first.line, *(label.span.first.line for label in found.also)] == [7, 6]
    assert [one.message for one in outline(Source("s.piper", MESH + lines)).problems] == [found.message]


def test_two_calls_of_the_library_that_contradict_each_other() -> None:
    script = (
        'from std.expert import overlapped\nmesh gpu = ep: 2\noverlapped(gpu.ep, [stage=0], "high")\n'
        'overlapped(gpu.ep, [stage=1], "normal")\n'
    )
    (found,) = (one.seen_by_user() for one in outline(Source("s.piper", script)).problems)
    assert found.span is not None
    assert found.span.first.line == 4
    assert 3 in [label.span.first.line for label in found.also if not label.span.source.library]


def test_two_calls_of_a_function_that_contradict_each_other() -> None:
    lines = 'def f(p):\n    stream [comm=p2p] on "x" with priority=p\n\nf("high")\nf("normal")\n'
    found = refused(lines)
    assert [label.span.text for label in found.also] == ['f("high")']
    again = refused('for p in ["high", "normal"]: stream [comm=p2p] on "x" with priority=p\n')
    assert not again.also  # the same place


@pytest.mark.parametrize(
    ("value", "help"), [("0", "ctas=8"), ("33", "ctas=8"), ("-1", "ctas=8"), ("4.0", "ctas=4"), ('"16"', "ctas=16")]
)
def test_a_number_of_thread_blocks_is_in_its_range(value: str, help: str) -> None:
    found = refused(f'stream [comm=p2p] on "x" with ctas={value}\n')
    assert found.message == "`ctas` must be an integer from 1 to 32"
    assert found.helps == (help,)


def test_a_name_that_cannot_be_shown() -> None:
    (found,) = outline(Source("s.piper", MESH + 'stream [comm=p2p] on "a\\nb"\n')).problems
    assert (found.code, found.message) == ("P0204", "the name of a stream has characters that cannot be shown")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('stream [pass=F] on "x" with ctas=8\n', 'stream "x" has `ctas=8` and no communication'),
        (
            'stream [comm=p2p] on "x" with ctas=8\nstream [comm=p2p] on "y"\n',
            'stream "x" has `ctas=8` and no communication',
        ),
        (
            'stream [comm=p2p, stage=1] on "x" with ctas=8\n',
            'the ends of a transfer are on streams "x" and "comm", with different resources',
        ),
        (
            'stream [comm=recv, mb=1] on "x" with priority=high\n',
            'the ends of a transfer are on streams "comm" and "x", with different resources',
        ),
    ],
)
def test_resources_that_cannot_be_used(lines: str, message: str) -> None:
    found = refused(lines)
    assert found.message == message
    assert found.span is not None
    assert found.span.first.line == 6


def test_later_lines_may_bring_the_communication() -> None:
    """Both are looked at when the script has ended."""
    plan = plan_of('stream [pass=W] on "x" with ctas=8\nstream [comm=p2p, stage=1] on "x"\nstream [comm=p2p] on "x"\n')
    assert plan.resources("x>").ctas == 8


def test_damaged_plans() -> None:
    plan = plan_of('stream [comm=p2p] on "pp" with ctas=8\n')
    for streams, why in (
        ({**plan.streams, "pp>": StreamResources(ctas=0)}, "stream pp> has 0 thread blocks, and may have 1 to 32"),
        ({"pp>": plan.streams["pp>"]}, "the ends of a message have streams with different resources"),
    ):
        with pytest.raises(PiperError, match=why):
            check(replace(plan, streams=streams), buffered=False)


@pytest.mark.parametrize("call", ["ep", "overlapped"])
def test_the_library_gives_its_streams_resources(call: str) -> None:
    script = (
        f"from std.expert import {call}\nfrom std.data import ddp\nmesh gpu = ep: 2\nplace [pass=*] on gpu\n"
        f'ddp(gpu.ep, [!expert])\n{call}(gpu.ep, priority="high", ctas=8)\n'
    )
    found = schedule(program("moe"), Source("s.piper", script))
    assert not found.problems
    plan = lower(found.graph())
    names = {"ep": ["ep"], "overlapped": ["ep.backward", "ep.forward"]}[call]
    assert plan.streams == dict.fromkeys(names, EIGHT)
