"""Typed values to JSON and back. A reader is derived from each type's declaration: JSON has neither tuples nor records,
so every field is rebuilt as what its type says, or refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from piperlang.core import placement, value_id
from piperlang.core.placement import Placement
from piperlang.core.value_id import ValueId

Read = Callable[[Any], Any]


class InvalidRecord(Exception):
    """A file says something that no plan would say."""

    def of(self, what: str) -> InvalidRecord:
        return InvalidRecord(f"{what}: {self}")


def encode(value: Any) -> Any:
    """For `json.dumps(default=...)`: a dataclass by its init fields; named tuples become lists by themselves."""
    if isinstance(value, ValueId | Placement):
        return _printed(value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
        return {name: _keyed(one) if isinstance(one, dict) else one for name, one in found.items()}
    raise TypeError(f"a plan holds a {type(value).__name__}")


_printed, _parsed = cache(str), cache(value_id.parse)
"""A plan names every value many times."""


def _keyed(table: dict[Any, Any]) -> dict[str, Any]:
    return {_printed(key): value for key, value in table.items()}


@cache
def reader(kind: Any) -> Read:
    """How a value of a type is read."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _either(args)
    if origin is tuple:
        return _many(reader(args[0]), tuple) if args[1:] == (...,) else _together(tuple(map(reader, args)))
    if origin is list:
        return _many(reader(args[0]), list)
    if origin is dict:
        return _table(reader(args[0]), reader(args[1]))
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        read = _together(tuple(reader(hints[name]) for name in kind._fields), kind._fields)
        return lambda data: kind(*read(data))
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [one.name for one in fields(kind) if one.init]
        read = _named({name: reader(hints[name]) for name in names})
        return lambda data: kind(**read(data))  # type: ignore[operator]
    raise TypeError(f"no reader for {kind}")


def _fail(wanted: str, got: Any) -> InvalidRecord:
    shown = repr(got)
    return InvalidRecord(f"{shown if len(shown) < 60 else shown[:57] + '...'} is not {wanted}")


def _integer(data: Any) -> int:
    if type(data) is not int:
        raise _fail("an integer", data)
    return data


def _number(data: Any) -> float:
    if type(data) is not float and type(data) is not int:
        raise _fail("a number", data)
    return data


def _text(data: Any) -> str:
    if type(data) is not str:
        raise _fail("a string", data)
    return sys.intern(data)


def _truth(data: Any) -> bool:
    if type(data) is not bool:
        raise _fail("true or false", data)
    return data


def _value_id(data: Any) -> ValueId:
    found = _parsed(data) if type(data) is str else None
    if found is None:
        raise _fail("the id of a value", data)
    return found


def _placement(data: Any) -> Placement:
    found = placement.parse(data) if type(data) is str else None
    if found is None:
        raise _fail("a placement", data)
    return found


_PLAIN: dict[Any, Read] = {
    int: _integer,
    float: _number,
    str: _text,
    bool: _truth,
    Any: lambda data: data,
    ValueId: _value_id,
    Placement: _placement,
}


def _either(kinds: tuple[Any, ...]) -> Read:
    reads = [reader(kind) for kind in kinds if kind is not NoneType]
    optional = NoneType in kinds

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        for one in reads[:-1]:
            try:
                return one(data)
            except InvalidRecord:
                continue
        return reads[-1](data)

    return read


def _many(read: Read, make: Callable[[Any], Any]) -> Read:
    def many(data: Any) -> Any:
        if type(data) is not list:
            raise _fail("a list", data)
        return make([read(one) for one in data])

    return many


def _together(reads: tuple[Read, ...], names: tuple[str, ...] = ()) -> Read:
    """A list of as many as there are readers."""

    def together(data: Any) -> Any:
        if type(data) is not list or len(data) != len(reads):
            raise _fail(f"a list of {len(reads)}{' (' + ', '.join(names) + ')' if names else ''}", data)
        return tuple([read(one) for read, one in zip(reads, data, strict=True)])

    return together


def _named(every: Mapping[str, Read]) -> Read:
    """A dict with just these keys."""

    def named(data: Any) -> Any:
        if type(data) is not dict:
            raise _fail("an object", data)
        if missing := every.keys() - data.keys():
            raise InvalidRecord(f"there is no `{min(missing)}`")
        found = {}
        for key, value in data.items():
            if key not in every:
                raise InvalidRecord(f"unknown field `{key}`")
            try:
                found[sys.intern(key)] = every[key](value)
            except InvalidRecord as problem:
                raise problem.of(f"`{key}`") from None
        return found

    return named


def _table(key: Read, read: Read) -> Read:
    """A dict with any keys."""

    def table(data: Any) -> Any:
        if type(data) is not dict:
            raise _fail("an object", data)
        return {key(name): read(value) for name, value in data.items()}

    return table
