"""A plan in simulated time: the same as its order with unit costs, and what shares a link takes longer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from piperlang import pipeline
from piperlang.diagnostics import PiperError
from piperlang.pipeline import representative
from piperlang.plan.estimate.machine import Interconnect, Machine
from piperlang.plan.instructions import Collective, Compute, Instruction, Receive, Send
from piperlang.plan.plan import DevicePlan
from piperlang.simulate.costs import COMPUTE, NOTHING, InstructionCost, MachineCosts
from piperlang.simulate.execute import SimulatedStep, execute
from piperlang.simulate.machine_files import load, names
from piperlang.simulate.result import as_json, segments, simulated, text
from piperlang.simulate.sharing import Sharing, undisturbed
from piperlang.simulate.timeline import Timeline, measure
from piperlang.simulate.unit import UNIT, simulate
from tests.support.chain import planned
from tests.support.schedules import SCHEDULES


class Units(MachineCosts):
    """Passes take units, all else nothing."""

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        if isinstance(x, Compute) and "part" not in dict(self.plan.nodes[x.node].tags):
            return InstructionCost(float(UNIT.passes[x.op]))
        return NOTHING

    def message(self, source: int, target: int, size: float) -> InstructionCost:
        return NOTHING

    def sending(self, device: DevicePlan, x: Send) -> float:
        return 0.0

    def host(self, x: Instruction) -> float:
        return 0.0


@pytest.mark.parametrize("rendezvous", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_takes_what_its_order_takes(name: str, rendezvous: bool) -> None:
    one, ranks, micro = SCHEDULES[name], 4, 8
    script = one.script(ranks, micro)
    graph, plan = planned(one.stage_count(ranks, 2), micro, script)
    found = execute(plan, Units(plan, graph, Machine(rendezvous=rendezvous)))
    ideal = simulate(one.lanes(ranks, micro))
    assert found.timeline.length == pytest.approx(ideal.length)
    assert found.timeline.idle_share() == pytest.approx(ideal.idle_share())
    # The critical path has no gaps: it is as long as the step.
    assert sum(part.seconds for part in segments(found)) == pytest.approx(ideal.length)
    assert all(part.what != "host" for part in segments(found))


# ------------------------------------------------------------------------------------------------------- sharing

TWO = """from std.data import ddp
mesh gpu = dp: 2
place [stage=*] on gpu
ddp(gpu.dp, bucket={bucket})
split batch into 1 as mb
{streams}
"""
LINK = Machine(flops={"float32": 1e6}, memory_bandwidth=1e12, launch=0.0, node=Interconnect(1e3, 0.0), rendezvous=True)


def reductions(found: SimulatedStep) -> list[tuple[float, float]]:
    return [(one.start + one.waited, one.end) for one in found.timeline.ran if one.what.op == "reduce" and one.row == 0]


def test_transfers_on_two_streams_share_the_link() -> None:
    """On one stream they run one after the other. On two they run at once, each at half the rate, and both end when the
    link has carried all. Stages that the script names one by one have reductions of their own on one stream, too."""
    some = {}
    for name, streams in (
        ("one", 'stream [comm=all_reduce, stage=0] on "comm"'),
        ("two", 'stream [comm=all_reduce, stage=0] on "first"\nstream [comm=all_reduce, stage=1] on "second"'),
    ):
        graph, plan = planned(2, 2, TWO.format(bucket="1KB", streams=streams))
        some[name] = execute(plan, MachineCosts(plan, graph, LINK))
    one, two = reductions(some["one"]), reductions(some["two"])
    assert len(one) == len(two)
    alone = [end - start for start, end in one]
    assert sum(alone) == pytest.approx(measure(one))  # never at once
    overlapping = [end - start for start, end in two]
    assert measure(two) > sum(alone) * 1.2
    assert max(end for _, end in two) == pytest.approx(max(end for _, end in one), rel=0.02)
    assert any(later > before * 1.5 for later, before in zip(sorted(overlapping), sorted(alone), strict=True))


def test_messages_wait_for_their_receiver_where_they_must() -> None:
    """A device that is busy receives a buffered message at once, and another one only when it has time for it."""
    script = "mesh gpu = pp: 2\nplace [stage=0] on gpu[pp=0]\nplace [stage=1] on gpu[pp=1]\nsplit batch into 4 as mb\n"
    graph, plan = planned(2, 4, script)
    machine = replace(LINK, node=Interconnect(1e4, 0.0))
    ends = {}
    for rendezvous in (True, False):
        found = execute(plan, MachineCosts(plan, graph, replace(machine, rendezvous=rendezvous)))
        sends = [one for one in found.timeline.ran if one.what.op == "send" and one.row == 0]
        ends[rendezvous] = [one.end - one.start for one in sends]
        pairs = found.timeline.messages
        assert len(pairs) == len([one for one in found.timeline.ran if one.what.op == "recv"])
        assert all(sender.start <= receiver.end for sender, receiver in pairs)
    assert all(taken > 0 for taken in ends[True])
    assert not any(ends[False])


# ------------------------------------------------------------------------------------------------ shared devices

PIPELINE_OF_FOUR = """from std.pipeline import loop, one_f_one_b
mesh gpu = pp: 4
loop(gpu, 4)
split batch into 4 as mb
one_f_one_b(gpu, 4, 4)
"""
REPLICAS = """from std.data import ddp
mesh gpu = dp: 4
place [stage=*] on gpu
ddp(gpu.dp)
split batch into 2 as mb
"""
SECONDS = {"F": 1.0, "B": 2.5}


class PassesOnly(Units):
    """Passes take what SECONDS says, all else nothing."""

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        return InstructionCost(0.0, SECONDS[x.op], COMPUTE) if isinstance(x, Compute) else NOTHING


@pytest.mark.parametrize("sharing", [Sharing(), Sharing(1), Sharing(2), Sharing(1, 2), Sharing(1, 3)])
def test_passes_are_known_from_a_step_that_shares(sharing: Sharing) -> None:
    """Whatever disturbs them, and however long they took: what they would have taken alone comes out."""
    graph, plan = planned(4, 4, PIPELINE_OF_FOUR)
    machine = Machine(launch=0.0, shared_devices=sharing.devices, side_by_side=sharing.side_by_side)
    found = execute(plan, PassesOnly(plan, graph, machine))
    instructions = [device.instructions for device in plan.devices]
    places = [(row, i) for row, its in enumerate(instructions) for i in range(len(its))]
    ran = {
        place: one
        for place, one in zip(places, found.timeline.ran, strict=True)
        if not isinstance(instructions[place[0]][place[1]], Send | Receive | Collective)
    }
    taken = undisturbed(ran, sharing)
    passes = {place: instructions[place[0]][place[1]].op for place in ran}
    assert {place: taken[place] for place, op in passes.items() if op in SECONDS} == pytest.approx(
        {place: SECONDS[op] for place, op in passes.items() if op in SECONDS}
    )
    stretched = any(ran[place].end - ran[place].start > 1.01 * taken[place] for place in ran if taken[place])
    assert stretched == bool(sharing.devices)


@pytest.mark.parametrize(
    ("sharing", "times"), [((0, 1), 1.0), ((1, 1), 4.0), ((2, 1), 2.0), ((1, 4), 1.0), ((1, 3), 4 / 3)]
)
def test_replicas_on_shared_devices(sharing: tuple[int, int], times: float) -> None:
    """All ranks compute at once, so a step takes longer by as much as a device has more than it can run."""
    graph, plan = planned(4, 8, REPLICAS)
    machine = Machine(launch=0.0, shared_devices=sharing[0], side_by_side=sharing[1])
    costs = PassesOnly(plan, graph, machine)
    every = [(device.device,) for device in plan.devices]
    alone = sum(SECONDS[x.op] for x in plan.devices[0].instructions if isinstance(x, Compute))
    assert execute(plan, costs, every).timeline.length == pytest.approx(times * alone)


def test_of_devices_with_the_same_peak_the_lowest_is_named() -> None:
    peaks = {row: [(0.0, size)] for row, size in enumerate((4.0, 5.0, 5.0))}
    found = as_json(SimulatedStep(Timeline([(0,), (3, 4), (1, 2)], [], 1.0, memory=peaks), ()))
    assert found["memory"] == {"peak": 5.0, "device": 1, "of": None}


# ------------------------------------------------------------------------------------------------------ machines


@pytest.mark.parametrize("name", names())
def test_machines(name: str) -> None:
    machine = load(name)
    graph, plan = planned(2, 4, TWO.format(bucket="1KB", streams=""))
    found = simulated(plan, graph, MachineCosts(plan, graph, machine))
    data = as_json(found, machine.memory)
    assert 0 < data["seconds"] < 1
    assert 0 < data["idle"]["mean"] < 1
    assert data["memory"]["peak"] > 0
    assert sum(part["seconds"] for part in data["critical_path"]) == pytest.approx(data["seconds"])
    assert machine.name in text(found, machine.name, machine.memory)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("flops = 3", "`flops` is a rate for each dtype"),
        ("speed = 3", "unknown field `speed`"),
        ("launch = -1", "`launch` is -1, and must be at least 0"),
        ("memory_bandwidth = 0", "must be more than 0"),
        ("memory_bandwidth = nan", "must be a number"),
        ("rendezvous = 1", "`rendezvous` must be true or false"),
        ("[node]\nbandwidth = 1", "`node.latency` must be a number"),
        ("= 3", "it is no TOML"),
        ("", "it has no `flops`"),
        ("devices_per_node = 1.5", "must be a whole number"),
    ],
)
def test_a_file_that_describes_no_machine(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(PiperError) as caught:
        load(str(path))
    (found,) = caught.value.diagnostics
    assert said in found.notes[0]


def test_a_machine_that_nobody_knows() -> None:
    with pytest.raises(PiperError) as caught:
        load("h10")
    assert "use `h100`" in caught.value.diagnostics[0].helps[0]


# ------------------------------------------------------------------------------------------- devices that do the same

MANY = {
    "pipeline with data": """from std.data import ddp
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: 2, dp: 4
loop(gpu, 2)
split batch into 4 as mb
ddp(gpu.dp)
one_f_one_b(gpu, 2, 4)
""",
    "ZeRO-3": """from std.data import zero3
