"""Times that were measured on workers, as data: saved, and used to simulate the same model under other schedules.

Passes are known by what they compute, not by where they are in a plan: the tags of their chunk, its size and work, the
number of samples and how weights are divided. Communication is known by its kind, its bytes and the number of
devices."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.diagnostics.printable import printable
from piperlang.ir.graph import Graph
from piperlang.plan.codec import InvalidRecord, reader
from piperlang.plan.estimate.machine import Machine
from piperlang.plan.estimate.summary import SentBytes
from piperlang.plan.instructions import Collective, Compute, Instruction, Receive, Send, Update
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.simulate.costs import COMPUTE, InstructionCost, MachineCosts
from piperlang.simulate.sharing import Sharing, undisturbed
from piperlang.simulate.timeline import RecordedStep

FORMAT, VERSION = "piperlang profile", 2
LONGEST = 1e6
"""Seconds that an instruction may have taken."""
AT = ", samples: "
"""Before the number of samples, at the end of what a pass is called."""
MESSAGE = "message"
"""What a transfer between two devices is called among the kinds of communication."""


@dataclass
class Profile:
    passes: dict[str, float] = field(default_factory=dict)
    """Seconds of a pass."""
    local: dict[str, float] = field(default_factory=dict)
    """Of updates and copies, by kind and elements or bytes."""
    transfers: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By kind and number of devices: (bytes, seconds), by bytes."""
    issued: dict[str, float] = field(default_factory=dict)
    """Seconds that the host needs to issue an instruction, by kind; empty where it runs them itself."""
    before: float = 0.0
    """Seconds of a step before its first instruction."""
    after: float = 0.0
    rendezvous: bool = False
    side_by_side: int = 1
    shared_devices: int = 0
    """How many devices the ranks shared, in turn, and how many passes run at full speed at once on each. Times of
    passes are those without others beside them."""
    about: dict[str, Any] = field(default_factory=dict)
    """What was measured, where, and with which versions."""

    def dump(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **vars(self)}, indent=1)


