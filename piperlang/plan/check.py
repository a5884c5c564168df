"""Whether a plan can run and means what it should: from its instructions alone, since a plan may come from a file.

Backends notice next to nothing when partners disagree, so whatever could lose, mix up or never deliver a value is
refused here. Four questions, each asked only if those before it were answered well: does every instruction make sense
by itself, do partners agree, is every value there when it is read and is nothing lost, and does everybody come to an
end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from piperlang.diagnostics import LIMIT, Diagnostic, PiperError
from piperlang.ir.graph import COMPUTE, Key
from piperlang.plan.instruction import ROUTES, Instruction, Plan

COLLECTIVE = ("exchange", *ROUTES, "all_reduce", "gather", "scatter", "reduce", "norm")
"""What all members of a group enter together."""
ONE, SOME = (1, 1), (1, 1 << 30)
FORM = {
    **dict.fromkeys(COMPUTE, ((0, SOME[1]), SOME)),
    **dict.fromkeys(("gather", "scatter", "reduce", "update"), (SOME, SOME)),
    "send": ((0, 1), (0, 0)),
    "recv": ((0, 1), ONE),
    "choose": (ONE, (2, 2)),
    **dict.fromkeys(("dispatch", "combine"), ((2, 2), ONE)),
    "copy": (SOME, ONE),
    "norm": (SOME, ONE),
    **dict.fromkeys(("exchange", "all_reduce", "offload", "fetch"), (ONE, ONE)),
}
"""How many values each kind of instruction reads and writes, at least and at most."""
REBUILD = "make the plan again from its script, with `piperc plan`"


class At(NamedTuple):
    """An instruction of a plan."""

    device: int
    """Where it stands in the plan's list, which is not its number."""
    place: int
    does: Instruction


class Stop(Exception):
    """Enough was found."""


@dataclass
class Checked:
    """A plan with its instructions by what they do, and what was found wrong."""

    plan: Plan
    of: dict[str, list[At]] = field(default_factory=dict)
    found: list[Diagnostic] = field(default_factory=list)
    made: list[dict[Key, int]] = field(default_factory=list)
    """By device: which instruction makes each value."""
    steps: int = 0
    """How much work it was, in instructions and parts looked at: tests see from it that the work grows with the
    plan."""

    def sort(self) -> None:
        self.of = {name: [] for name in FORM}
        adds = {name: found.append for name, found in self.of.items()}
        nodes = len(self.plan.names)
        for d, device in enumerate(self.plan.devices):
            for i, instruction in enumerate(device.instructions):
                do, _, node, reads, writes, waits, _ = instruction
                if not 0 <= node < nodes:
                    raise _stop(
                        f"instruction {i} of device {device.device}, `{do}`, is of no node",
                        f"it says {node}, and there are {nodes}",
                    )
                if do not in adds:
                    self.wrong("P0504", f"nobody knows how to `{do}`", At(d, i, instruction))
                    continue
                adds[do](At(d, i, instruction))
                (least, most), (fewest, greatest) = FORM[do]
                if not least <= len(reads) <= most or not fewest <= len(writes) <= greatest:
                    self.wrong(
                        "P0504",
                        f"`{do}` that reads {len(reads)} values and writes {len(writes)}",
                        At(d, i, instruction),
                    )
                for other in waits:
                    if not 0 <= other < i:
                        self._ahead(At(d, i, instruction), other)

    def _ahead(self, at: At, other: int) -> None:
        """Some devices issue their instructions one by one, and can wait only for what was issued before."""
        instructions = self.plan.devices[at.device].instructions
        there = [At(at.device, other, instructions[other])] if 0 <= other < len(instructions) else []
        what = "that comes later" if there else f"{other}, which is not there"
        self.wrong("P0501", f"device {self.plan.devices[at.device].device} waits for an instruction {what}", at, *there)

    def all(self, *names: str) -> Iterator[At]:
        for name in names:
            yield from self.of[name]

    def name(self, at: At) -> str:
        """An instruction as its author knows it."""
        plan, node = self.plan, at.does.node
        line = f", {plan.lines[node]}" if plan.lines[node] else ""
        return (
            f"{at.does.do} of {plan.names[node]} (device {plan.devices[at.device].device}, instruction"
            f" {at.place}{line})"
        )

    def wrong(self, code: str, message: str, *involved: At, notes: tuple[str, ...] = (), help: str = REBUILD) -> None:
        every = {(at.device, at.place): at for at in involved}
        named = tuple(f"{'and ' if k else ''}{self.name(at)}" for k, at in enumerate(every.values()))
        self.found.append(Diagnostic(code, message, notes=(*named, *notes), helps=(help,)))
        if len(self.found) >= LIMIT:
            raise Stop


def check(plan: Plan, *, buffered: bool = True, forward: bool = False) -> None:
    """Raise what is wrong with a plan. `buffered=False`: for backends (NCCL) that tell messages apart by order alone,
    and whose sends end only when they are received.

    `forward`: the plan is only the forward of one that was checked; where its values lie is seen from the backward, and
    has been."""
    measured(plan, buffered=buffered, forward=forward)


def measured(plan: Plan, *, buffered: bool = True, forward: bool = False) -> int:
    """The same, and how many steps it took."""
    # Here, as these modules name what they find through this one.
    from piperlang.plan import (
        check_compute,
        check_groups,
        check_order,
        check_partners,
        check_parts,
        check_routes,
        check_samples,
        check_values,
        check_weights,
    )

    _frame(plan)
    checked = Checked(plan)
    # Hundreds of thousands of tuples, none in a cycle: looking for garbage among them takes longer than the check.
    collecting = gc.isenabled()
    gc.disable()
    try:
        checked.sort()
        if checked.found:
            raise Stop
        for questions in (
            (check_compute.compute, check_partners.moves, check_weights.entries),
            (check_groups.collectives, *(() if buffered else (check_partners.messages, check_partners.in_order))),
            (check_values.values, check_weights.flow, check_samples.losses, check_samples.data, check_routes.routes),
            (check_order.order if buffered else check_order.rendezvous,),  # which looks at messages, too
            (() if forward else (check_parts.parts,)),
        ):
            for ask in questions:
                ask(checked)
            if checked.found:
                raise Stop
    except Stop:
        raise PiperError(*checked.found) from None
    finally:
        if collecting:
            gc.enable()
    return checked.steps


def _frame(plan: Plan) -> None:
    """What names and finds instructions must be right before anything can be said about them."""
    if plan.samples < 1 or any(kind["samples"] < 1 for kind in plan.kinds):
        raise _stop("a plan needs samples")
    if len(plan.lines) != len(plan.names):
        raise _stop(f"the plan has {len(plan.names)} names and {len(plan.lines)} lines of nodes")
    numbers = [device.device for device in plan.devices]
    if len(set(numbers)) < len(numbers):
        raise _stop("a device is in the plan twice", f"devices {numbers}")
    for number, (members, _) in enumerate(plan.groups):
        if len(set(members)) < len(members) or not set(members) <= set(numbers):
            raise _stop(
                f"group {number} has members that are no devices of the plan, or has one twice",
                f"members {list(members)}",
            )


def _stop(message: str, *notes: str) -> PiperError:
    return PiperError(Diagnostic("P0504", message, notes=notes, helps=(REBUILD,)))
