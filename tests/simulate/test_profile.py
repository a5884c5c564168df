"""Profiles: a step that is simulated with the times of recorded ones is as long as they were."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from piperlang.ir.graph import Graph
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.instructions import Compute, Instruction, Send
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.simulate import measured
from piperlang.simulate.costs import NOTHING, InstructionCost, MachineCosts
from piperlang.simulate.execute import execute
from piperlang.simulate.measured import MeasuredCosts
from piperlang.simulate.profile import Profile, profile_of
from piperlang.simulate.result import as_json, simulated
from piperlang.simulate.sharing import Sharing
from piperlang.simulate.timeline import Place, RecordedStep
from tests.support.chain import planned
from tests.support.schedules import SCHEDULES

LATE = 0.2
"""Seconds from when an instruction could begin until it does."""
MACHINE = Machine(rendezvous=False)


class Jittery(MachineCosts):
    """Passes take between one and two seconds."""

    def __init__(self, plan: Plan, graph: Graph, seed: int, late: float) -> None:
        super().__init__(plan, graph, MACHINE)
        self.random, self.late = random.Random(seed), late

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        return InstructionCost(self.late + self.random.uniform(1, 2)) if isinstance(x, Compute) else NOTHING

    def message(self, source: int, target: int, size: float) -> InstructionCost:
        return InstructionCost(0.01)

    def sending(self, device: DevicePlan, x: Send) -> float:
        return 0.0

    def host(self, x: Instruction) -> float:
        return 0.0


def recorded(plan: Plan, graph: Graph, seed: int, late: float = 0.0) -> RecordedStep:
    """A step whose passes begin `late`, but for the first one, which waits for nothing: in the record that is no part
    of them."""
    timeline = execute(plan, Jittery(plan, graph, seed, late)).timeline
    places = [(row, i) for row, device in enumerate(plan.devices) for i in range(len(device.instructions))]
    ran: dict[Place, object] = {}
    same = {}
    for place, one in zip(places, timeline.ran, strict=True):
        x = plan.devices[place[0]].instructions[place[1]]
        new = replace(one, start=one.start + late) if isinstance(x, Compute) and one.start > 0 else one
        ran[place] = same[id(one)] = new
    messages = [(same[id(sender)], same[id(receiver)]) for sender, receiver in timeline.messages]
    return RecordedStep(replace(timeline, ran=list(same.values()), messages=messages), ran)  # type: ignore[arg-type]


def profile(plan: Plan, graph: Graph, steps: list[RecordedStep]) -> Profile:
    return profile_of(plan, graph, steps, {}, 0.0, 0.0, False, Sharing(), {})


@pytest.mark.parametrize("late", [0.0, LATE])
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zbv"])
def test_a_step_is_as_long_as_those_that_were_recorded(name: str, late: float) -> None:
    one = SCHEDULES[name]
    graph, plan = planned(one.stage_count(4, 2), 8, one.script(4, 8))
    steps = [recorded(plan, graph, seed, late) for seed in range(12)]
    lengths = [step.timeline.length for step in steps]
    assert max(lengths) > 1.02 * min(lengths)
    costs = MeasuredCosts(plan, graph, profile(plan, graph, steps), MACHINE)
    found = simulated(plan, graph, costs)
    assert not costs.unknown
    assert found.lengths == pytest.approx(lengths, rel=1e-9)
    assert found.seconds == pytest.approx(sum(lengths) / len(lengths), rel=1e-9)
    assert min(abs(length - found.seconds) for length in lengths) == pytest.approx(
        abs(found.timeline.length - found.seconds), rel=1e-6
    )
    assert as_json(found)["range"] == pytest.approx([min(lengths), max(lengths)])


def test_a_step_of_means_would_be_too_short() -> None:
    """Nobody waits for a slow pass there."""
    one = SCHEDULES["one_f_one_b"]
    graph, plan = planned(one.stage_count(4, 2), 8, one.script(4, 8))
    costs = MeasuredCosts(
        plan, graph, profile(plan, graph, [recorded(plan, graph, seed) for seed in range(12)]), MACHINE
    )
    assert execute(plan, costs).timeline.length < 0.98 * simulated(plan, graph, costs).seconds


def test_of_a_large_plan_fewer_steps_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SCHEDULES["one_f_one_b"]
    graph, plan = planned(one.stage_count(4, 2), 8, one.script(4, 8))
    found = profile(plan, graph, [recorded(plan, graph, seed) for seed in range(12)])
    size = sum(len(device.instructions) for device in plan.devices)
    for most, steps in ((3 * size, [0, 4, 8]), (size, [None]), (100 * size, list(range(12)))):
        monkeypatch.setattr(measured, "MOST", most)
        assert [each.step for each in MeasuredCosts(plan, graph, found, MACHINE).drawn()] == steps
