"""split: divides the batch, or the samples of some chunks, and clones their part of the graph for each piece.

Before:                              After `split batch into 2 as mb`:

    F[stage=0]                           F[stage=0, mb=0]
    B[stage=0]                           F[stage=0, mb=1]
    update                               B[stage=0, mb=0]
                                         B[stage=0, mb=1]
                                         update             once: it reads the sum of both gradients

Preconditions: the name is new, nothing has been ordered or placed by it yet, the number divides the batch, and the
model does not mix samples. `split SELECTOR` divides what each device has of those chunks' samples further; what crosses
to other chunks is cut and joined."""

from __future__ import annotations

from math import prod

from piperlang.diagnostics import PiperError, error
from piperlang.elaborate import directive as d
from piperlang.passes.divide import refuse_mixing
from piperlang.passes.schedule import Schedule


def split(schedule: Schedule, directive: d.Split) -> None:
    if directive.selector is not None:
        list(schedule.meant(directive.selector))
    samples = schedule.model.samples
    others = prod(s.count for s in schedule.outline.splits.values() if s.selector is None)
    if samples % (others * directive.count):
        raise _uneven(samples, others, directive)
    refuse_mixing(schedule, directive, directive.count)
    schedule.outline.apply(directive)


def _uneven(samples: int, others: int, directive: d.Split) -> PiperError:
    each = samples // others
    legal = [n for n in range(1, each + 1) if each % n == 0]
    near = min(legal, key=lambda n: abs(n - directive.count))
    what = f"{samples} samples" + (f", split into {others} already," if others > 1 else "")
    return error(
        "P0412",
        f"{what} cannot be split into {directive.count}",
        directive.span,
        "every piece must have as many samples",
        help=f"{near} would divide them; or change the batch in the model file",
    )
