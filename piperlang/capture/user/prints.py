"""Fingerprints of Python values: equal as long as a value, and everything reachable from it, has not changed.

The garbage collector knows the references of an object of any type: a deque, a `functools.partial`, the locals of a
generator. It does not know positions kept in C (of an iterator, of a random generator); those types are listed here.

Private API, kept in this file: `torch.utils._python_dispatch._disable_current_modes` (tried on torch 2.11 and 2.13),
`functools._lru_cache_wrapper` and `ctypes._SimpleCData` (Python 3.11 to 3.13)."""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import hashlib
import io
import mmap
import random
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from piperlang.capture.user.held import is_part_of_model
from piperlang.capture.user.operators import OPERATOR
from piperlang.capture.user.where import is_users, is_users_file

BUDGET = 20_000
"""The most values visited for one snapshot: the state that a program reads is small, and a large data set in a global
is not searched to its end."""
DEEPEST = 60
SAMPLED = 1 << 20
"""For arrays larger than this many bytes only some elements are compared, because globals are checked before every
step."""

_ATOMS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_OPAQUE = (BuiltinFunctionType, CodeType, FrameType, torch.optim.Optimizer, OPERATOR)
"""Of the user's own operators torch keeps what it has found out about them."""
_ITERATORS = ("builtins", "itertools")
"""Modules of the types whose `__reduce__` contains the position of an iterator."""


class Prints:
    """The fingerprints of one snapshot. An object that is reachable in several ways is visited once."""

    def __init__(self, contents: bool = False) -> None:
        """`contents`: compare tensors by their elements, not by type and shape alone. Not while a model is traced: what
        a forward writes to tensors is seen in its graph (buffers.py)."""
        self.contents = contents
        self.known: dict[int, tuple[object, object]] = {}
        """By id, together with the object, so that the id is not reused in the meantime."""
        self.left, self.depth = BUDGET, 0

    def of(self, value: Any) -> object:
        self.left -= 1
        if isinstance(value, _ATOMS):
            return (type(value).__name__, value if value == value else "nan")
        if isinstance(value, nn.Parameter):  # trained, so its value changes in every step
            return "parameter"
        if isinstance(value, torch.Tensor):
            return tensor_print(value) if self.contents else ("tensor", str(value.dtype), tuple(value.shape))
        if isinstance(value, _OPAQUE) or (
            isinstance(value, FunctionType | type | ModuleType) and not is_users_own(value)
        ):
            return "opaque"
        if id(value) in self.known:
            return self.known[id(value)][1]
        if self.left <= 0 or self.depth >= DEEPEST:
            return "not visited"
        self.known[id(value)] = value, "in progress"  # it may contain itself
        self.depth += 1
        contents = self.contents
        if isinstance(value, nn.Module) and is_part_of_model(value):
            self.contents = False  # buffers may change while it trains; watched.py looks at them
        found = self._inside(value)
        self.contents = contents
        self.depth -= 1
        self.known[id(value)] = value, found
        return found

    def _inside(self, value: Any) -> object:
        for kind, look in _LOOKS.items():
            if isinstance(value, kind):
                return (kind.__name__, look(self, value))
        return (
            type(value).__qualname__,
            self._attributes(value),
            *self._position(value),
            *map(self.of, self._referents(value)),
        )

    def _attributes(self, value: Any) -> object:
        own = getattr(value, "__dict__", None)
        return self.items(own) if isinstance(own, dict) else ()

    def _referents(self, value: Any) -> Iterator[Any]:
        """The references that the garbage collector reports: elements, slots, and attribute values that are not in a
        dict. The type is excluded."""
        own = getattr(value, "__dict__", None)
        shown = {id(item) for item in own.values()} if isinstance(own, dict) else set()
        for item in gc.get_referents(value):
            if item is not own and item is not type(value) and id(item) not in shown:
                yield item

    def _position(self, value: Any) -> Iterator[object]:
        """The position of an iterator implemented in C."""
        if type(value).__module__ in _ITERATORS and hasattr(value, "__next__"):
            try:
                yield from (part for part in value.__reduce__()[2:] if isinstance(part, _ATOMS))
                yield repr(value)[: repr(value).find(" at 0x")]  # the repr of itertools.count contains its number
            except TypeError:  # not all can be copied; from Python 3.14 on, none can
                yield repr(value)

    def items(self, value: Mapping[Any, Any]) -> object:
        some = islice(list(value.items()), max(self.left, 0))
        return len(value), tuple(
            (key if isinstance(key, _ATOMS) else self.of(key), self.of(item)) for key, item in some
        )

    def elements(self, value: Any) -> object:
        return len(value), tuple(self.of(item) for item in islice(list(value), max(self.left, 0)))

    def function(self, value: FunctionType) -> object:
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__):
            return value.__code__  # most functions: not hashed, which takes longer than all the rest
        cells = tuple(self.of(cell.cell_contents) for cell in value.__closure__ or () if cell != CellType())
        return (
            value.__code__,
            cells,
            self.of(value.__defaults__),
            self.of(value.__kwdefaults__),
            self.items(vars(value)),
        )

    def generator(self, value: GeneratorType[Any, Any, Any]) -> object:
        frame = value.gi_frame
        return (frame.f_lasti, self.items(frame.f_locals)) if frame is not None else "ended"

    def names(self, value: Any) -> object:
        """The attributes of a class or a module."""
        return self.items({name: item for name, item in list(vars(value).items()) if not name.startswith("__")})

    def kind(self, value: type) -> object:
        """A class, with those that it inherits attributes from, and the class that it is an instance of."""
        return self.names(value), tuple(self.of(base) for base in (*value.__mro__[1:], type(value)))

    def cached(self, value: Any) -> object:
        """The contents of a cache, regardless of the order of use. A bounded cache consists of links, which contain key
        and result."""
        caches = [
            held
            for held in gc.get_referents(value)
            if isinstance(held, dict) and held is not getattr(value, "__dict__", None)
        ]
        return tuple(
            (len(cache), *sorted(str(self._result(item)) for item in cache.values())) for cache in caches
        ), self.of(value.__wrapped__)

    def _result(self, item: Any) -> object:
        return tuple(map(self.of, gc.get_referents(item))) if type(item).__name__ == "_lru_list_elem" else self.of(item)


