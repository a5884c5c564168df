"""Tags in model code: `with piperlang.annotate("stage", 0): ...`"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import traceback

PREFIX = "piper."
"""Marks our keys among everything else that fx keeps in a node's `custom` metadata."""


@contextmanager
def annotate(key: str, value: int | str) -> Iterator[None]:
    """Tag every operator inside with key=value, for selectors like `[key=value]`. Tags nest; the innermost of a key
    holds."""
    if not isinstance(key, str) or not key.isidentifier():
        raise TypeError(f"a tag's name is an identifier, not {key!r}")
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise TypeError(f"a tag's value is an integer or a string, not {value!r}")
    with traceback.annotate({PREFIX + key: value}):
        yield


def tags_of(custom: Mapping[str, Any] | None) -> dict[str, int | str]:
    """The tags among a node's custom metadata."""
    return {key.removeprefix(PREFIX): value for key, value in (custom or {}).items() if key.startswith(PREFIX)}
