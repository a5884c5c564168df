"""Placement of the chunks that the script names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from piperlang.core.mesh import Submesh
from piperlang.core.selector import Conjunction, TagValue
from piperlang.diagnostics import Label, error
from piperlang.syntax.words import RESERVED_KEYS

if TYPE_CHECKING:
    from piperlang.directives.place import Place
    from piperlang.directives.split import Split

Chunk: TypeAlias = frozenset[tuple[str, TagValue]]
Box: TypeAlias = tuple[tuple[str, frozenset[int]], ...]
"""The placed microbatches, by split; the empty box is all of them."""


MAX_CHUNKS = 20_000
MAX_PARTS = 1_000


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    chunk: Chunk
    box: Box
    where: Submesh
    devices: frozenset[int]
    directive: Place


def shown(chunk: Chunk) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(chunk, key=str)) or "the untagged chunk"


@dataclass
class Placements:
    by_chunk: dict[Chunk, list[PlacedChunk]] = field(default_factory=dict)
    by_tag: dict[tuple[str, TagValue], list[Chunk]] = field(default_factory=dict)
    """The chunks by tag, so that a lookup visits only the matching ones."""
    open: list[Place] = field(default_factory=list)
    """Placements of chunks that only a model can list."""
    model: tuple[Chunk, ...] | None = None
    """All chunks of the model, if there is one; then selectors must match existing chunks."""
    notes: Callable[[Chunk], tuple[str, ...]] = lambda chunk: ()
    """Notes about a chunk that the model adds to diagnostics."""

    def __post_init__(self) -> None:
        for chunk in self.model or ():
            self._index(chunk)

    def _index(self, chunk: Chunk) -> None:
        for pair in chunk:
            self.by_tag.setdefault(pair, []).append(chunk)

    def chunks(self) -> Iterable[Chunk]:
        return self.by_chunk if self.model is None else self.model

    def listed(self, tags: Conjunction) -> list[Chunk]:
        """The chunks known so far that match conditions on tags."""
        exact = next((c for c in tags if c.test == "in"), None)
        among = (
            self.chunks()
            if exact is None
            else [chunk for value in exact.values for chunk in self.by_tag.get((exact.key, value), ())]
        )
        return [chunk for chunk in among if all(c.holds(dict(chunk)) for c in tags)]

    def add(self, new: PlacedChunk) -> None:
        known = self.by_chunk.setdefault(new.chunk, [])
        if len(known) >= MAX_PARTS:
            raise error(
                "P0208", f"{shown(new.chunk)} is placed by more than {MAX_PARTS:,} directives", new.directive.span
            )
        if not known and self.model is None:
            self._index(new.chunk)
        for old in known:
            if _meet(old.box, new.box):
                raise error(
                    "P0401",
                    f"{shown(new.chunk)} is placed twice",
                    new.directive.span,
                    f"placed again, on {new.where}",
                    also=[Label(old.directive.span, f"first placed on {old.where} here")],
                    notes=self.notes(new.chunk),
                    help="a chunk has one placement; to place some microbatches on other devices, name them: `mb=0:4`",
                )
        known.append(new)

    def here(self, chunk: Chunk, device: int) -> list[PlacedChunk]:
        return [p for p in self.by_chunk.get(chunk, ()) if device in p.devices]


def _meet(a: Box, b: Box) -> bool:
    mine = dict(a)
    return all(not mine.get(name, these).isdisjoint(these) for name, these in b)


def spread(conjunction: Conjunction, splits: Mapping[str, Split], known: Placements) -> list[tuple[Chunk, Box]] | None:
    """The chunks that a conjunction names, each with its microbatches.

    Without a model, the chunks named by value; None where only a model can tell: tags given by presence or absence, and
    more chunks than the limit."""
    tags: dict[str, tuple[TagValue, ...]] = {}
    box: dict[str, frozenset[int]] = {}
    if known.model is not None:
        for c in conjunction:
            if c.key in splits:
                box[c.key] = frozenset(c.positions(splits[c.key].count)) & box.get(
                    c.key, frozenset(range(splits[c.key].count))
                )
        found = known.listed(tuple(c for c in conjunction if c.key not in splits and c.key not in RESERVED_KEYS))
        return [(chunk, tuple(box.items())) for chunk in found]
    for condition in conjunction:
        key = condition.key
        if key in splits:
            these = frozenset(condition.positions(splits[key].count))
            box[key] = these & box.get(key, these)
        elif key in RESERVED_KEYS:
            continue
        elif condition.test == "in":
            tags[key] = condition.values
        elif condition.test == "range" and condition.low is not None and condition.high is not None:
            tags[key] = tuple(range(condition.low, min(condition.high, condition.low + MAX_CHUNKS + 1)))
        else:
            return None
    if not tags:
        return None
    if prod(map(len, tags.values())) > MAX_CHUNKS:
        return None
    return [(frozenset(zip(tags, values, strict=True)), tuple(box.items())) for values in product(*tags.values())]
