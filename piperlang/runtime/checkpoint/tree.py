"""Containers of tensors and plain values as JSON: the state that an optimizer keeps, its options, states of generators.

No pickle: what is read is a value of these types, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch

DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
        *("uint16", "uint32", "uint64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
}
Json: TypeAlias = Any
Path: TypeAlias = tuple[str, ...]


class NotPlain(Exception):
    """A value that cannot be written as JSON."""

    def __init__(self, path: Path, value: object) -> None:
        super().__init__(f"{'.'.join(path) or 'it'} is of type {type(value).__name__}")


def written(value: Any, tensor: Callable[[Path, torch.Tensor], Json], path: Path = ()) -> Json:
    """`tensor` gives what is written for a tensor, which is stored elsewhere."""
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(path, value)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}  # JSON has no infinity
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"numpy": [value.dtype.name, written(value.item(), tensor, path)]}
    if type(value) in (list, tuple):
        items = [written(one, tensor, (*path, str(i))) for i, one in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int | float | bool | None):
                raise NotPlain((*path, "a key"), key)
        keys = [written(key, tensor, (*path, "a key")) for key in value]
        values = [written(one, tensor, (*path, str(key))) for key, one in value.items()]
        return {"dict": [list(pair) for pair in zip(keys, values, strict=True)]}
    raise NotPlain(path, value)


def inline(tensor: torch.Tensor) -> Json:
    """A small tensor as JSON."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "hex": data.hex()}


def from_inline(leaf: Json) -> torch.Tensor:
    """Raises ValueError if it has not as many bytes as it should."""
    dtype, shape = DTYPES[leaf["dtype"]], [int(size) for size in leaf["shape"]]
    if len(leaf["hex"]) != 2 * prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{len(leaf['hex']) // 2} bytes are no tensor of shape {shape}")
    if not leaf["hex"]:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray.fromhex(leaf["hex"]), dtype=torch.uint8).view(dtype).view(shape)


def read(tree: Json, tensor: Callable[[Json], torch.Tensor]) -> Any:
    """The value again. ValueError or TypeError for what `written` does not write."""
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueError(f"{str(tree)[:60]} is not a value")
    ((kind, inside),) = tree.items()
    if kind == "tensor":
        return tensor(inside)
    if kind == "float" and isinstance(inside, str):
        return float.fromhex(inside)
    if kind == "numpy" and isinstance(inside, list) and len(inside) == 2 and np.dtype(inside[0]).kind in "biuf":
        return np.dtype(inside[0]).type(read(inside[1], tensor))
    if kind in ("list", "tuple") and isinstance(inside, list):
        items = [read(one, tensor) for one in inside]
        return items if kind == "list" else tuple(items)
    if kind == "dict" and isinstance(inside, list) and all(isinstance(one, list) and len(one) == 2 for one in inside):
        pairs = [(read(key, tensor), read(one, tensor)) for key, one in inside]
        if all(isinstance(key, str | int | float | bool | None) for key, _ in pairs):
            return dict(pairs)
    raise ValueError(f"{str(tree)[:60]} is not a value")
