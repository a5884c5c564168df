"""The form of a saved plan, field by field: JSON has neither tuples nor numbers as keys, so each field knows what it
becomes.

Every reader takes what JSON gave and gives back what the plan had, or raises Broken; whoever called it says where that
was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from piperlang.ir.graph import COMPUTE
from piperlang.ir.model import Divide

Read = Callable[[Any], Any]


class Broken(Exception):
    """What a file says that no plan would say."""

    def of(self, what: str) -> Broken:
        return Broken(f"{what}: {self}")


def _fail(wanted: str, got: Any) -> Broken:
    shown = repr(got)
    return Broken(f"{shown if len(shown) < 60 else shown[:57] + '...'} is not {wanted}")


def integer(data: Any) -> int:
    if type(data) is not int:
        raise _fail("a whole number", data)
    return data


def number(data: Any) -> float:
    if type(data) is not float and type(data) is not int:
        raise _fail("a number", data)
    return data


def text(data: Any) -> str:
    if type(data) is not str:
        raise _fail("a text", data)
    return sys.intern(data)


def truth(data: Any) -> bool:
    if type(data) is not bool:
        raise _fail("true or false", data)
    return data


def anything(data: Any) -> Any:
    return data


def maybe(read: Read) -> Read:
    return lambda data: None if data is None else read(data)


def many(read: Read, make: Callable[[Any], Any] = tuple) -> Read:
    """Any number of the same."""

    def reader(data: Any) -> Any:
        if type(data) is not list:
            raise _fail("a list", data)
        return make([read(one) for one in data])

    return reader


def lists(read: Read) -> Read:
    return many(read, list)


def together(*reads: Read) -> Read:
    """A tuple of these."""

    def reader(data: Any) -> Any:
        if type(data) is not list or len(data) != len(reads):
            raise _fail(f"a list of {len(reads)}", data)
        return tuple([read(one) for read, one in zip(reads, data, strict=True)])

    return reader


def named(optional: Mapping[str, Read] | None = None, /, **needed: Read) -> Read:
    """A dict with these keys, in the order in which they come."""
    every = {**needed, **(optional or {})}

    def reader(data: Any) -> Any:
        if type(data) is not dict:
            raise _fail("an object", data)
        missing = needed.keys() - data.keys()
        if missing:
            raise Broken(f"there is no `{min(missing)}`")
        found = {}
        for key, value in data.items():
            if key not in every:
                raise Broken(f"nobody knows what `{key}` is")
            try:
                found[sys.intern(key)] = every[key](value)
            except Broken as problem:
                raise problem.of(f"`{key}`") from None
        return found

    return reader


def table(read: Read, key: Callable[[Any], Any] = text) -> Read:
    """A dict with any keys."""

    def reader(data: Any) -> Any:
        if type(data) is not dict:
            raise _fail("an object", data)
        return {key(name): read(value) for name, value in data.items()}

    return reader


def _numbered(name: Any) -> int:
    if not name.isdecimal():
        raise _fail("a number of an output", name)
    return int(name)


def _divide(data: Any) -> Divide:
    return Divide(**_DIVIDE(data))


def _place(data: Any) -> int | str:
    return data if type(data) is int else text(data)


_DIVIDE = named(axis=text, size=integer, style=text)
SHAPE = many(integer)
INTERVAL = together(integer, integer)
BOX = many(INTERVAL)
KEYS = many(text)
SLOT = together(text, integer)
ARRANGED = together(many(_divide), many(together(SLOT, many(_place))))
OWN = lists(together(text, BOX, BOX))
PARTS = lists(together(integer, integer, maybe(BOX), SHAPE))
TURNS = lists(together(integer, BOX, SHAPE))
ENTRY = named(**{"from": KEYS}, to=text, cuts=lists(INTERVAL), shape=SHAPE)
CHANGE = named(
    weight=text, old=text, grads=KEYS, new=text, take=maybe(INTERVAL), take_grad=maybe(INTERVAL), partial=truth
)
GROUPED = named(
    {"members": lists(integer), "share": number}, group=integer, weights=lists(ENTRY), dtype=text, reduce=text
)
PASS = named(
    {"share": number, "zeros": table(together(SHAPE, text), _numbered)},
    kind=integer,
    reads=many(KEYS),
    first=integer,
    at=lists(integer),
)

ARGUMENTS: dict[str, Read] = {
    **dict.fromkeys(COMPUTE, PASS),
    **dict.fromkeys(("gather", "scatter", "reduce"), GROUPED),
    **dict.fromkeys(("offload", "fetch"), named()),
    "send": named(parts=PARTS, key=maybe(text), dtype=text),
    "recv": named(parts=PARTS, own=OWN, shape=SHAPE, dtype=text),
    "exchange": named(group=integer, members=lists(integer), give=TURNS, take=TURNS, shape=SHAPE, dtype=text),
    **dict.fromkeys(
        ("choose", "dispatch", "combine"),
        named(group=integer, members=lists(integer), experts=integer, shape=SHAPE, dtype=text),
    ),
    "all_reduce": named(group=integer, shape=SHAPE, dtype=text, reduce=text, keep=maybe(BOX)),
    "copy": named(own=OWN, shape=SHAPE, dtype=text),
    "update": named(weights=lists(CHANGE)),
    "norm": named(
        group=integer,
        limit=number,
        dtype=text,
        reduce=text,
        weights=lists(named(weight=text, grads=KEYS, take_grad=maybe(INTERVAL), counts=truth)),
    ),
}
"""What each kind of instruction is told."""

KINDS = lists(
    named(
        op=text,
        chunk=integer,
        samples=integer,
        arranged=ARRANGED,
        slots=many(SLOT),
        gives=many(SLOT),
        loss=maybe(integer),
        routed=truth,
    )
)
DEVICE = named(
    device=integer,
    feeds=lists(together(text, text, BOX)),
    weights=table(named(weight=text, box=BOX, flat=maybe(INTERVAL), first=truth)),
    next=table(text),
    losses=table(number),
)


def _about(data: Any) -> dict[str, Any]:
    """What `about` wrote; whoever saves a plan may add to it."""
    found: dict[str, Any] = table(anything)(data)
    for part in ("files", "parameters", "versions"):
        if part in found:
            try:
                found[part] = table(text)(found[part])
            except Broken as problem:
                raise problem.of(f"`{part}`") from None
    return found


PLAN = named(
    about=_about,
    samples=integer,
    combine=text,
    seconds=number,
    groups=lists(together(many(integer), text)),
    kinds=KINDS,
    names=lists(text),
    lines=lists(text),
)
