"""offload: activations go to host memory after the forward, and come back for the backward.

Before:                              After `offload [stage=0]`:

    F[stage=0]                           F[stage=0]
    B[stage=0]                           offload[stage=0]
                                         fetch[stage=0]     once the gradient is there; `prefetch=n`: n passes before
                                         B[stage=0]

Preconditions: the chunks exist, and their activations are not recomputed.
"""

from __future__ import annotations

from piperlang.diagnostics import Label, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.placement import shown
from piperlang.passes.schedule import Schedule


def offload(schedule: Schedule, directive: d.Offload) -> None:
    for group, _ in schedule.meant(directive.selector):
        other = schedule.recomputed.get(group)
        if other is not None:
            raise error(
                "P0405",
                f"activations of {shown(group)} are recomputed already",
                directive.span,
                also=[Label(other.span, "here")],
                help="do one or the other",
            )
        schedule.offloaded[group] = directive
