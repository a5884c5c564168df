"""What replicate, shard and split have in common: checks on axes and on dividing the batch."""

from __future__ import annotations

from dataclasses import replace

from piperlang.diagnostics import Label, PiperError, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.placement import shown
from piperlang.passes.schedule import Schedule, Use


def refuse_mixing(schedule: Schedule, directive: d.Split | d.Replicate, parts: int) -> None:
    """A model whose samples depend on each other would compute something else on a part of the batch."""
    mixing = schedule.model.mixing
    if mixing is not None and parts > 1:
        raise PiperError(replace(mixing, span=directive.span, label="divides the batch here"))


def give_axes(schedule: Schedule, directive: d.Replicate | d.Shard, use: Use) -> None:
    """Record what the axes of a directive are for, in every chunk it names."""
    names = [str(axis) for axis in directive.axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise error("P0409", f"axis `{twice}` is used twice in one directive", directive.span, help="name it once")
    for group, _ in schedule.meant(directive.selector):
        uses = schedule.uses.setdefault(group, {})
        for axis in directive.axes:
            known = uses.get((axis.mesh, axis.name))
            if known is not None and known.directive is not directive:
                raise error(
                    "P0409",
                    f"axis `{axis}` is used twice for {shown(group)}",
                    directive.span,
                    "again here",
                    also=[Label(known.directive.span, "used here")],
                    notes=[schedule.modules(group)],
                    help=(
                        "an axis either divides the batch of a chunk or its weights: narrow one of the selectors, as in"
                        " `[!expert]`"
                    ),
                )
            uses[axis.mesh, axis.name] = use
            schedule.outline.used.add((axis.mesh, axis.name))
