"""Operators that the user has made with `torch.library.custom_op`.

Private API, kept in this file: `torch._library.custom_ops.OPDEFS`, all of them by name (torch 2.11 and 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._library.custom_ops import OPDEFS

from piperlang.capture.user.where import is_users

OPERATOR: Any = torch.library.CustomOpDef  # type: ignore[attr-defined]
_OURS = "piper::"


def is_of_user(name: str) -> bool:
    """`name`: that of the operator's schema."""
    return name in OPDEFS and not name.startswith(_OURS)


def functions_of_operators(graph: fx.Graph) -> Iterator[FunctionType]:
    """The functions that users' operators in a graph consist of: implementations, backwards, shapes."""
    return (function for _, function in operators_of_user(graph))


def operators_of_user(graph: fx.Graph) -> Iterator[tuple[str, FunctionType]]:
    """The same functions, each with the name of its operator."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.nodes)
    for name in dict.fromkeys(schema.name for schema in schemas if schema is not None):
        if is_of_user(name):
            for held in vars(OPDEFS[name]).values():
                yield from ((name, one) for one in _members(held) if isinstance(one, FunctionType) and is_users(one))


def _members(held: Any) -> list[Any]:
    return list(held.values()) if isinstance(held, dict) else [held]