def load(path: Path) -> Profile:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise unreadable(path, problem) from None
    except (ValueError, RecursionError) as problem:
        raise _unusable(path, f"it is no JSON: {problem}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _unusable(path, f'a profile says `"format": "{FORMAT}"`')
    if data.get("version") != VERSION:
        raise _unusable(path, f"it is of version {data.get('version')}, and this piperlang reads version {VERSION}")
    try:
        found: Profile = reader(Profile)(
            {key: value for key, value in data.items() if key not in ("format", "version")}
        )
    except InvalidRecord as problem:
        raise _unusable(path, str(problem)) from None
    rows = [row for its in found.transfers.values() for row in its]
    times = [*found.passes.values(), *found.local.values(), *found.issued.values(), found.before, found.after]
    if not found.passes:
        raise _unusable(path, "`passes` is empty: nothing was measured")
    empty = next((kind for kind, its in found.transfers.items() if not its), None)
    if empty is not None:
        raise _unusable(path, f"`transfers` has no times of `{empty}`")
    if found.side_by_side < 1:
        raise _unusable(path, f"`side_by_side` is {found.side_by_side}, and must be at least 1")
    if found.shared_devices < 0:
        raise _unusable(path, f"`shared_devices` is {found.shared_devices}, and must be at least 0")
    if not all(isfinite(number) and 0 <= number <= LONGEST for number in (*times, *(one for _, one in rows))):
        raise _unusable(path, f"a time is not between 0 and {LONGEST:g} s")
    if not all(isfinite(size) and size >= 0 for size, _ in rows):
        raise _unusable(path, "a number of bytes is negative")
    about = {name: printable(value) if isinstance(value, str) else value for name, value in found.about.items()}
    return replace(found, about=about)


def _unusable(path: Path, why: str) -> PiperError:
    return error("P0505", f"{path} cannot be used", notes=[why], help="make it again with `piperc profile`")


# ------------------------------------------------------------------------------------------------------------- keys


class Keys:
    """What instructions of a plan are called in a profile."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan, self.graph = plan, graph
        count: Counter[str] = Counter()
        self.chunks = []
        model = graph.model
        for chunk in model.chunks:
            weights = sum(prod(model.weights[name].shape) for name in chunk.weights)
            outputs = sum(prod(model.tensors[name].shape(1)) for name in chunk.outputs)
            work = f"{chunk.passes['F'].flops / model.samples:.6g} FLOPs"
            size = f"{weights} weights, {outputs} outputs and {work} of a sample"
            self.chunks.append(f"{chunk} #{count[str(chunk)]}, {size}")
            count[str(chunk)] += 1

    def of_pass(self, program: int) -> str:
        """With the size of the stage, and the work of its forward, which is the same on every device: a stage of
        another model is something else."""
        its = self.plan.programs[program]
        divided = "".join(f", {one.style} {one.size}" for one in its.sharding[0])
        again = ", recomputing" if its.op in "BIW" and self.graph.model.chunks[its.chunk].recomputes else ""
        return f"{its.op} of {self.chunks[its.chunk]}{divided}{again}{AT}{its.samples}"

    def of_local(self, device: DevicePlan, x: Instruction) -> str:
        if isinstance(x, Update):
            return f"update of {self._elements(device, x)} elements"
        if isinstance(x, Send):
            return f"send of {sum(prod(one.shape) for one in x.messages)} elements"
        shape = getattr(x, "shape", None)
        return f"{x.op} of {prod(shape)} elements" if shape is not None else x.op

    def _elements(self, device: DevicePlan, x: Update) -> int:
        total = 0
        for one in x.parameters:
            if one.part is not None:
                total += one.part[1] - one.part[0]
            else:
                total += prod(high - low for low, high in device.weights[one.old].box)
        return total

    def of_transfer(self, x: Instruction) -> str:
        if isinstance(x, Collective):
            return f"{x.op} of {len(self.plan.groups[x.group].members)}"
        return MESSAGE


# ---------------------------------------------------------------------------------------------------------- measuring


def profile_of(
    plan: Plan,
    graph: Graph,
    steps: Sequence[RecordedStep],
    issued: Mapping[str, Sequence[float]],
    before: float,
    after: float,
    rendezvous: bool,
    sharing: Sharing,
    about: Mapping[str, Any],
) -> Profile:
    """Of steps in which together every instruction was recorded: of each kind of instruction the mean. A mean, because
    the sum of all is what a step takes."""
    keys, sent = Keys(plan, graph), SentBytes(plan)
    passes, local, transfers = _Means(), _Means(), _Means()
    for step in steps:
        sizes = {id(receiver): sender.what.bytes for sender, receiver in step.timeline.messages}
        computing = undisturbed(
            {
                (row, i): one
                for (row, i), one in step.ran.items()
                if not isinstance(plan.devices[row].instructions[i], Send | Receive | Collective)
            },
            sharing,
        )
        for (row, i), one in step.ran.items():
            device = plan.devices[row]
            x = device.instructions[i]
            seconds = computing.get((row, i), max(0.0, one.end - one.start - one.waited))
            if isinstance(x, Compute):
                passes.add(keys.of_pass(x.program), seconds)
            elif isinstance(x, Collective):
                transfers.add((keys.of_transfer(x), sent.of(device, x)), seconds)
            elif isinstance(x, Receive):
                if id(one) in sizes:
                    transfers.add((MESSAGE, sizes[id(one)]), seconds)
            else:
                local.add(keys.of_local(device, x), seconds)
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, size), seconds in transfers.found().items():
        by_kind[kind].append((size, seconds))
    return Profile(
        passes.found(),
        local.found(),
        {kind: sorted(rows) for kind, rows in by_kind.items()},
        {key: median(values) for key, values in issued.items()},
        before,
        after,
        rendezvous,
        sharing.side_by_side,
        sharing.devices,
        about=dict(about),
    )


def undelayed(lengths: Sequence[float]) -> list[int]:
    """Which of some lengths count: the shortest quarter, since other work on a machine can only make steps longer."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)[: max(1, len(lengths) // 4)]


class _Means:
    def __init__(self) -> None:
        self.values: dict[Any, list[float]] = defaultdict(list)

    def add(self, key: Any, seconds: float) -> None:
        self.values[key].append(seconds)

    def found(self) -> dict[Any, float]:
        return {key: fmean(values) for key, values in self.values.items()}


# ----------------------------------------------------------------------------------------------------------- using


class MeasuredCosts:
    """What instructions took when they were measured; what was not, from what is most like it."""

    def __init__(self, plan: Plan, graph: Graph, found: Profile, machine: Machine) -> None:
        """`machine`: for kinds of instructions of which nothing at all was measured."""
        self.plan, self.graph, self.profile = plan, graph, found
        self.keys = Keys(plan, graph)
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
        self._passes: dict[int, InstructionCost] = {}
        self._faster = self._calibrated()
        known = {key.rpartition(AT)[0] for key in found.passes}
        if not any(self.keys.of_pass(number).rpartition(AT)[0] in known for number in range(len(plan.programs))):
            raise error(
                "P0902",
                "the profile has no pass of this model under this schedule",
                notes=[f"it was measured with {found.about.get('model')} under {found.about.get('script')}"],
                help="measure one of its own with `piperc profile`",
            )

    def host(self, x: Instruction) -> float:
        return self.profile.issued.get(x.op, 0.0)

    def cost(self, device: DevicePlan, x: Instruction) -> InstructionCost:
        if isinstance(x, Compute):
            if x.program not in self._passes:
                self._passes[x.program] = self._pass(x.program)
            return self._passes[x.program]
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

    def _pass(self, program: int) -> InstructionCost:
        key = self.keys.of_pass(program)
        known = self.profile.passes.get(key)
        if known is None:
            self.unknown.add(key)
            known = self._of_other_samples(key)
        if known is None:
            guess = self.guess.of_pass(program)
            known = (guess.alone + guess.shared) * self._faster
        return InstructionCost(0.0, known, COMPUTE)

    def _of_other_samples(self, key: str) -> float | None:
        """The same pass of another number of samples: more take longer, but none less than the shortest pass."""
        what, _, count = key.rpartition(AT)
        others = {
            int(samples): seconds
            for (name, _, samples), seconds in ((one.rpartition(AT), s) for one, s in self.profile.passes.items())
            if name == what
        }
        if not others:
            return None
        near = min(others, key=lambda samples: abs(samples - int(count)))
        least = min(self.profile.passes.values())
        return least + (others[near] - least) * int(count) / near

    def _calibrated(self) -> float:
        """How much longer passes took than the machine's description says, where both are known."""
        took = said = 0.0
        for number in range(len(self.plan.programs)):
            known = self.profile.passes.get(self.keys.of_pass(number))
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
