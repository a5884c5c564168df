"""place: runs chunks on devices, with sends and receives where producer and consumer are on different submeshes.

    mesh gpu = pp: 2
    place [stage=0] on gpu[pp=0]
    place [stage=1] on gpu[pp=1]

Before:

    F[stage=0]  device  4 weights -> [8, 16]
    F[stage=1]  device  4 weights -> []
    B[stage=1]  device  2 weights -> [8, 16], 4 gradients
    B[stage=0]  device  1 weight -> 4 gradients
    ...

After:

    F[stage=0]  gpu[pp=0]  4 weights -> [8, 16]
    send.F[stage=0]  gpu[pp=0]  [8, 16]
    recv.F[stage=1]  gpu[pp=1]  [8, 16]
    F[stage=1]  gpu[pp=1]  4 weights -> []
    B[stage=1]  gpu[pp=1]  2 weights -> [8, 16], 4 gradients
    send.B[stage=1]  gpu[pp=1]  [8, 16]
    recv.B[stage=0]  gpu[pp=0]  [8, 16]
    B[stage=0]  gpu[pp=0]  1 weight -> 4 gradients
    ...

Submeshes may have different numbers of devices: a transfer between them also redistributes the tensor. Between two
meshes over the same devices it is one all-to-all, and nothing where each device has its part already.

Preconditions: the chunks exist; none of them is already placed for the same microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from piperlang.core.mesh import Submesh
from piperlang.core.selector import Selector
from piperlang.diagnostics import PiperError, error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.placement import MAX_CHUNKS, PlacedChunk, spread
from piperlang.syntax import tree

if TYPE_CHECKING:
    from piperlang.build.schedule import Schedule
    from piperlang.elaborate.interpret import Interpreter
    from piperlang.elaborate.outline import Outline


@dataclass(frozen=True)
class Place(Directive):
    """place SELECTOR on MESH[AXIS=AT]
    Place chunks on devices. Sends and receives are inserted where producer and consumer differ."""

    nodes = (tree.PlaceOn,)

    selector: Selector
    where: Submesh

    @classmethod
    def read(cls, script: Interpreter, node: tree.PlaceOn) -> Place:
        return cls(script.settled(node.selector), script.where(node.where), **script.written(node))

    def __str__(self) -> str:
        return f"place {self.selector} on {self.where}"

    def apply_to_outline(self, outline: Outline) -> None:
        for mesh_axis, _ in self.where.picks:
            outline.used.add((self.where.mesh, mesh_axis))
        devices = frozenset(self.where.devices())
        for conjunction in self.selector.alternatives:
            named = spread(conjunction, outline.splits, outline.placements)
            if named is None:
                outline.placements.open.append(self)
            elif not named and outline.placements.model is not None:
                resolver = outline.lanes.resolver
                raise resolver.nothing(resolver.tags(conjunction), self.selector)
            elif not named:
                raise self._selects_nothing("it contains an empty range; ranges are half-open")
            for chunk, box in named or ():
                if any(not these for _, these in box):
                    sizes = ", ".join(f"{name}=0:{split.count}" for name, split in outline.splits.items())
                    raise self._selects_nothing(f"it selects no microbatch of {sizes}")
                if len(outline.tagged) > MAX_CHUNKS:
                    raise error(
                        "P0208", f"more than {MAX_CHUNKS:,} chunks are placed", self.span, help="check the ranges"
                    )
                outline.placements.add(PlacedChunk(chunk, box, self.where, devices, self))
                outline.tagged.setdefault(chunk, self)
        outline.lanes.forget()

    def apply_to_schedule(self, schedule: Schedule) -> None:
        schedule.outline.apply(self)

    def _selects_nothing(self, why: str) -> PiperError:
        return error("P0302", "selector matches no nodes", self.selector.span, why)
