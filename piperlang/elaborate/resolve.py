"""Which chunks, passes and microbatches a conjunction of an order means, as far as the script alone can tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

from piperlang.diagnostics import did_you_mean, error
from piperlang.elaborate import directive as d
from piperlang.elaborate.placement import MAX_CHUNKS, Chunk, Placements
from piperlang.elaborate.selector import Condition, Conjunction, Selector, TagValue
from piperlang.syntax.words import RESERVED_KEYS

NEXT = ("next", "next?")


@dataclass(frozen=True)
class Meant:
    """One chunk that a conjunction means."""

    chunk: Chunk
    tags: dict[str, TagValue]
    passes: tuple[str, ...]
    dimensions: tuple[str, ...]
    """The splits that divide the chunk."""
    values: tuple[tuple[int, ...], ...]
    """For each dimension, the positions that the conditions leave."""
    chooses: int | None
    """The dimension in which `next` chooses."""
    optional: bool
    """`next?`: nothing is fine too."""


@dataclass
class Resolver:
    placements: Placements
    splits: Mapping[str, d.Split]
    _known: dict[Conjunction, tuple[Meant, ...]] = field(default_factory=dict)

    def forget(self) -> None:
        """A new placement or split can change what a conjunction means."""
        self._known.clear()

    def meant(self, conjunction: Conjunction, selector: Selector) -> tuple[Meant, ...]:
        if conjunction not in self._known:
            self._known[conjunction] = tuple(
                self._meant(chunk, conjunction, selector) for chunk in self._chunks(self.tags(conjunction), selector)
            )
        return self._known[conjunction]

    def unknowable(self, conjunction: Conjunction) -> bool:
        """Whether only a model can tell: some placements list no chunks, and none that is listed fits."""
        tags = self.tags(conjunction)
        return bool(self.placements.open) and not self.placements.listed(tags) and not any(c.test in NEXT for c in tags)

    def tags(self, conjunction: Conjunction) -> Conjunction:
        return tuple(c for c in conjunction if c.key not in self.splits and c.key not in RESERVED_KEYS)

    def _meant(self, chunk: Chunk, conjunction: Conjunction, selector: Selector) -> Meant:
        tags = dict(sorted(chunk, key=str))
        names = tuple(
            name for name, split in self.splits.items() if split.selector is None or split.selector.matches(tags)
        )
        values = tuple(self._positions(name, conjunction) for name in names)
        choosing = [c for c in conjunction if c.test in NEXT]
        if len({c.key for c in choosing}) > 1:
            raise error(
                "P0304", "`next` chooses in one split at a time", selector.span, help="name the position in the other"
            )
        if not _passes(conjunction):
            raise error("P0302", "selector matches no nodes", selector.span, "its passes exclude each other")
        at = names.index(choosing[0].key) if choosing and choosing[0].key in names else None
        return Meant(chunk, tags, _passes(conjunction), names, values, at, any(c.test == "next?" for c in choosing))

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
                f"there is no split `{unknown.key}`",
                selector.span,
                f"the splits so far are {names}" if names else "nothing is split so far",
                help=did_you_mean(unknown.key, self.splits) or f"add `split batch into N as {unknown.key}` before",
            )
        found = self.placements.listed(tags)
        if found:
            yield from found
        elif tags and all(c.test == "in" for c in tags) and not self.placements.chunks():
            # Nothing is placed so far: taken at its word, and reported when the script has ended.
            if prod(len(c.values) for c in tags) > MAX_CHUNKS:
                raise error("P0208", "this selector names too many chunks", selector.span, f"at most {MAX_CHUNKS:,}")
            for values in product(*(c.values for c in tags)):
                yield frozenset(zip((c.key for c in tags), values, strict=True))
        else:
            raise self.nothing(tags, selector)

    def _names(self, key: str) -> list[TagValue]:
        values = {value for chunk in self.placements.chunks() for name, value in chunk if name == key}
        return sorted(values, key=lambda value: (isinstance(value, str), value))

    def nothing(self, tags: tuple[Condition, ...], selector: Selector) -> Exception:
        """Why nothing fits, and what there is instead."""
        whose = "the script places" if self.placements.model is None else "the model has"
        for condition in tags:
            values = self._names(condition.key)
            if not values:
                keys = {name for chunk in self.placements.chunks() for name, _ in chunk}
                help = did_you_mean(condition.key, keys | set(self.splits))
                what = (
                    "nothing placed so far has a tag"
                    if self.placements.model is None
                    else "nothing in the model has a tag"
                )
                return error(
                    "P0302",
                    "selector matches no nodes",
                    selector.span,
                    f"{what} `{condition.key}`, and no split is called so",
                    help=help,
                )
            if condition.test == "in" and not set(values) & set(condition.values):
                some = _some(condition.key, values)
                near = _closest(condition.values[0], values)
                asked = condition.values[0]
                # Where the script computes it, the text does not show what it came to.
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
            f"nothing {'placed so far' if self.placements.model is None else 'in the model'} fits all of it",
        )


def _passes(conjunction: Conjunction) -> tuple[str, ...]:
    named = [c for c in conjunction if c.key == "pass"]
    # The halves of a backward exist where they are named.
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
