"""Whether a plan can run and means what it should: from its instructions alone, since a plan may come from a file.

Backends notice next to nothing when partners disagree, so whatever could lose, mix up or never deliver a value is
refused here. Four questions, each asked only if those before it were answered well: is every instruction well formed,
do partners agree, is every value there when it is read and is nothing lost, and does every device finish.
"""

from __future__ import annotations

from piperlang.core.collector import uncollected
from piperlang.core.streams import MAX_CTAS
from piperlang.diagnostics import PiperError
from piperlang.plan.plan import Plan
from piperlang.plan.verify import (
    collectives,
    compute,
    deadlock,
    messages,
    parameters,
    regions,
    routing,
    samples,
    values,
)
from piperlang.plan.verify.report import Checked, Stop, malformed


def check(plan: Plan, *, buffered: bool = True, forward: bool = False) -> None:
    """Raise what is wrong with a plan. `buffered=False`: for backends (NCCL) that tell messages apart by order alone,
    and whose sends end only when they are received.

    `forward`: the plan is only the forward of one that was checked; where its values lie is seen from the backward, and
    has been."""
    measured(plan, buffered=buffered, forward=forward)


def measured(plan: Plan, *, buffered: bool = True, forward: bool = False) -> int:
    """The same; returns how many steps it took."""
    _frame(plan)
    checked = Checked(plan)
    try:
        with uncollected():
            checked.sort()
            if checked.found:
                raise Stop
            for questions in (
                (collectives.membership,),
                (compute.compute, messages.moves, parameters.entries),
                (collectives.collectives, *(() if buffered else (messages.messages, messages.in_order))),
                (values.values, parameters.flow, samples.losses, samples.data, routing.routes),
                (deadlock.order if buffered else deadlock.rendezvous,),  # which looks at messages, too
                (() if forward else (regions.parts,)),
            ):
                for ask in questions:
                    ask(checked)
                if checked.found:
                    raise Stop
    except Stop:
        raise PiperError(*checked.found) from None
    return checked.steps


def _frame(plan: Plan) -> None:
    """What names and finds instructions must be right before anything can be said about them."""
    if plan.samples < 1 or any(program.samples < 1 for program in plan.programs):
        raise malformed("a plan needs samples")
    for stream, resources in plan.streams.items():
        if resources.ctas is not None and not 1 <= resources.ctas <= MAX_CTAS:
            raise malformed(f"stream {stream} has {resources.ctas} thread blocks, and may have 1 to {MAX_CTAS}")
    numbers = [device.device for device in plan.devices]
    if len(set(numbers)) < len(numbers):
        raise malformed("a device is in the plan twice", f"devices {numbers}")
    for number, (members, _) in enumerate(plan.groups):
        if len(set(members)) < len(members) or not set(members) <= set(numbers):
            raise malformed(
                f"group {number} has members that are no devices of the plan, or has one twice",
                f"members {list(members)}",
            )
