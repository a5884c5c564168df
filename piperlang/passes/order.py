"""order: what runs before what, on some devices or anywhere.

Before:                              After `order on gpu[pp=0]: [stage=0, pass=F, mb=0], [stage=0, pass=F, mb=1]`:

    F[stage=0, mb=0]                     F[stage=0, mb=0]
    F[stage=0, mb=1]                     F[stage=0, mb=1]   after F[stage=0, mb=0]

`order A -> B` relates nodes wherever they are, communication included. Nothing is computed otherwise: only temporal
edges appear.

Preconditions: what is ordered exists, runs on those devices, and is ordered once. Naming `pass=I` or `pass=W` splits
those backwards in two. That no order waits for itself is checked once all is known."""

from __future__ import annotations

from piperlang.diagnostics import error
from piperlang.elaborate import directive as d
from piperlang.passes.match import name_halves, require_match
from piperlang.passes.schedule import Schedule


def order(schedule: Schedule, directive: d.Order) -> None:
    for step in directive.steps:
        for selector in step.items:
            if any(c.key in ("comm", "update") for conjunction in selector.alternatives for c in conjunction):
                require_match(schedule, selector)
            elif directive.where is None:
                if selector.next_keys():
                    raise error(
                        "P0304",
                        "`next` needs devices",
                        selector.span,
                        "which is next, and where?",
                        help="use `order on ...:`, or name the microbatch",
                    )
                name_halves(schedule, selector, directive)
                require_match(schedule, selector)
    if directive.where is None:
        schedule.outline.chains.append(directive)
    else:
        schedule.outline.apply(directive)
        _note_halves(schedule)


def _note_halves(schedule: Schedule) -> None:
    """Remember which backwards the new steps name by halves, and which whole."""
    for lane in schedule.outline.lanes.lanes:
        for work in lane.steps[schedule.seen_steps.get(id(lane), 0) :]:
            for item in work.items:
                if item.get("pass") in ("B", "I", "W") and "comm" not in item:
                    (schedule.by_whole if item["pass"] == "B" else schedule.by_halves).add(schedule.which(item))
        schedule.seen_steps[id(lane)] = len(lane.steps)
