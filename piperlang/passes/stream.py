"""stream: the logical stream on which nodes run. Nodes on different streams may run at the same time.

Before:                              After `stream [comm=p2p] on "pp"`:

    send.F[stage=0] on comm              send.F[stage=0] on pp

Preconditions: the selector matches something in the graph as it is now. Naming `pass=I` or `pass=W` splits those
backwards in two."""

from __future__ import annotations

from piperlang.elaborate import directive as d
from piperlang.passes.match import name_halves, require_match
from piperlang.passes.schedule import Schedule


def stream(schedule: Schedule, directive: d.Stream) -> None:
    name_halves(schedule, directive.selector, directive)
    require_match(schedule, directive.selector)
    schedule.streams.append(directive)
