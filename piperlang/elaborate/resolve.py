"""Resolves a conjunction of an order to chunks, passes and microbatches, as far as possible without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from piperlang.core.selector import Condition, Conjunction, Selector, TagValue
from piperlang.diagnostics import did_you_mean, error
from piperlang.elaborate.placement import MAX_CHUNKS, Chunk, Placements
from piperlang.syntax.words import RESERVED_KEYS

if TYPE_CHECKING:
    from piperlang.directives.split import Split

NEXT = ("next", "next?")


@dataclass(frozen=True)
class Meant:
    """One chunk that a conjunction selects."""

    chunk: Chunk
    tags: dict[str, TagValue]
    passes: tuple[str, ...]
    dimensions: tuple[str, ...]
    """The splits that divide the chunk."""
    values: tuple[tuple[int, ...], ...]
    """For each split, the positions that satisfy the conditions."""
    chooses: int | None
    """The split in which `next` selects."""
    optional: bool
    """`next?`: selecting nothing is allowed."""


@dataclass
class Resolver:
    placements: Placements
    splits: Mapping[str, Split]
    _known: dict[Conjunction, tuple[Meant, ...]] = field(default_factory=dict)
    _at: dict[tuple[str, Conjunction], tuple[int, ...]] = field(default_factory=dict)

    def forget(self) -> None:
        """A new placement or split can change what a conjunction selects."""
        self._known.clear()
        self._at.clear()

    def meant(self, conjunction: Conjunction, selector: Selector) -> tuple[Meant, ...]:
        if conjunction not in self._known:
            self._known[conjunction] = tuple(
                self._meant(chunk, conjunction, selector) for chunk in self._chunks(self.tags(conjunction), selector)
            )
        return self._known[conjunction]

    def unknowable(self, conjunction: Conjunction) -> bool:
        """Whether only a model can tell: some placements list no chunks, and no listed chunk matches."""
        tags = self.tags(conjunction)
        return bool(self.placements.open) and not self.placements.listed(tags) and not any(c.test in NEXT for c in tags)

    def tags(self, conjunction: Conjunction) -> Conjunction:
        return tuple(c for c in conjunction if c.key not in self.splits and c.key not in RESERVED_KEYS)

    def _meant(self, chunk: Chunk, conjunction: Conjunction, selector: Selector) -> Meant:
        tags = dict(sorted(chunk, key=str))
        names = tuple(
            name for name, split in self.splits.items() if split.selector is None or split.selector.matches(tags)
        )
        values = tuple(self._known_positions(name, conjunction) for name in names)
        choosing = [c for c in conjunction if c.test in NEXT]
        if len({c.key for c in choosing}) > 1:
            raise error(
                "P0304",
                "`next` may be used in one split per selector",
                selector.span,
                help="write the index in the other split",
            )
        if not _passes(conjunction):
            raise error(
                "P0302", "selector matches no nodes", selector.span, "its conditions on `pass` exclude each other"
            )
        at = names.index(choosing[0].key) if choosing and choosing[0].key in names else None
        return Meant(chunk, tags, _passes(conjunction), names, values, at, any(c.test == "next?" for c in choosing))

    def _known_positions(self, name: str, conjunction: Conjunction) -> tuple[int, ...]:
        """The same for all chunks."""
        key = name, conjunction
        if key not in self._at:
            self._at[key] = self._positions(name, conjunction)
        return self._at[key]

    def _positions(self, name: str, conjunction: Conjunction) -> tuple[int, ...]:
        first, *others = [c for c in conjunction if c.key == name and c.test not in NEXT] or [
            Condition(name, "present")
        ]
        return tuple(at for at in first.positions(self.splits[name].count) if all(c.holds({name: at}) for c in others))

    # ------------------------------------------------------------------------------------------------------ chunks

    def _chunks(self, tags: Conjunction, selector: Selector) -> Iterator[Chunk]:
        unknown = next((c for c in tags if c.test in NEXT), None)
        if unknown is not None:
            names = ", ".join(f"`{name}`" for name in self.splits)
            raise error(
                "P0303",
                f"unknown split `{unknown.key}`",
                selector.span,
                f"the splits before this line are {names}" if names else "there is no split before this line",
                help=did_you_mean(unknown.key, self.splits)
                or f"add `split batch into N as {unknown.key}` before this line",
            )
        found = self.placements.listed(tags)
        if found:
            yield from found
        elif tags and all(c.test == "in" for c in tags) and not self.placements.chunks():
            # Nothing is placed so far: accepted now, checked at the end of the script.
            if prod(len(c.values) for c in tags) > MAX_CHUNKS:
                raise error(
                    "P0208", "this selector names too many chunks", selector.span, f"the limit is {MAX_CHUNKS:,}"
                )
            for values in product(*(c.values for c in tags)):
                yield frozenset(zip((c.key for c in tags), values, strict=True))
        else:
            raise self.nothing(tags, selector)

    def _names(self, key: str) -> list[TagValue]:
        values = {value for chunk in self.placements.chunks() for name, value in chunk if name == key}
        return sorted(values, key=lambda value: (isinstance(value, str), value))

    def nothing(self, tags: tuple[Condition, ...], selector: Selector) -> Exception:
        """The diagnostic for a selector that matches nothing, with the existing values."""
        whose = "the script places" if self.placements.model is None else "the model has"
        for condition in tags:
            values = self._names(condition.key)
            if not values:
                keys = {name for chunk in self.placements.chunks() for name, _ in chunk}
                help = did_you_mean(condition.key, keys | set(self.splits))
                what = (
                    "no chunk placed so far has a tag"
                    if self.placements.model is None
                    else "no chunk of the model has a tag"
                )
                return error(
                    "P0302",
                    "selector matches no nodes",
                    selector.span,
                    f"{what} `{condition.key}`, and there is no such split",
                    help=help,
                )
            if condition.test == "in" and not set(values) & set(condition.values):
                some = _some(condition.key, values)
                near = _closest(condition.values[0], values)
                asked = condition.values[0]
                # If the script computes the value, the quoted line does not show it.
                said = (
                    ""
                    if len(condition.values) > 1 or str(asked) in selector.span.text
                    else f"{condition.key} is {asked} here, and "
                )
                return error(
                    "P0302",
                    "selector matches no nodes",
                    selector.span,
                    f"{said}{whose} {some}",
                    help=f"did you mean `{condition.key}={near}`?",
                )
        return error(
            "P0302",
            "selector matches no nodes",
            selector.span,
            f"no chunk {'placed so far' if self.placements.model is None else 'of the model'} matches all conditions",
        )


def _passes(conjunction: Conjunction) -> tuple[str, ...]:
    named = [c for c in conjunction if c.key == "pass"]
    # I and W exist only where they are named.
    legal = ("F", "B", "I", "W") if any(c.test == "in" for c in named) else ("F", "B")
    return tuple(p for p in legal if all(c.holds({"pass": p}) for c in named))


def _some(key: str, values: list[TagValue]) -> str:
    """`stage=0 to stage=3`, or the values one by one where they have gaps."""
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) == len(values) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{key}={values[0]} to {key}={values[-1]}"
    return ", ".join(f"{key}={v}" for v in values[:6]) + (", ..." if len(values) > 6 else "")


def _closest(wanted: TagValue, values: list[TagValue]) -> TagValue:
    numbers = [v for v in values if isinstance(v, int)]
    if isinstance(wanted, int) and numbers:
        return min(numbers, key=lambda v: abs(v - wanted))
    return values[0]
