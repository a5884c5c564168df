"""Where the script puts its chunks, as far as it names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from piperlang.diagnostics import Label, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.selector import Conjunction, TagValue
from piperlang.elaborate.values import Slice

Chunk: TypeAlias = frozenset[tuple[str, TagValue]]
Microbatches: TypeAlias = "frozenset[int] | None"
"""The microbatches meant; None is all of them."""

NOT_TAGS = ("pass", "comm", "update")


@dataclass(frozen=True, slots=True)
class Placement:
    chunk: Chunk
    at: Microbatches
    where: Slice
    directive: d.Place


@dataclass
class Placements:
    by_chunk: dict[Chunk, list[Placement]] = field(default_factory=dict)
    _devices: dict[Slice, frozenset[int]] = field(default_factory=dict)

    def add(self, new: Placement) -> None:
        for old in self.by_chunk.setdefault(new.chunk, []):
            if old.at is None or new.at is None or old.at & new.at:
                what = ", ".join(f"{key}={value}" for key, value in sorted(new.chunk, key=str))
                raise error(
                    "P0401", f"{what} is placed twice", new.directive.span, f"now on {new.where}",
                    also=[Label(old.directive.span, f"placed on {old.where} here")], help="a chunk runs in one place; to run some microbatches elsewhere, name them: `mb=0:4`",
                )  # fmt: skip
        self.by_chunk[new.chunk].append(new)

    def devices(self, where: Slice) -> frozenset[int]:
        if where not in self._devices:
            self._devices[where] = frozenset(where.devices())
        return self._devices[where]

    def here(self, chunk: Chunk, device: int) -> tuple[bool, Microbatches, list[Placement]]:
        """Whether `chunk` runs on `device`, for which microbatches, and all its placements."""
        known = self.by_chunk.get(chunk, [])
        mine = [p for p in known if device in self.devices(p.where)]
        if not mine:
            return False, None, known
        if any(p.at is None for p in mine):
            return True, None, known
        return True, frozenset(at for p in mine for at in p.at or ()), known


def spread(conjunction: Conjunction, splits: Mapping[str, d.Split]) -> Iterator[tuple[Chunk, Microbatches]]:
    """The chunks a conjunction names outright, each with the microbatches it is limited to.

    Tags given by presence or absence need a model to be listed; those conjunctions name no chunk here.
    """
    tags: dict[str, tuple[TagValue, ...]] = {}
    at: Microbatches = None
    for condition in conjunction:
        if condition.key in splits:
            whole = range(splits[condition.key].count)
            these = frozenset(i for i in whole if condition.holds({condition.key: i}))
            at = these if at is None else at & these
        elif condition.key in NOT_TAGS:
            continue
        elif condition.test == "in":
            tags[condition.key] = condition.values
        elif condition.test == "range" and condition.low is not None and condition.high is not None:
            tags[condition.key] = tuple(range(condition.low, min(condition.high, condition.low + 100_000)))
        else:
            return
    if not tags:
        return
    for values in product(*tags.values()):
        yield frozenset(zip(tags, values, strict=True)), at
