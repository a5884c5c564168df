"""Checks that several directives have in common: of device axes, of models that mix samples, of activations that two
directives would handle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from piperlang.build.schedule import Schedule, Use
from piperlang.diagnostics import Label, PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.elaborate.placement import shown

if TYPE_CHECKING:
    from piperlang.directives.replicate import Replicate
    from piperlang.directives.shard import Shard
    from piperlang.directives.split import Split


def refuse_mixing(schedule: Schedule, directive: Split | Replicate, parts: int) -> None:
    """A model whose samples depend on each other computes other results on a part of the batch."""
    mixing = schedule.model.mixing
    if mixing is not None and parts > 1:
        raise PiperError(replace(mixing, span=directive.span, label="divides the batch here"))


def refuse_both(directive: Directive, group: Tagset, other: Directive | None, handled: str) -> None:
    """`other`: the directive that has already decided about the activations of a chunk."""
    if other is not None:
        raise error(
            "P0405",
            f"activations of {shown(group)} are already {handled}",
            directive.span,
            also=[Label(other.span, f"{handled} here")],
            help="remove one of the two directives",
        )


def use_axes(outline: Outline, directive: Replicate | Shard) -> None:
    """Note that the axes of a directive are used."""
    for axis in directive.axes:
        outline.used.add((axis.mesh, axis.name))
    names = [str(axis) for axis in directive.axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise error("P0409", f"axis `{twice}` is used twice in one directive", directive.span, help="name it once")


def give_axes(schedule: Schedule, directive: Replicate | Shard, use: Use) -> None:
    """Record what the axes of a directive are used for, in every chunk that it selects."""
    use_axes(schedule.outline, directive)
    for group, _ in schedule.meant(directive.selector):
        uses = schedule.uses.setdefault(group, {})
        for axis in directive.axes:
            known = uses.get((axis.mesh, axis.name))
            if known is not None and known.directive is not directive:
                raise error(
                    "P0409",
                    f"axis `{axis}` is used twice for {shown(group)}",
                    directive.span,
                    "used again here",
                    also=[Label(known.directive.span, "first used here")],
                    notes=[schedule.modules(group)],
                    help=(
                        "an axis divides either the batch of a chunk or its weights: narrow one of the selectors, as in"
                        " `[!expert]`"
                    ),
                )
            uses[axis.mesh, axis.name] = use
