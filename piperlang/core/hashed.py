"""Values that are looked up by the million, and hash themselves once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


class Hashed:
    """Base of frozen dataclasses with `__hash__ = Hashed.__hash__`. A hash is of one process: pickling leaves it
    out."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            given: Any = self
            found = hash(tuple(getattr(given, one.name) for one in fields(given) if one.compare))
            object.__setattr__(self, "_hash", found)
            return found