def _array(_: Prints, value: np.ndarray[Any, Any]) -> object:
    some = value if value.nbytes <= SAMPLED else value.reshape(-1)[:: max(1, value.size // 4096)]
    return (value.shape, some.tobytes() if some.dtype != object else repr(some))


_VIEWED = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
"""Types that NumPy does not have, and what their bytes are looked at as."""


def tensor_print(value: torch.Tensor) -> object:
    """Type, shape and elements. `_version` alone does not see what is written through NumPy or `.data`; it is looked at
    where elements cannot be (sparse tensors, subclasses), and beside a sample of a large tensor."""
    if value.is_meta or isinstance(value, FakeTensor):
        return ("tensor", value.dtype, value.shape)
    large = value.numel() * value.element_size() > SAMPLED
    try:
        elements = _elements(value, large)
    except (RuntimeError, TypeError, NotImplementedError):
        return ("tensor", value.dtype, value.shape, value._version)
    return ("tensor", value.dtype, value.shape, elements, value._version if large else 0)


def _elements(value: torch.Tensor, large: bool) -> bytes:
    with torch._C.DisableTorchFunctionSubclass() if type(value) is not torch.Tensor else nullcontext():
        some = value.detach()
        if large:
            some = _sample(some)
        if value.dtype in _VIEWED:
            some = some.view(_VIEWED[value.dtype])
        if not some.is_cpu or some.is_conj() or some.is_neg():
            some = some.cpu().resolve_conj().resolve_neg()
        return some.numpy().tobytes()


def _sample(value: torch.Tensor) -> torch.Tensor:
    """Some elements of a large tensor, without a copy of it: a few runs of neighbours, so that few pages of a mapped
    file are read; or, where elements are not neighbours, a grid."""
    if value.is_contiguous():
        flat, run = value.view(-1), 1024
        return torch.cat([flat[start : start + run] for start in range(0, flat.numel(), (flat.numel() - run) // 3)])
    each = max(2, round(4096 ** (1 / value.dim())))
    return value[tuple(slice(None, None, max(1, size // each)) for size in value.shape)]


def text_of(value: Any) -> str:
    """Equal in two processes if the values are. Other objects are known by their type alone."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return repr(value.item()) if value.numel() == 1 else _hash_of(repr(tensor_print(value)))
    if isinstance(value, np.ndarray):
        return _hash_of(f"{value.dtype} {value.shape} {value.tobytes()!r}")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text_of(key)}: {text_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(text_of, value)) + ")"
    return repr(value) if isinstance(value, (*_ATOMS, np.number, np.bool_)) else type(value).__qualname__


def _hash_of(text: str) -> str:
    return f"elements with hash {hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _bytes(_: Prints, value: Any) -> object:
    """Of what is memory: ctypes, arrays."""
    return bytes(memoryview(value).cast("B"))


def _torch_generator(_: Prints, value: torch.Generator) -> object:
    with _disable_current_modes():  # the state of a generator is a tensor, which must not be traced
        return value.get_state().numpy().tobytes()


_LOOKS: dict[type, Callable[[Prints, Any], object]] = {
    Mapping: Prints.items,
    list: Prints.elements,
    tuple: Prints.elements,
    deque: Prints.elements,
    set: lambda prints, value: frozenset(map(repr, value)),
    frozenset: lambda prints, value: frozenset(map(repr, value)),
    ContextVar: lambda prints, value: prints.of(value.get(None)),
    threading.local: lambda prints, value: prints.items(vars(value)),
    random.Random: lambda prints, value: hash(value.getstate()),
    np.random.Generator: lambda prints, value: str(value.bit_generator.state),
    np.random.RandomState: lambda prints, value: str(value.get_state()),
    np.ndarray: _array,
    array.array: _bytes,
    bytearray: _bytes,
    ctypes._SimpleCData: _bytes,
    ctypes.Array: _bytes,
    ctypes.Structure: _bytes,
    ctypes.Union: _bytes,
    io.BytesIO: lambda prints, value: "closed" if value.closed else (value.tell(), value.getvalue()),
    io.StringIO: lambda prints, value: "closed" if value.closed else (value.tell(), value.getvalue()),
    torch.Generator: _torch_generator,
    FunctionType: Prints.function,
    GeneratorType: Prints.generator,
    type: Prints.kind,
    weakref.ref: lambda prints, value: prints.of(value()),
    mmap.mmap: lambda prints, value: "closed" if value.closed else value[:SAMPLED],
    ModuleType: Prints.names,
    functools._lru_cache_wrapper: Prints.cached,
}


def is_users_own(value: FunctionType | type | ModuleType) -> bool:
    """Whether a function, class or module is defined in the user's own code."""
    if isinstance(value, FunctionType):
        return is_users(value)
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    if module is None:  # of code that was executed, not imported
        return True
    return is_users_file(getattr(module, "__file__", None) or "<")
