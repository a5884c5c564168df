"""Interning: equal values of a class are one object."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class _Interning(type):
    known: dict[tuple[Any, ...], Any]
    defaults: tuple[Any, ...] | None
    """Of all fields, as soon as a first value has been made."""

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> None:
        super().__init__(name, bases, body)
        cls.known, cls.defaults = {}, None

    def __call__(cls, *given: Any) -> Any:
        defaults = cls.defaults
        if defaults is None:
            defaults = cls.defaults = tuple(one.default for one in fields(cls))  # type: ignore[arg-type]
        if len(given) != len(defaults):
            given += defaults[len(given) :]
        found = cls.known.get(given)
        if found is None:
            found = cls.known[given] = super().__call__(*given)
        return found


class Interned(metaclass=_Interning):
    """Base of frozen dataclasses, declared with `eq=False`, whose equal values are one object, also after pickling.
    Comparing and hashing then cost what they cost for identities: graphs and plans look up ids by the million.

    Fields are given by position. A process keeps every value it has made."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))  # type: ignore[arg-type]
