"""Times that were measured on workers, as data: saved, and used to simulate the same model under other schedules
(measured.py).

Passes are known by what they compute, not by where they are in a plan: the tags of their chunk, its size and work, the
number of samples and how weights are divided. Communication is known by its kind, its bytes and the number of
devices."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from statistics import fmean, median
from typing import Any

from piperlang.diagnostics import PiperError, error
from piperlang.diagnostics.files import unreadable
from piperlang.diagnostics.printable import printable
from piperlang.ir.graph import Graph
from piperlang.plan.codec import InvalidRecord, reader
from piperlang.plan.estimate.summary import SentBytes
from piperlang.plan.instructions import Collective, Compute, Instruction, Receive, Send, Update
from piperlang.plan.plan import DevicePlan, Plan
from piperlang.simulate.sharing import Sharing, undisturbed
from piperlang.simulate.timeline import Place, RecordedStep

FORMAT, VERSION = "piperlang profile", 4
LONGEST = 1e6
"""Seconds that an instruction may have taken."""
AT = ", samples: "
"""Before the number of samples, at the end of what a pass is called."""
MESSAGE = "message"
"""What a transfer between two devices is called among the kinds of communication."""


@dataclass
class Profile:
    passes: dict[str, list[list[float]]] = field(default_factory=dict)
    """Seconds of a pass: for each recorded step, of every time that it ran."""
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

    @property
    def steps(self) -> int:
        """How many were recorded."""
        return min(map(len, self.passes.values()), default=0)

    def means(self) -> dict[str, float]:
        """Of every pass."""
        return {key: fmean(chain(*steps)) for key, steps in self.passes.items()}

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
    passes = chain(*chain(*found.passes.values()))
    times = [*passes, *found.local.values(), *found.issued.values(), found.before, found.after]
    if not found.passes:
        raise _unusable(path, "`passes` is empty: nothing was measured")
    for key, steps in found.passes.items():
        if len(steps) != found.steps or not steps or not all(steps):
            raise _unusable(path, f"`{key}` has no times of some of the {found.steps} recorded steps")
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
            self.chunks.append(f"{chunk} #{count[str(chunk)]}, {size}, program {chunk.digest}")
            count[str(chunk)] += 1

    def of_pass(self, program: int) -> str:
        """With the size of the stage, the work of its forward, which is the same on every device, and its operators:
        a stage of another model, or in another precision, is something else."""
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
    """Of steps in which every instruction was recorded. Of what is not a pass, the mean. Where devices run instructions
    themselves, what it takes to hand over to one is part of it; not where a host issues them, which has times of its
    own, or where devices are shared: one waits for the others there, which is simulated."""
    keys, sent = Keys(plan, graph), SentBytes(plan)
    passes: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in steps])
    local, transfers = _Means(), _Means()
    for number, step in enumerate(steps):
        late = {} if issued or sharing.devices else _late(plan, step)
        senders = {id(receiver): sender for sender, receiver in step.timeline.messages}
        places = {id(one): place for place, one in step.ran.items()}
        computing = undisturbed(
            {
                (row, i): one
                for (row, i), one in step.ran.items()
                if not isinstance(plan.devices[row].instructions[i], Send | Receive | Collective)
            },
            sharing,
        )
        for (row, i), one in sorted(step.ran.items()):
            device = plan.devices[row]
            x = device.instructions[i]
            seconds = computing.get((row, i), max(0.0, one.end - one.start - one.waited))
            if not isinstance(x, Receive | Collective):
                seconds += late.get((row, i), 0.0)
            if isinstance(x, Compute):
                passes[keys.of_pass(x.program)][number].append(seconds)
            elif isinstance(x, Collective):
                transfers.add((keys.of_transfer(x), sent.of(device, x)), seconds)
            elif isinstance(x, Receive):
                sender = senders.get(id(one))
                if sender is not None:
                    transfers.add((MESSAGE, sender.what.bytes), seconds + late.get(places[id(sender)], 0.0))
            else:
                local.add(keys.of_local(device, x), seconds)
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for (kind, size), seconds in transfers.found().items():
        by_kind[kind].append((size, seconds))
    return Profile(
        dict(passes),
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


def _late(plan: Plan, step: RecordedStep) -> dict[Place, float]:
    """Seconds from when an instruction could begin, as the plan has it, until it did."""
    found: dict[Place, float] = {}
    for row, device in enumerate(plan.devices):
        last: dict[str, float] = {}
        for i, x in enumerate(device.instructions):
            one = step.ran[row, i]
            before = [step.ran[row, earlier].end for earlier in x.waits]
            if x.stream in last:
                before.append(last[x.stream])
            if before:
                found[row, i] = max(0.0, one.start - max(before))
            last[x.stream] = one.end
    return found


def undelayed(lengths: Sequence[float]) -> list[int]:
    """Which of some lengths count: the shorter half. Other work on a machine can only make steps longer, and some of
    them much longer."""
    return sorted(range(len(lengths)), key=lengths.__getitem__)[: max(1, len(lengths) // 2)]


class _Means:
    def __init__(self) -> None:
        self.values: dict[Any, list[float]] = defaultdict(list)

    def add(self, key: Any, seconds: float) -> None:
        self.values[key].append(seconds)

    def found(self) -> dict[Any, float]:
        return {key: fmean(values) for key, values in self.values.items()}
