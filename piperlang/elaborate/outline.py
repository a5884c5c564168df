"""The outline: the information about the graph that a script gives without a model.

It replaces the graph when there is no model: it accepts every directive, answers `count` and `tags` from what the
script has named so far, and resolves the order of passes on each device. Chunks are known by the tags that `tag` and
`place` name; every chunk has a forward and a backward for each microbatch. What requires a model is not checked
here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from piperlang.core.mesh import Mesh
from piperlang.core.selector import Selector, TagValue
from piperlang.core.streams import StreamResources
from piperlang.diagnostics import Diagnostic, PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.lanes import Lane, Lanes
from piperlang.elaborate.placement import Chunk, Placements, shown

if TYPE_CHECKING:
    from piperlang.directives.mesh import UseMesh
    from piperlang.directives.order import Order
    from piperlang.directives.split import Split
    from piperlang.directives.stream import Stream
    from piperlang.elaborate.options import Option

PASSES = ("F", "B")
MAX_COUNTED = 200_000


class Outline:
    def __init__(self, model: tuple[Chunk, ...] | None = None) -> None:
        """`model`: the tags of every chunk, where there is a model."""
        self.meshes: dict[Mesh, UseMesh] = {}
        self.used: set[tuple[Mesh, str]] = set()
        self.splits: dict[str, Split] = {}
        self.tagged: dict[frozenset[tuple[str, TagValue]], Directive] = {}
        """Every chunk the script has named, by its tags."""
        self.placements = Placements(model=model)
        self.lanes = Lanes(self.placements, self.splits)
        self.chains: list[Order] = []
        self.recomputed: list[tuple[Selector, bool]] = []
        """What has been said of forwards, and whether they run again: the last one holds."""
        self.streams: dict[str, dict[str, tuple[Stream, Option]]] = {}
        """The resources that each stream is given: option -> the directive that gives it first, and its value."""
        self._values: dict[str, set[TagValue]] = {}
        self._counted = 0

    # ------------------------------------------------------------------------------------------------------- queries

    def apply(self, directive: Directive) -> None:
        try:
            directive.apply_to_outline(self)
        except PiperError as problem:
            raise PiperError(*(x.within(directive.trail) for x in problem.diagnostics)) from None

    def count(self, selector: Selector) -> int:
        size = len(self.tagged) * len(PASSES) * prod(split.count for split in self.splits.values())
        if size > MAX_COUNTED:
            raise error(
                "P0208",
                f"the selector covers {size:,} nodes",
                selector.span,
                f"the limit is {MAX_COUNTED:,} without a model",
            )
        return sum(1 for node in self._nodes() if selector.matches(node))

    def tags(self, name: str) -> Iterable[TagValue]:
        if len(self.tagged) > self._counted:
            self._counted = len(self.tagged)
            self._values = {}
            for tags in self.tagged:
                for key, value in tags:
                    self._values.setdefault(key, set()).add(value)
        return self._values.get(name, set())

    def _nodes(self) -> Iterator[dict[str, TagValue]]:
        sizes = [[(name, at) for at in range(split.count)] for name, split in self.splits.items()]
        for tags, phase in product(self.tagged, PASSES):
            for at in product(*sizes):
                yield {**dict(tags), "pass": phase, **dict(at)}

    # ----------------------------------------------------------------------------------------------------- results

    def resources(self) -> dict[str, StreamResources]:
        """Of the streams that are given some."""
        return {stream: _resources(given) for stream, given in self.streams.items()}

    def orders(self) -> list[Lane]:
        """The order of passes: one lane for all devices with identical orders, the lowest device first."""
        devices = {device for mesh in self.meshes for device in range(mesh.size)}
        idle = devices.difference(*(lane.devices for lane in self.lanes.lanes))
        lanes = [*self.lanes.lanes, *([Lane(frozenset(idle))] if idle else [])]
        return sorted(lanes, key=lambda lane: min(lane.devices))

    def finish(self) -> list[Diagnostic]:
        """Checks at the end of the script: chunks that are not placed or are ordered on other devices, unused axes."""
        return [*self.lanes.misplaced(), *self._unplaced(), *self._uncovered(), *self._unused()]

    def _unplaced(self) -> Iterator[Diagnostic]:
        if self.placements.open:
            return  # only a model can list the chunks that those place
        ordered = dict(self.lanes.unplaced())
        for chunk, step in ordered.items():
            what = shown(chunk)
            yield Diagnostic(
                "P0402",
                f"{what} is ordered but not placed",
                step.span,
                "",
                helps=(f"add `place [{what}] on ...` before this line",),
                trail=step.trail,
            )
        placed = {pair for chunk in self.placements.by_chunk for pair in chunk}
        names = {name for name, _ in placed}
        for chunk, by in self.tagged.items():
            # A chunk with other tags than the placed ones may be inside them: only a model can tell.
            if not chunk & placed and chunk not in ordered and names.intersection(name for name, _ in chunk):
                what = shown(chunk)
                yield Diagnostic(
                    "P0402",
                    f"{what} is tagged but not placed",
                    by.span,
                    "",
                    helps=(f"add `place [{what}] on ...`",),
                    trail=by.trail,
                )

    def _uncovered(self) -> Iterator[Diagnostic]:
        """Microbatches that are not placed, of chunks that are placed by microbatch."""
        for chunk, places in self.placements.by_chunk.items():
            for name, split in self.splits.items():
                boxes = [dict(p.box).get(name) for p in places]
                missing = set(range(split.count)).difference(*(these for these in boxes if these is not None))
                if missing and None not in boxes:
                    first = places[0].directive
                    yield Diagnostic(
                        "P0402",
                        f"{shown(chunk)}, {name}={min(missing)} is not placed",
                        first.span,
                        f"{name} has {split.count}",
                        helps=("place the other microbatches too",),
                        trail=first.trail,
                    )

    def _unused(self) -> Iterator[Diagnostic]:
        for mesh, declared in self.meshes.items():
            for axis, size in mesh.axes:
                if size > 1 and not self._in_use(mesh, axis):
                    yield Diagnostic(
                        "P0404",
                        f"axis `{axis}` of mesh `{mesh.name}` is not used",
                        mesh.span,
                        f"{size} devices along it would compute the same",
                        helps=(
                            f"`place` along it, `replicate` or `shard` over {mesh.name}.{axis}, or remove the axis",
                        ),
                        trail=declared.trail,
                    )

    def _in_use(self, mesh: Mesh, axis: str) -> bool:
        """Meshes over the same devices are views: an axis is used if a view uses it, or if a view uses all of its
        own."""
        views = [other for other in self.meshes if other == mesh or other.size == mesh.size]
        return any((view, axis) in self.used for view in views) or any(
            all((view, name) in self.used for name, size in view.axes if size > 1) for view in views if view != mesh
        )


def _resources(given: Mapping[str, tuple[Stream, Option]]) -> StreamResources:
    values = {name: option.value for name, (_, option) in given.items()}
    priority, ctas = values.get("priority"), values.get("ctas")
    return StreamResources(
        priority == "high" if priority is not None else None, ctas if isinstance(ctas, int) else None
    )
