"""Ids of values: which tensor of one training step, of which microbatch, and what has been made of it since."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias
from urllib.parse import quote, unquote

from piperlang.core.interned import Interned

Point: TypeAlias = tuple[int, ...]
"""A microbatch: an index for each split."""


class Kind(Enum):
    """What a value is. The comment says what its name and its owner are."""

    ACTIVATION = "x"  # tensor
    BATCH = "batch"  # tensor; the chunk that reads it
    GRADIENT = "d"  # tensor; the chunk that reads the tensor, and its input
    SAVED = "saved"  # the chunk: its activations for the backward, as one value
    RESIDUALS = "kept"  # the chunk: what its I keeps for its W, as one value
    HOST = "host"  # the chunk: its activations in host memory
    WEIGHT = "w"  # weight; its replica, and for gathered shards the chunk that they are gathered for
    WEIGHT_GRADIENT = "dw"  # weight; the chunk that computes it, and its input
    REDUCED = "g"  # weight; its replica: a gradient that a collective has summed
    SPLITS = "splits"  # the expert indices that they follow: how many tokens go where
    SIGNAL = "signal"  # the device and the node that it comes from: a message without data
    SUPPLIED = "given"  # what the runtime supplies
    NORM = "norm"  # the factor that clips the gradients

    __hash__ = object.__hash__  # a member is one object; Enum's own is written in Python


@dataclass(frozen=True, slots=True, eq=False)
class ValueId(Interned):
    kind: Kind
    name: str = ""
    owner: tuple[int, ...] = ()
    microbatch: Point | None = None
    """None where the value is not of one microbatch."""
    change: str = ""
    """What has been done to `source` to make this value."""
    source: ValueId | None = None

    def at(self, microbatch: Point) -> ValueId:
        """The same of one microbatch."""
        return ValueId(self.kind, self.name, self.owner, microbatch)

    # The same value after it has been redistributed, sliced, sent, summed or updated is another value.

    def changed(self, change: str) -> ValueId:
        kind, microbatch = self.kind, self.microbatch
        if change == _SPLITS:
            kind = Kind.SPLITS
        elif change[0] == "/":
            microbatch = (*(microbatch or ()), *_numbers(change[1:]))
        return ValueId(kind, self.name, self.owner, microbatch, change, self)

    def redistributed(self, to: int) -> ValueId:
        """Of a microbatch: in another layout, which the graph numbers."""
        return self.changed(f"@{to}")

    def sliced(self, inner: Point) -> ValueId:
        """Of one part of the microbatch."""
        return self.changed(f"/{_dotted(inner)}")

    @property
    def is_slice(self) -> bool:
        return self.change.startswith("/")

    @property
    def joined(self) -> ValueId:
        """Of the whole microbatch, where its parts are separate values."""
        return self.changed(_JOINED)

    def joins(self, part: ValueId) -> bool:
        """Whether this is of a whole microbatch, and `part` of a part of it."""
        whole, inner = self.source, part.microbatch
        if self.change != _JOINED or whole is None or whole.microbatch is None or inner is None:
            return False
        return whole.at(inner) is part and inner[: len(whole.microbatch)] == whole.microbatch

    @property
    def sent(self) -> ValueId:
        """On its way to another submesh."""
        return self.changed("!sent")

    @property
    def splits(self) -> ValueId:
        """Of expert indices: how many tokens go where."""
        return self.changed(_SPLITS)

    @property
    def fetched(self) -> ValueId:
        """Back from host memory."""
        return self.changed("!fetched")

    @property
    def updated(self) -> ValueId:
        """The weight after the step."""
        return self.changed("'")

    @property
    def total(self) -> ValueId:
        """The sum of gradients, the first of which this is."""
        return self.changed("!total")

    @property
    def is_total(self) -> bool:
        return self.change == "!total"

    # -------------------------------------------------------------------------------------------------- relations

    @property
    def origin(self) -> ValueId:
        """The value before anything was done to it."""
        found = self
        while found.source is not None:
            found = found.source
        return found

    def follows(self, other: ValueId) -> bool:
        """Whether this is `other`, or was made from it."""
        found: ValueId | None = self
        while found is not None and found is not other:
            found = found.source
        return found is other

    @property
    def every_microbatch(self) -> ValueId:
        """What the ids of the same value of all microbatches have in common."""
        first = self.origin
        return ValueId(first.kind, first.name, first.owner, None, first.change)

    # ------------------------------------------------------------------------------------------------------- text

    def __str__(self) -> str:
        if self.source is not None:
            return f"{self.source}{self.change}"
        head = "" if self.kind is Kind.ACTIVATION else f"{self.kind.value}:"
        owner = f"{'@' if self.name else ''}{_dotted(self.owner)}" if self.owner else ""
        microbatch = "" if self.microbatch is None else f"#{_dotted(self.microbatch)}"
        return f"{head}{quote(self.name, safe='')}{owner}{microbatch}{self.change}"

    def __lt__(self, other: ValueId) -> bool:
        return str(self) < str(other)


SEED = ValueId(Kind.SUPPLIED, "seed")
"""The gradient of the loss: each device's share of the batch."""
RNG = ValueId(Kind.SUPPLIED, "rng")
NORM_FACTOR = ValueId(Kind.NORM)

_SPLITS, _JOINED = "!splits", "!joined"
_ID = re.compile(r"(?:([a-z]+):)?([^@#:!/']*)(?:@([\d.]+))?(?:#([\d.]*))?(:[\w.]+)?((?:[@/][\d.]+|![a-z]+|')*)")
_CHANGE = re.compile(r"[@/][\d.]+|![a-z]+|'")


def parse(text: str) -> ValueId | None:
    """The id that is printed so; None for any other text."""
    found = _ID.fullmatch(text)
    if found is None or (found[1] and found[1] not in _KINDS):
        return None
    head, name, owner, microbatch, change, changes = found.groups()
    kind = _KINDS[head or "x"]
    if kind in _NAMELESS:
        name, owner = "", name
    try:
        value = ValueId(
            kind,
            unquote(name),
            _numbers(owner or ""),
            None if microbatch is None else _numbers(microbatch),
            change or "",
        )
        for one in _CHANGE.findall(changes):
            value = value.changed(one)
    except ValueError:  # such as two dots in a row
        return None
    return value


_KINDS = {kind.value: kind for kind in Kind}
_NAMELESS = (Kind.SAVED, Kind.RESIDUALS, Kind.HOST, Kind.SIGNAL)


def _dotted(numbers: Point) -> str:
    return ".".join(map(str, numbers))


def _numbers(dotted: str) -> Point:
    return tuple(map(int, dotted.split("."))) if dotted else ()
