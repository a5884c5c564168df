"""Checks that several directives have in common: of device axes, of models that mix samples, of activations that two
directives would handle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from piperlang.build.schedule import Schedule, Use
from piperlang.diagnostics import Diagnostic, Label, PiperError, error
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
    for group in () if parts == 1 else schedule.groups if groups is None else groups:
        mixing = _first(chunk.mixing for chunk in schedule.groups[group])
        if mixing is not None:
            others = [one for one, chunks in schedule.groups.items() if all(c.mixing is None for c in chunks)]
            raise _refused(mixing, directive, group, others)


def refuse_summing(schedule: Schedule, split: Split, groups: Iterable[Tagset] | None = None) -> None:
    """Devices add up their sums over the samples when they reach them. Microbatches reach them one after another: all
    would have to stop there and keep their activations, and nothing would be gained over a batch that is not split."""
    for group in () if split.count == 1 else schedule.groups if groups is None else groups:
        summing = _first(chunk.summing for chunk in schedule.groups[group])
        if summing is not None:
            others = [one for one, chunks in schedule.groups.items() if all(c.summing is None for c in chunks)]
            raise _refused(summing, split, group, others, "or only `replicate` it: devices add up such values")


def _first(reasons: Iterable[Diagnostic | None]) -> Diagnostic | None:
    return next((reason for reason in reasons if reason is not None), None)


def _refused(why: Diagnostic, directive: Directive, group: Tagset, others: list[Tagset], *helps: str) -> PiperError:
    """`others`: chunks whose batch can be divided."""
    instead = (
        f"or divide the batch of the other chunks only: [{shown(others[0])}], ..."
        if others
        else 'or tag these operators (`with annotate("part", "whole"):`), and divide the other chunks only'
    )
    label = f"divides the batch of {shown(group)} here"
    return PiperError(replace(why, span=directive.span, label=label, helps=(*why.helps, *helps, instead)))


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
