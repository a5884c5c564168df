"""Interning: equal values of a class are one object."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class _Interning(type):
    known: dict[tuple[Any, ...], Any]

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        cls.known = {}

    def __call__(cls, *given: Any) -> Any:
        found = cls.known.get(given)
        if found is None:
            rest = fields(cls)[len(given) :]  # type: ignore[arg-type]
            whole = (*given, *(one.default for one in rest))
            found = cls.known.get(whole) or super().__call__(*whole)
            cls.known[given] = cls.known[whole] = found
        return found


class Interned(metaclass=_Interning):
    """Base of frozen dataclasses, declared with `eq=False`, whose equal values are one object, also after pickling.
    Comparing and hashing then cost what they cost for identities: graphs and plans look up ids by the million.

    Fields are given by position. A process keeps every value it has made."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]
