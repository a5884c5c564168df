"""place: where chunks run. Sends and receives appear where producer and consumer differ.

Before:                              After `place [stage=0] on gpu[pp=0]`, `place [stage=1] on gpu[pp=1]`:

    F[stage=0]                           F[stage=0] on gpu[pp=0]
    F[stage=1]                           send.F[stage=0] on gpu[pp=0]
                                         recv.F[stage=1] on gpu[pp=1]
                                         F[stage=1] on gpu[pp=1]

Preconditions: the chunks exist; none of them is placed already, in the microbatches it is placed in now.
Parts may differ in their number of devices: then what one sends to another is divided again on the way.
"""

from __future__ import annotations

from piperlang.elaborate import directive as d
from piperlang.passes.schedule import Schedule


def place(schedule: Schedule, directive: d.Place) -> None:
    schedule.outline.apply(directive)
