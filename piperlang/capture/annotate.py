"""Tags in model code: `with piperlang.annotate("stage", 0): ...`"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.fx import traceback

PREFIX = "piper."
"""Prefix of tags in a node's `custom` metadata, which fx shares with others."""
CALLER = "piper_caller"
"""The key in it that says that an operator belongs to the caller of its module."""


@contextmanager
def annotate(key: str, value: int | str) -> Iterator[None]:
    """Tag every operator inside with key=value, for selectors like `[key=value]`. Tags nest; the innermost value of a
    key applies."""
    if not isinstance(key, str) or not key.isidentifier():
        raise TypeError(f"the name of a tag must be an identifier, not {key!r}")
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise TypeError(f"the value of a tag must be an integer or a string, not {value!r}")
    with traceback.annotate({PREFIX + key: value}):
        yield


@contextmanager
def of_caller() -> Iterator[None]:
    """Operators inside belong to the module that calls the current module, for paths such as `layers[0].experts`."""
    with traceback.annotate({CALLER: True}):
        yield


def tags_of(custom: Mapping[str, Any] | None) -> dict[str, int | str]:
    """The tags in a node's custom metadata."""
    return {key.removeprefix(PREFIX): value for key, value in (custom or {}).items() if key.startswith(PREFIX)}
