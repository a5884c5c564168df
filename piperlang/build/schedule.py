"""A model under the directives so far: what each pass changes and the graph is built from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Protocol

from piperlang.core.mesh import Mesh, Submesh
from piperlang.core.selector import Condition, Conjunction, Selector
from piperlang.diagnostics import error
from piperlang.elaborate.directive import Directive
from piperlang.elaborate.lanes import Item
from piperlang.elaborate.outline import Outline
from piperlang.elaborate.placement import Chunk as Tagset
from piperlang.elaborate.placement import PlacedChunk
from piperlang.ir.layout import axes_of
from piperlang.ir.model import Chunk, Model
from piperlang.source import Source
from piperlang.syntax.words import RESERVED_KEYS

if TYPE_CHECKING:
    from piperlang.directives.mesh import UseMesh
    from piperlang.directives.offload import Offload
    from piperlang.directives.recompute import Recompute
    from piperlang.directives.replicate import Replicate
    from piperlang.directives.shard import Shard
    from piperlang.directives.split import Split
    from piperlang.directives.stream import Stream
    from piperlang.directives.tag import Tag

MANY = 6
ALONE = Submesh(Mesh("device", (), Source("", "").span(0, 0)))
"""Where everything runs when the script names no devices."""


BUCKET = 25_000_000
"""Bytes of gradients reduced together, and of weights updated together, where no directive says otherwise."""

UPDATED = 100_000_000
"""Bytes of weights updated together where nothing is reduced: a GPU then takes about as long for them as the host does
to issue the step. Updates of all weights at once would take no less time, and optimizers that are not fused have
temporary tensors as large as what they step."""


class Keep(IntEnum):
    """How long gathered weights stay, the longer the higher: for a pass, through passes of their chunk that are all
    forwards or all of backwards, or also through the turn from one to the other."""

    PASS = 0
    STAGE = 1
    TURN = 2


class HasModel(Protocol):
    @property
    def model(self) -> Model: ...

    def recomputing(self, cheap: frozenset[int]) -> HasModel: ...


class SupportsCut(Protocol):
    """A traced model, which tags cut into chunks."""

    def cut(self, tags: Iterable[Tag]) -> HasModel: ...

    def check_tag(self, directive: Tag) -> None: ...


@dataclass(frozen=True)
class Use:
    """What a device axis is for, in one chunk: dividing the batch, or dividing the weights."""

    directive: Replicate | Shard
    divides_batch: bool = False
    level: int = 0
    """ZeRO: 1 divides optimizer states, 2 also gradients, 3 also weights."""
    style: str = ""
    bucket: int = BUCKET
    prefetch: int = 1
    keep: Keep = Keep.STAGE
    in_parts: bool = False
    """Whether gradients are added up over microbatches in parts, each reduced by itself."""
    by_weight: bool = False
    """Whether ZeRO gives every weight to one device, instead of a part of it to each."""


class Schedule:
    """What the directives so far have said. Each pass changes its own part of it; the graph is built from all of it."""

    def __init__(self, program: SupportsCut) -> None:
        self.program = program
        self.directives: list[Directive] = []
        self.tag_directives: list[Tag] = []
        self.meshes: dict[Mesh, UseMesh] = {}
        self.uses: dict[Tagset, dict[tuple[Mesh, str], Use]] = {}
        self.streams: list[Stream] = []
        self.by_halves: set[tuple[Tagset, tuple[int, ...]]] = set()
        """Which microbatches of which chunks an order names by halves,"""
        self.by_whole: set[tuple[Tagset, tuple[int, ...]]] = set()
        """and which whole."""
        self.seen_steps: dict[int, int] = {}
        self.halved: dict[Tagset, Directive] = {}
        """Whose backward is in two halves because a directive other than an order names them."""
        self.recomputed: dict[Tagset, Recompute] = {}
        """Whose forward runs again before the backward;"""
        self.cheaply: dict[Tagset, bool] = {}
        """and whether the backward recomputes what is cheap, where a directive says so."""
        self.offloaded: dict[Tagset, Offload] = {}

    @cached_property
    def cut(self) -> HasModel:
        return self.program.cut(self.tag_directives)

    @property
    def captured(self) -> HasModel:
        """The model as it is cut, with what the backwards of chunks recompute."""
        return self.cut.recomputing(
            frozenset(
                chunk.number for chunk in self.cut.model.chunks if self.cheaply.get(chunk.tagset, chunk.recomputes)
            )
        )

    @cached_property
    def outline(self) -> Outline:
        """Placements, splits and orders; what it is asked it answers from the model's chunks."""
        outline = Outline(tuple(self.groups))
        outline.meshes = self.meshes
        outline.placements.notes = lambda group: (self.modules(group),)
        return outline

    @property
    def settled(self) -> bool:
        """Whether the model has been cut: while tags still come, that is put off."""
        return "cut" in self.__dict__

    def recut(self) -> None:
        """New tags cut the model anew, when it is next looked at."""
        for name in ("cut", "outline", "groups"):
            self.__dict__.pop(name, None)

    @property
    def model(self) -> Model:
        return self.captured.model

    @cached_property
    def groups(self) -> dict[Tagset, list[Chunk]]:
        """Chunks by their tags: no selector can tell those of one group apart."""
        found: dict[Tagset, list[Chunk]] = {}
        for chunk in self.model.chunks:
            found.setdefault(chunk.tagset, []).append(chunk)
        return found

    # ------------------------------------------------------------------------------------------------------ queries

    def modules(self, group: Tagset) -> str:
        """Where in the model a group of chunks is."""
        paths = list(dict.fromkeys(path for chunk in self.groups[group] for path in chunk.modules))
        return (
            f"in the model: {', '.join(paths[:MANY])}{', ...' if len(paths) > MANY else ''}"
            if paths
            else "in the model itself, in none of its modules"
        )

    def meant(self, selector: Selector) -> Iterator[tuple[Tagset, Conjunction]]:
        """The groups of chunks that a selector names, by their tags alone; it is an error if there are none."""
        any_found = False
        for conjunction in selector.alternatives:
            for group in self.outline.placements.listed(self._on_tags(conjunction)):
                any_found = True
                yield group, conjunction
        if not any_found:
            raise self.outline.lanes.resolver.nothing(self._on_tags(selector.alternatives[0]), selector)

    def whole_chunks(self, selector: Selector, directive: str) -> Sequence[Tagset]:
        """The groups of chunks that a selector names, for a directive that applies to all of each."""
        for condition in {one: None for conjunction in selector.alternatives for one in conjunction}:
            others = condition.key in ("comm", "update") and condition.test != "absent"
            some = condition.key in self.outline.splits and not self._names_all(condition)
            if others or some:
                named = "some of their microbatches" if some else "what no chunk computes"
                raise error(
                    "P0302",
                    f"`{directive}` applies to whole chunks, and `{condition}` names {named}",
                    selector.span,
                    help=f"omit `{condition}`, and name chunks by their tags",
                )
        return tuple({group: None for group, _ in self.meant(selector)})

    def _names_all(self, condition: Condition) -> bool:
        """Of the parts of a split."""
        count = self.outline.splits[condition.key].count
        next_one = condition.test.startswith("next")
        return condition.test == "absent" or (not next_one and len(condition.positions(count)) == count)

    def _on_tags(self, conjunction: Conjunction) -> Conjunction:
        return tuple(c for c in conjunction if c.key not in self.outline.splits and c.key not in RESERVED_KEYS)

    def splits(self, group: Tagset) -> tuple[Split, ...]:
        """The splits that divide a group's samples: those of the batch first."""
        fitting = [s for s in self.outline.splits.values() if s.selector is None or s.selector.matches(dict(group))]
        return tuple(sorted(fitting, key=lambda s: s.selector is not None))

    def places(self, group: Tagset) -> Sequence[tuple[Submesh, PlacedChunk | None]]:
        if not self.meshes:
            return ((ALONE, None),)
        return [(p.where, p) for p in self.outline.placements.by_chunk.get(group, ())]

    def apart(self, split: str) -> set[frozenset[int]]:
        """The sets of pieces of a split that are placed on their own."""
        return {
            these
            for places in self.outline.placements.by_chunk.values()
            for p in places
            for name, these in p.box
            if name == split and these
        }

    def which(self, item: Item) -> tuple[Tagset, tuple[int, ...]]:
        """The chunks and the microbatch of an ordered piece of work."""
        splits = self.outline.splits
        group = frozenset((key, value) for key, value in item.items() if key not in RESERVED_KEYS and key not in splits)
        return group, tuple(at for split in self.splits(group) if isinstance(at := item[split.name], int))

    def halves(self, group: Tagset, point: tuple[int, ...]) -> tuple[str, ...]:
        """The passes that a backward consists of."""
        named = (group, point) in self.by_halves or (group in self.halved and (group, point) not in self.by_whole)
        return ("I", "W") if named else ("B",)

    def use(self, group: Tagset, where: Submesh, axis: str) -> Use | None:
        return self.uses.get(group, {}).get((where.mesh, axis))

    def degree(self, group: Tagset, where: Submesh) -> int:
        """In how many parts the devices of a part divide its samples."""
        return prod(
            size for axis, size in axes_of(where) if (use := self.use(group, where, axis)) and use.divides_batch
        )
