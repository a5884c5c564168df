"""What instructions take, from a profile: times that were measured on workers (profile.py)."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from piperlang.diagnostics import error
from piperlang.ir.graph import Graph
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.instructions import Collective, Compute, Instruction, Send
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.simulate.costs import COMPUTE, InstructionCost, MachineCosts
from piperlang.simulate.profile import AT, MESSAGE, Keys, Profile

MOST = 500_000
"""Instructions that are simulated, of all steps together: more than that only of one."""


class MeasuredCosts:
    """What instructions took when they were measured; what was not, from what is most like it.

    A pass takes a little longer in one step than in the next, and a device that waits for two others waits for the
    slower one: steps are longer than one in which every pass takes its mean. So a step is simulated with the times of
    each recorded one (`drawn`)."""

    step: int | None = None
    """The recorded step that passes take their times from; None: from the means of all."""

    def __init__(self, plan: Plan, graph: Graph, found: Profile, machine: Machine) -> None:
        """`machine`: for kinds of instructions of which nothing at all was measured."""
        self.plan, self.graph, self.profile = plan, graph, found
        self.keys = Keys(plan, graph)
        self._passes = [self.keys.of_pass(number) for number in range(len(plan.programs))]
        """What they are called, by program."""
        self.machine = replace(
            machine,
            rendezvous=found.rendezvous,
            side_by_side=found.side_by_side,
            shared_devices=found.shared_devices,
            host=max(found.issued.values(), default=0.0),
        )
        self.before, self.after = found.before, found.after
        self.guess = MachineCosts(plan, graph, machine)
        self.unknown: set[str] = set()
        """What was not measured."""
        self.means = found.means()
        self._means: dict[int, float] = {}
        self._nth = self._numbered()
        self._faster = self._calibrated()
        known = {key.rpartition(AT)[0] for key in found.passes}
        if not any(key.rpartition(AT)[0] in known for key in self._passes):
            raise error(
                "P0902",
                "the profile has no pass of this model under this schedule",
                notes=[f"it was measured with {found.about.get('model')} under {found.about.get('script')}"],
                help="measure one of its own with `piperc profile`",
            )

    def drawn(self) -> Sequence[MeasuredCosts]:
        """Those of each recorded step, or of some that are evenly apart if the plan is large."""
        if not any(key in self.profile.passes for key in self._passes):
            return [self]  # estimates, which are the same in every step
        count = min(self.profile.steps, MOST // max(1, sum(len(device.instructions) for device in self.plan.devices)))
        if count < 2:
            return [self]
        return [self._of_step(k * self.profile.steps // count) for k in range(count)]

    def _of_step(self, step: int) -> MeasuredCosts:
        made = copy.copy(self)
        made.step = step
        return made

    def _numbered(self) -> dict[int, int]:
        """How many passes of the same kind come before each, by the id of its instruction."""
        count: Counter[str] = Counter()
        found = {}
        for x in (x for device in self.plan.devices for x in device.instructions if isinstance(x, Compute)):
            key = self._passes[x.program]
            found[id(x)] = count[key]
            count[key] += 1
        return found

    def host(self, x: Instruction) -> float:
        return self.profile.issued.get(x.op, 0.0)

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        if isinstance(x, Compute):
            return InstructionCost(0.0, self._seconds(x), COMPUTE)
        if isinstance(x, Collective):
            cost = self.guess.cost(device, x)
            seconds = self._transfer(self.keys.of_transfer(x), self.guess.sent.of(device, x))
            return cost if seconds is None else InstructionCost(0.0, seconds, cost.of or "node")
        key = self.keys.of_local(device, x)
        if key in self.profile.local:
            seconds = self.profile.local[key]
            return InstructionCost(0.0, seconds, COMPUTE) if self.machine.shared_devices else InstructionCost(seconds)
        self.unknown.add(key)
        return self.guess.cost(device, x)

    def sending(self, device: DevicePlan, x: Send) -> float:
        return self.profile.local.get(self.keys.of_local(device, x), self.machine.launch)

    def message(self, source: int, target: int, size: float) -> InstructionCost:
        guess = self.guess.message(source, target, size)
        seconds = self._transfer(MESSAGE, size)
        return guess if seconds is None else InstructionCost(0.0, seconds, guess.of)

    def _seconds(self, x: Compute) -> float:
        times = self.profile.passes.get(self._passes[x.program])
        if times is not None and self.step is not None:
            its = times[self.step]
            return its[self._nth[id(x)] % len(its)]
        if x.program not in self._means:
            self._means[x.program] = self._mean(x.program)
        return self._means[x.program]

    def _mean(self, program: int) -> float:
        key = self._passes[program]
        known = self.means.get(key)
        if known is None:
            self.unknown.add(key)
            known = self._of_other_samples(key)
        if known is None:
            guess = self.guess.of_pass(program)
            known = (guess.alone + guess.shared) * self._faster
        return known

    def _of_other_samples(self, key: str) -> float | None:
        """The same pass of another number of samples: more take longer, but none less than the shortest pass."""
        what, _, count = key.rpartition(AT)
        others = {
            int(samples): seconds
            for (name, _, samples), seconds in ((one.rpartition(AT), s) for one, s in self.means.items())
            if name == what
        }
        if not others:
            return None
        near = min(others, key=lambda samples: abs(samples - int(count)))
        least = min(self.means.values())
        return least + (others[near] - least) * int(count) / near

    def _calibrated(self) -> float:
        """How much longer passes took than the machine's description says, where both are known."""
        took = said = 0.0
        for number in range(len(self.plan.programs)):
            known = self.means.get(self._passes[number])
            if known is not None:
                guess = self.guess.of_pass(number)
                took, said = took + known, said + guess.alone + guess.shared
        return took / said if said else 1.0

    def _transfer(self, key: str, size: float) -> float | None:
        """Between sizes that were measured, a straight line; beyond them, the rate of the largest."""
        rows = self.profile.transfers.get(key)
        if not rows:
            self.unknown.add(key)
            return None
        at = bisect_left(rows, (size, 0.0))
        if at < len(rows) and rows[at][0] == size:
            return rows[at][1]
        if at == len(rows):
            return rows[-1][1] * size / rows[-1][0] if rows[-1][0] else rows[-1][1]
        if at == 0:
            return rows[0][1]
        (low, first), (high, second) = rows[at - 1], rows[at]
        return first + (second - first) * (size - low) / (high - low)
