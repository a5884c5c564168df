"""Checks that several directives have in common: of device axes, of models that mix samples, of activations that two
directives would handle."""

from __future__ import annotations

from collections.abc import Iterable
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


def refuse_mixing(
    schedule: Schedule, directive: Split | Replicate, parts: int, groups: Iterable[Tagset] | None = None
) -> None:
    """Chunks whose samples depend on each other compute other results on a part of the batch. `groups`: those that the
    directive divides; by default, all."""
    if parts == 1:
        return
    for group in schedule.groups if groups is None else groups:
        mixing = next((chunk.mixing for chunk in schedule.groups[group] if chunk.mixing is not None), None)
        if mixing is not None:
            others = [one for one, chunks in schedule.groups.items() if all(c.mixing is None for c in chunks)]
            instead = (
                f"or divide the batch of the other chunks only: [{shown(others[0])}], ..."
                if others
                else 'or tag these operators (`with annotate("part", "whole"):`), and divide the other chunks only'
            )
            raise PiperError(
                replace(
                    mixing,
                    span=directive.span,
                    label=f"divides the batch of {shown(group)} here",
                    helps=(*mixing.helps, instead),
                )
            )


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
