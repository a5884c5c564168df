"""The outline: the information about the graph that a script gives without a model.

It replaces the graph when there is no model: it accepts every directive, answers `count` and `tags` from what the
script has named so far, and resolves the order of passes on each device. Chunks are known by the tags that `tag` and
`place` name; every chunk has a forward and a backward for each microbatch. What requires a model is not checked
here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from piperlang.diagnostics import Diagnostic, Label, PiperError, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.lanes import Lane, Lanes
from piperlang.elaborate.placement import MAX_CHUNKS, Chunk, Placement, Placements, shown, spread
from piperlang.elaborate.selector import Selector, TagValue
from piperlang.elaborate.values import Axis, Mesh

PASSES = ("F", "B")
MAX_COUNTED = 200_000


class Outline:
    def __init__(self, model: tuple[Chunk, ...] | None = None) -> None:
        """`model`: the tags of every chunk, where there is a model."""
        self.meshes: dict[Mesh, d.UseMesh] = {}
        self.used: set[tuple[Mesh, str]] = set()
        self.splits: dict[str, d.Split] = {}
        self.tagged: dict[frozenset[tuple[str, TagValue]], d.Directive] = {}
        """Every chunk the script has named, by its tags."""
        self.placements = Placements(model=model)
        self.lanes = Lanes(self.placements, self.splits)
        self.chains: list[d.Order] = []
        self._values: dict[str, set[TagValue]] = {}
        self._counted = 0

    # ------------------------------------------------------------------------------------------------------- queries

    def apply(self, directive: d.Directive) -> None:
        try:
            self._apply(directive)
        except PiperError as problem:
            raise PiperError(*(x.within(directive.trail) for x in problem.diagnostics)) from None

    def _apply(self, directive: d.Directive) -> None:
        match directive:
            case d.UseMesh(mesh):
                self.meshes.setdefault(mesh, directive)
            case d.Tag(tags):
                self.tagged.setdefault(frozenset(tags), directive)
            case d.Place():
                self._place(directive)
            case d.Replicate(_, axes) | d.Shard(_, axes):
                self._across(directive, axes)
            case d.Split():
                self._split(directive)
            case d.Order(None):
                self.chains.append(directive)
            case d.Order():
                self.lanes.order(directive)
            case d.Stream() | d.Recompute() | d.Offload():
                pass  # they do not affect the outline

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

    # ------------------------------------------------------------------------------------------------- directives

    def _place(self, directive: d.Place) -> None:
        for mesh_axis, _ in directive.where.picks:
            self.used.add((directive.where.mesh, mesh_axis))
        devices = frozenset(directive.where.devices())
        for conjunction in directive.selector.alternatives:
            named = spread(conjunction, self.splits, self.placements)
            if named is None:
                self.placements.open.append(directive)
            elif not named and self.placements.model is not None:
                raise self.lanes.resolver.nothing(self.lanes.resolver.tags(conjunction), directive.selector)
            elif not named:
                raise error(
                    "P0302",
                    "selector matches no nodes",
                    directive.selector.span,
                    "it contains an empty range; ranges are half-open",
                )
            for chunk, box in named or ():
                if any(not these for _, these in box):
                    raise error(
                        "P0302",
                        "selector matches no nodes",
                        directive.selector.span,
                        f"it selects no microbatch of {self._sizes()}",
                    )
                if len(self.tagged) > MAX_CHUNKS:
                    raise error(
                        "P0208", f"more than {MAX_CHUNKS:,} chunks are placed", directive.span, help="check the ranges"
                    )
                self.placements.add(Placement(chunk, box, directive.where, devices, directive))
                self.tagged.setdefault(chunk, directive)
        self.lanes.forget()

    def _sizes(self) -> str:
        return ", ".join(f"{name}=0:{split.count}" for name, split in self.splits.items())

    def _across(self, directive: d.Replicate | d.Shard, axes: tuple[Axis, ...]) -> None:
        for axis in axes:
            self.used.add((axis.mesh, axis.name))
        names = [str(axis) for axis in axes]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise error("P0409", f"axis `{twice}` is used twice in one directive", directive.span, help="name it once")

    def _split(self, directive: d.Split) -> None:
        known = self.splits.get(directive.name)
        if known is not None:
            raise error(
                "P0406",
                f"split `{directive.name}` already exists",
                directive.span,
                also=[Label(known.span, "first split here")],
                help="choose another name",
            )
        self._check_in_time(directive)
        self.splits[directive.name] = directive
        self.lanes.forget()

    def _check_in_time(self, directive: d.Split) -> None:
        """Statements that name the microbatches of a split must come after it."""
        early = next((by for tags, by in self.tagged.items() if any(key == directive.name for key, _ in tags)), None)
        late = next((lane.steps[0].step for lane in self.lanes.lanes if lane.steps), None)
        if early is not None:
            raise error(
                "P0410",
                f"`{directive.name}` is used before its split",
                directive.span,
                "split here",
                also=[Label(early.span, f"`{directive.name}` is read as a tag here")],
                help="move the split before this line",
            )
        if late is not None:
            raise error(
                "P0410",
                "the batch is split after passes were ordered",
                directive.span,
                "split here",
                also=[Label(late.span, "ordered without the split here")],
                help="move the split before this line",
            )

    # ----------------------------------------------------------------------------------------------------- results

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
            if (
                isinstance(by, d.Tag)
                and not chunk & placed
                and chunk not in ordered
                and names.intersection(name for name, _ in chunk)
            ):
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