from std.pipeline import loop, one_f_one_b
mesh gpu = pp: 2, dp: 4
loop(gpu, 2)
split batch into 2 as mb
zero3(gpu.dp)
one_f_one_b(gpu, 2, 2)
""",
    "stages of different widths": """from std.data import ddp
mesh gpu = all: 6
place [stage=0] on gpu[all=0:4]
place [stage=1] on gpu[all=4:6]
split batch into 2 as mb
replicate [pass=*] over gpu.all
""",
}


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", MANY)
def test_one_of_the_devices_that_do_the_same_is_enough(name: str, max_norm: float | None) -> None:
    graph = planned(2, 16, MANY[name])[0]
    plan = pipeline.planned(graph, max_norm)
    machine = replace(LINK, devices_per_node=2, network=Interconnect(5e2, 1e-3))
    some, classes = representative(graph, max_norm)
    assert len(some.devices) == len(classes) < len(plan.devices)
    whole = simulated(plan, graph, MachineCosts(plan, graph, machine)).timeline
    part = simulated(some, graph, MachineCosts(some, graph, machine), classes).timeline
    assert part.length == pytest.approx(whole.length, rel=0.02)
    assert part.idle_share() == pytest.approx(whole.idle_share(), rel=0.05)
    assert sum(map(len, part.rows)) == len(whole.rows)
    # All devices take part in the norm, those that are not simulated, too.
    norms = [{one.what.bytes for one in its.ran if one.what.op == "norm"} for its in (whole, part)]
    assert norms[0] == norms[1]
    assert bool(norms[0]) == (max_norm is not None)
