"""How a value gets from the chunk that makes it to the chunk that reads it: nothing where both lie alike, else
communication.

Values of a piece of the batch move as they are. Where chunks have splits of their own, or divide the samples among
different numbers of devices, what crosses is joined to the piece of the batch, moved, and cut again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from piperlang.diagnostics import PiperError, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.selector import TagValue
from piperlang.elaborate.values import Slice
from piperlang.ir.graph import LOCAL, WAY, Family, Key, Value
from piperlang.ir.layout import Layout, axes_of, exchanging, moves
from piperlang.ir.model import Tensor, choice_of
from piperlang.passes.nodes import Nodes
from piperlang.passes.sites import Point, Site


@dataclass(eq=False)
class _Hop:
    """One operation of a route, for all microbatches."""

    op: str
    target: Layout
    families: tuple[Family, ...]
    suffix: str


class Flow:
    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._routes: dict[tuple[str, Layout, Layout, tuple[str, ...], tuple[str, ...]], list[_Hop]] = {}
        self._cut: dict[tuple[str, Layout, tuple[str, ...], str], Family] = {}
        self._names: dict[Layout, str] = {}
        self._ways: dict[tuple[str, Slice, Point], Key] = {}
        """By choice, part and microbatch."""

    def fetch(
        self,
        name: str,
        tensor: Tensor,
        source: Site,
        have: Layout,
        target: Site,
        want: Layout,
        point: Point,
        phase: str,
    ) -> tuple[Key, ...]:
        """The keys of what `target` reads at `point`: one, or several whose sum it is."""
        if source.dims == target.dims and (
            source.degree == target.degree or len(source.dims) == source.outer or tensor.batch is None
        ):
            return (self._move(f"{name}#{_text(point)}", name, tensor, source, have, target, want, point, phase),)
        piece = point[: target.outer]
        if tensor.batch is None:
            return self._unbatched(name, tensor, source, have, target, want, point, phase)
        whole = self._join(name, tensor, source, have, piece, phase)
        moved = self._move(whole, name, tensor, source, have, target, want, piece, phase)
        return (self._cut_for(moved, name, tensor, target, want, point, phase),)

    def _unbatched(
        self,
        name: str,
        tensor: Tensor,
        source: Site,
        have: Layout,
        target: Site,
        want: Layout,
        point: Point,
        phase: str,
    ) -> tuple[Key, ...]:
        """Without samples every piece has the same value; of gradients, each piece has its part of the sum."""
        piece = point[: target.outer]
        inner = list(product(*(range(count) for count in source.counts[source.outer :])))
        if phase == "F":
            inner = inner[:1]
        elif any(point[target.outer :]):
            return ()  # the first part takes the gradient of them all
        return tuple(
            self._move(f"{name}#{_text(piece + at)}", name, tensor, source, have, target, want, piece + at, phase)
            for at in inner
        )

    # ------------------------------------------------------------------------------------------------ moving

    def _move(
        self,
        key: Key,
        name: str,
        tensor: Tensor,
        source: Site,
        have: Layout,
        target: Site,
        want: Layout,
        point: Point,
        phase: str,
    ) -> Key:
        if have == want:
            return key
        if tensor.buried and not _alike(have, want):
            raise _buried(tensor, source, target)
        value = self.nodes.values[key]
        for hop in self._route(name, source, have, target, want, phase):
            known = f"{key}{hop.suffix}"
            if known not in self.nodes.values:  # what two readers want alike moves once
                choice = (
                    choice_of((*self.nodes.values[key].layout.places, *hop.target.places))
                    if hop.op == "all_to_all"
                    else None
                )
                self.nodes.values[known] = Value(tensor, hop.target, value.first, value.samples, value.inner)
                if choice is not None and choice.name == name:
                    self._ways[choice.name, hop.target.where, point] = f"{known}{WAY}"
                    self.nodes.add(hop.families[0], point, ((key,),), (known, f"{known}{WAY}"))
                elif choice is not None:
                    self.nodes.add(
                        hop.families[0], point, ((key,), (self._ways[choice.name, hop.target.where, point],)), (known,)
                    )
                elif len(hop.families) == 2:
                    self.nodes.add(hop.families[0], point, ((key,),), (f"{known}~",))
                    self.nodes.values[f"{known}~"] = self.nodes.values[known]
                    self.nodes.add(hop.families[1], point, ((f"{known}~",),), (known,))
                else:
                    self.nodes.add(hop.families[0], point, ((key,),), (known,))
            key = known
        return key

    def _route(self, name: str, source: Site, have: Layout, target: Site, want: Layout, phase: str) -> list[_Hop]:
        shared = (name, have, want, source.dims, target.dims)
        if shared not in self._routes:
            hops, now = [], have
            for op, then in moves(have, want):
                hops.append(self._hop(op, now, then, source, target, phase))
                now = then
            self._routes[shared] = hops
        return self._routes[shared]

    def _hop(self, op: str, now: Layout, then: Layout, source: Site, target: Site, phase: str) -> _Hop:
        suffix = "@" + self._names.setdefault(then, str(len(self._names)))
        dims = (
            target.dims[: target.outer] if source.dims != target.dims or source.degree != target.degree else target.dims
        )
        if op == "p2p":
            send = self.nodes.family(Family("send", source.chunk.tags, now.where, dims, phase=phase, by=source.by))
            recv = self.nodes.family(Family("recv", target.chunk.tags, then.where, dims, phase=phase, by=target.by))
            return _Hop(op, then, (send, recv), suffix)
        axes = exchanging(now, then)
        # Communication within a part belongs to the chunk whose weights are divided: it is why there is any.
        owner = next((site for site in (target, source) if any(divide.axis in axes for divide in site.divides)), target)
        use = next((owner.uses[axis] for axis in axes if axis in owner.uses), None)
        family = Family(
            op,
            owner.chunk.tags,
            now.where,
            dims,
            phase=phase,
            axes=() if op in LOCAL else axes,
            by=use.directive if use else None,
        )
        return _Hop(op, then, (self.nodes.family(family),), suffix)

    # ------------------------------------------------------------------------------------- splits of chunks alone

    def _join(self, name: str, tensor: Tensor, source: Site, have: Layout, piece: Point, phase: str) -> Key:
        if len(source.dims) == source.outer:
            return f"{name}#{_text(piece)}"
        key = f"{name}#{_text(piece)}+"
        if key not in self.nodes.values:
            parts = [piece + at for at in product(*(range(count) for count in source.counts[source.outer :]))]
            keys = tuple(f"{name}#{_text(part)}" for part in parts)
            family = self._local("concat", source.chunk.tags, have, source.dims[: source.outer], phase, name)
            self.nodes.values[key] = Value(tensor, have, source.first(piece), source.samples)
            self.nodes.add(family, piece, (keys,), (key,))
        return key

    def _cut_for(
        self, key: Key, name: str, tensor: Tensor, target: Site, want: Layout, point: Point, phase: str
    ) -> Key:
        if len(target.dims) == target.outer:
            return key
        part = f"{key}/{_text(point[target.outer :])}"
        if part not in self.nodes.values:
            family = self._local("slice", target.chunk.tags, want, target.dims, phase, name)
            self.nodes.values[part] = Value(tensor, want, target.first(point), target.samples, target.inner(point))
            self.nodes.add(family, point, ((key,),), (part,))
        return part

    def _local(
        self, op: str, tags: Mapping[str, TagValue], layout: Layout, dims: tuple[str, ...], phase: str, name: str
    ) -> Family:
        known = (op, layout, dims, name)
        if known not in self._cut:
            self._cut[known] = self.nodes.family(Family(op, tags, layout.where, dims, phase=phase))
        return self._cut[known]


def _alike(have: Layout, want: Layout) -> bool:
    """Whether every device of one has a counterpart in the other, so that nothing is divided anew."""
    return have.places == want.places and [size for _, size in axes_of(have.where)] == [
        size for _, size in axes_of(want.where)
    ]


def _buried(tensor: Tensor, source: Site, target: Site) -> PiperError:
    by = _placed(target) or _placed(source)
    return error(
        "P0411",
        f"what goes from {source.chunk} to {target.chunk} cannot be divided anew",
        by.span if by else None,
        "asks for it",
        notes=[
            f"the samples of {tensor.name.removeprefix('d:')} are inside a dimension, not outermost",
            f"in the model: {', '.join(target.chunk.modules[:3])}",
        ],
        help="divide both alike, or keep the batch in the first dimension where the model is cut",
    )


def _placed(site: Site) -> d.Directive | None:
    return next((use.directive for axis, _ in axes_of(site.where) if (use := site.uses.get(axis))), None)


def _text(point: Point) -> str:
    return ".".join(map(str, point))
