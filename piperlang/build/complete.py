"""Checks at the end of a script: chunks that are not placed, device axes that are not used, batch sizes that are not
divisible."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from piperlang.build.schedule import MANY, Schedule
from piperlang.build.streams import misused_streams
from piperlang.core.mesh import Mesh, Submesh
from piperlang.diagnostics import Diagnostic
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.elaborate.placement import shown
from piperlang.ir.layout import axes_of

if TYPE_CHECKING:
    from piperlang.directives.place import Place
    from piperlang.directives.replicate import Replicate
    from piperlang.directives.shard import Shard


def missing(schedule: Schedule) -> Iterator[Diagnostic]:
    found = [*_unplaced(schedule), *(list(_idle(schedule)) or _unused(schedule)), *_uneven(schedule)]
    found = found or schedule.outline.finish()
    yield from found or misused_streams(schedule)


def _unplaced(schedule: Schedule) -> Iterator[Diagnostic]:
    for group in schedule.groups if schedule.meshes else ():
        span = next(iter(schedule.meshes)).span
        if not schedule.outline.placements.by_chunk.get(group):
            what = f"[{shown(group)}]" if group else "[pass=*]"
            yield Diagnostic(
                "P0402",
                f"{shown(group)} is not placed",
                span,
                "on none of these devices",
                notes=(schedule.modules(group),),
                helps=(f"add `place {what} on ...`",),
            )


def _idle(schedule: Schedule) -> Iterator[Diagnostic]:
    """Axes of a directive along which none of its chunks is placed."""
    lying: dict[tuple[int, Mesh, str], bool] = {}
    first: dict[tuple[int, Mesh, str], tuple[Tagset, Submesh, Replicate | Shard]] = {}
    for group, uses in schedule.uses.items():
        for (mesh, axis), use in uses.items():
            for where, placement in schedule.places(group):
                known = (id(use.directive), mesh, axis)
                here = mesh.shape[axis] == 1 or (
                    where.mesh == mesh and axis in dict(axes_of(where))
                )  # an axis of one device is no mistake: scripts have parameters
                lying[known] = lying.get(known, False) or here or placement is None
                first.setdefault(known, (group, where, use.directive))
    for known, (group, where, by) in first.items():
        if not lying[known]:
            _, mesh, axis = known
            others = ", ".join(f"{where.mesh.name}.{name}" for name, _ in axes_of(where))
            yield Diagnostic(
                "P0404",
                f"{shown(group)} is not placed along device axis `{mesh.name}.{axis}`",
                by.span,
                f"{shown(group)} runs on {where}",
                notes=(schedule.modules(group),),
                helps=(
                    (
                        f"name an axis that it is placed along: {others}"
                        if others
                        else f"place it on several devices along {axis}, or remove this directive"
                    ),
                ),
                trail=by.trail,
            )


def _unused(schedule: Schedule) -> Iterator[Diagnostic]:
    """One for each axis, whatever is placed along it: the repair is the same for all chunks."""
    idle: dict[tuple[Mesh, str, int], list[tuple[Tagset, Place]]] = {}
    for group in schedule.groups:
        for where, placement in schedule.places(group):
            for axis, size in axes_of(where):
                if schedule.use(group, where, axis) is None and placement is not None:
                    idle.setdefault((where.mesh, axis, size), []).append((group, placement.directive))
    for (mesh, axis, size), found in idle.items():
        groups = list(dict.fromkeys(group for group, _ in found))
        by = found[0][1]
        names = "; ".join(map(shown, groups[:MANY])) + (f" and {len(groups) - MANY} more" if len(groups) > MANY else "")
        yield Diagnostic(
            "P0404",
            f"{names} {'do' if len(groups) > 1 else 'does'} not use device axis `{axis}`",
            by.span,
            f"{size} devices along it would compute the same",
            notes=tuple(schedule.modules(group) for group in groups[:MANY]),
            helps=(
                f"`replicate` or `shard` it over {mesh.name}.{axis}, or place it on one of them: {mesh.name}[{axis}=0]",
            ),
            trail=by.trail,
        )


def _uneven(schedule: Schedule) -> Iterator[Diagnostic]:
    samples = schedule.model.samples
    for group in schedule.groups:
        splits = schedule.splits(group)
        pieces = prod(s.count for s in splits)
        for where, _ in schedule.places(group):
            degree = schedule.degree(group, where)
            if samples % (pieces * degree) == 0:
                continue
            by: Directive = _dividing(schedule, group, where) if degree > 1 else splits[-1]
            microbatches = f"{pieces} microbatch{'es' if pieces > 1 else ''}"
            yield Diagnostic(
                "P0412",
                f"batch size {samples} is not divisible by {pieces * degree}",
                by.span,
                f"{shown(group)} has {microbatches}" + (f", each on {degree} devices" if degree > 1 else ""),
                notes=(schedule.modules(group),),
                helps=("choose numbers whose product divides it, or change the batch size in the model file",),
                trail=by.trail,
            )
            return


def _dividing(schedule: Schedule, group: Tagset, where: Submesh) -> Directive:
    return next(
        use.directive for axis, _ in axes_of(where) if (use := schedule.use(group, where, axis)) and use.divides_batch
    )
