"""recompute: a second forward before the backward, instead of keeping activations.

Before:                              After `recompute [stage=0]`:

    F[stage=0]                           F[stage=0]         keeps only what it was given
    B[stage=0]                           R[stage=0]         once the gradient is there
                                         B[stage=0]

One R serves a whole backward, also one in two halves. Preconditions: the chunks exist, and their activations are not
offloaded."""

from __future__ import annotations

from piperlang.diagnostics import Label, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.placement import shown
from piperlang.passes.schedule import Schedule


def recompute(schedule: Schedule, directive: d.Recompute) -> None:
    for group, _ in schedule.meant(directive.selector):
        other = schedule.offloaded.get(group)
        if other is not None:
            raise error(
                "P0405",
                f"activations of {shown(group)} are offloaded already",
                directive.span,
                also=[Label(other.span, "here")],
                help="do one or the other",
            )
        schedule.recomputed[group] = directive
