"""Selectors as values: the nodes of the graph that a directive applies to.

A selector is a union of conjunctions of conditions over a node's attributes (tags, `pass`, `comm`, split dimensions).
It does not depend on a graph: `matches` tests one node's attributes, and an index may use `conditions` directly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from piperlang.source import Span

TagValue: TypeAlias = int | str | bool
Attributes: TypeAlias = Mapping[str, TagValue]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on `key`: `test` says how `values`, `low` and `high` are read."""

    key: str
    test: str
    """One of: `in`, `not in` (values), `range`, `not range` (low, high), `present`, `absent`, `next`, `next?`."""
    values: tuple[TagValue, ...] = ()
    low: int | None = None
    high: int | None = None

    def holds(self, attributes: Attributes) -> bool:
        value = attributes.get(self.key)
        if value is None:
            return self.test == "absent"
        if self.test in ("in", "not in"):
            return (value in self.values) == (self.test == "in")
        if self.test in ("range", "not range"):
            inside = (
                isinstance(value, int)
                and (self.low is None or value >= self.low)
                and (self.high is None or value < self.high)
            )
            return inside == (self.test == "range")
        return self.test != "absent"

    def positions(self, count: int) -> Sequence[int]:
        """The positions among 0 to count - 1 for which it holds."""
        if self.test == "in":
            return sorted({at for at in self.values if isinstance(at, int) and 0 <= at < count})
        if self.test == "range":
            return range(max(0, self.low or 0), min(count, count if self.high is None else self.high))
        return [at for at in range(count) if self.holds({self.key: at})]

    def __str__(self) -> str:
        key = self.key
        if self.test == "absent":
            return f"!{key}"
        if self.test in ("present", "next", "next?"):
            return f"{key}={'*' if self.test == 'present' else self.test}" if key != "update" else key
        sign = "!=" if self.test.startswith("not") else "="
        if self.test.endswith("range"):
            return f"{key}{sign}{'' if self.low is None else self.low}:{'' if self.high is None else self.high}"
        words = [str(v) if key in ("pass", "comm") or not isinstance(v, str) else f'"{v}"' for v in self.values]
        return f"{key}{sign}{words[0] if len(words) == 1 else '{' + ', '.join(words) + '}'}"


Conjunction: TypeAlias = tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Selector:
    alternatives: tuple[Conjunction, ...]
    span: Span = field(compare=False, repr=False)

    def matches(self, attributes: Attributes) -> bool:
        return any(all(condition.holds(attributes) for condition in conjunction) for conjunction in self.alternatives)

    def next_keys(self) -> tuple[str, ...]:
        """The splits in which `next` selects: at most one is valid."""
        return tuple(
            dict.fromkeys(
                c.key for conjunction in self.alternatives for c in conjunction if c.test in ("next", "next?")
            )
        )

    def size(self) -> int:
        """The number of conditions and values: the cost of visiting it."""
        return sum(1 + len(c.values) for conjunction in self.alternatives for c in conjunction)

    def union(self, other: Selector, span: Span) -> Selector:
        return Selector(tuple(dict.fromkeys(self.alternatives + other.alternatives)), span)

    def meet(self, other: Selector, span: Span) -> Selector:
        return Selector(tuple(a + b for a, b in product(self.alternatives, other.alternatives)), span)

    def __str__(self) -> str:
        return " | ".join(f"[{', '.join(map(str, conjunction))}]" for conjunction in self.alternatives)
