"""State that a model keeps in Python: attributes, globals and generators that change from call to call.

A traced program keeps the values that they had when it was traced, so training would go on with the first of them. What every call changes again is refused. What the
first call sets and later calls leave as it is (a cached mask, a flag) is harmless, if the program of the second call is the same.

Private API, kept in this file: `torch.utils._python_dispatch._disable_current_modes` (tried on torch 2.11 and 2.13).
"""

from __future__ import annotations

import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import unwrap
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from piperlang.capture.where import is_users, is_users_file, line_of_function
from piperlang.diagnostics import PiperError, error

_DEEPEST = 6
_OPAQUE = (BuiltinFunctionType, nn.Module)
_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has. Of these only `training` is state, and `eval()` inside a forward would show elsewhere."""

Snapshot: TypeAlias = Mapping[str, object]
"""By the name that a user knows it by: a value that is equal as long as the state is."""


def snapshot(model: nn.Module, loss: Callable[..., Any]) -> Snapshot:
    """All Python state that the model and its loss could read."""
    prints = _Prints()
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _STANDARD}
        found |= {f"attribute `{name}` of {_module(path)}": prints.of(value) for name, value in own.items()}
        if is_users(type(module).forward):
            shared = {name: value for name, value in vars(type(module)).items() if not name.startswith("__")}
            found |= {f"class attribute `{type(module).__qualname__}.{name}`": prints.of(value) for name, value in shared.items()}
    found |= {f"global `{name}`": prints.of(scope[name]) for name, scope in _globals_of(model, loss) if name in scope}
    found["the generator of Python's `random`"] = hash(random.getstate())
    found["NumPy's global generator"] = str(np.random.get_state())
    return found


@dataclass
class Watch:
    """What a call of the model changed."""

    before: Snapshot = field(default_factory=dict)
    after: Snapshot = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        return {name for name in {*self.before, *self.after} if self.before.get(name) != self.after.get(name)}


class Frozen:
    """Globals that the model's code reads, as they were when it was traced: code that runs between steps (data, a schedule) may change them, too."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        self.names = dict(_globals_of(model, loss))
        self.line = line_of_function(loss)
        self.prints = self._prints()

    def _prints(self) -> dict[str, object]:
        prints = _Prints()
        return {name: prints.of(scope.get(name)) for name, scope in self.names.items()}

    def check(self) -> None:
        """Raises P0808 where one of them has changed."""
        now = self._prints()
        for name, was in self.prints.items():
            if now[name] != was:
                raise error(
                    "P0808", f"global `{name}` has changed since the model was traced", self.line, notes=["the model or the loss reads it, and the traced program keeps the value that it had then"],
                    help="pass what changes from step to step in with the batch, as a tensor that `data` yields",
                )  # fmt: skip


def _globals_of(model: nn.Module, loss: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the scopes they are in, that functions of the user's read: the loss, methods of modules, and what those call."""
    classes = {type(module) for module in model.modules()}
    todo: list[Any] = [unwrap(loss), *(item for kind in classes for item in vars(kind).values())]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or id(function) in seen or not is_users(function):
            continue
        seen.add(id(function))
        for name in _names(function.__code__):
            value = function.__globals__.get(name)
            if isinstance(value, FunctionType | MethodType):
                todo.append(getattr(value, "__func__", value))
            elif isinstance(value, type):
                todo += vars(value).values()
            if name in function.__globals__:
                yield name, function.__globals__


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refuse_state(names: set[str], model: nn.Module) -> PiperError:
    first, *others = sorted(names)
    generator = "generator" in first
    what = f"the model draws random numbers from {first}" if generator else f"{first} changes every time the model runs"
    help = (
        "draw them with nn.Dropout, whose masks we count, or outside of the model and pass them in with the batch"
        if generator
        else "register it as a buffer (`self.register_buffer(...)`) and compute with that tensor; compute what only depends on the step in `data()` and pass it in with the batch; count calls outside of the model"
    )
    notes = ["the traced program would keep the value it had in the first step", *(f"so does {name}" for name in others[:3])]
    return error("P0808", what, line_of_function(type(model).forward), notes=notes, help=help)


def _module(path: str) -> str:
    return f"module {path}" if path else "the model"


class _Prints:
    """Prints of values: equal while a value has not changed. Objects that several modules share are looked at once."""

    def __init__(self) -> None:
        self.known: dict[int, object] = {}

    def of(self, value: Any, depth: int = 0) -> object:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return (type(value).__name__, value if value == value else "nan")
        if isinstance(value, torch.Tensor):
            return ("tensor", str(value.dtype), tuple(value.shape))
        if depth > _DEEPEST or isinstance(value, _OPAQUE) or (isinstance(value, FunctionType | type | ModuleType) and not _users(value)):
            return "opaque"
        if id(value) not in self.known:
            self.known[id(value)] = "under way"  # it may contain itself
            self.known[id(value)] = self._inside(value, depth + 1)
        return self.known[id(value)]

    def _inside(self, value: Any, depth: int) -> object:
        if isinstance(value, Mapping):
            return ("mapping", tuple((str(key), self.of(item, depth)) for key, item in list(value.items())))
        if isinstance(value, ContextVar):
            return ("variable", self.of(value.get(None), depth))
        if isinstance(value, list | tuple | deque):
            return ("sequence", tuple(self.of(item, depth) for item in value))
        if isinstance(value, set | frozenset):
            return ("set", frozenset(map(repr, value)))
        if isinstance(value, random.Random):
            return ("random", hash(value.getstate()))
        if isinstance(value, np.random.Generator):
            return ("random", str(value.bit_generator.state))
        if isinstance(value, np.ndarray):
            return ("array", value.tobytes())
        if isinstance(value, torch.Generator):
            with _disable_current_modes():  # the state of a generator is a tensor, and must not become one of the trace
                return ("random", value.get_state().numpy().tobytes())
        if isinstance(value, MethodType):
            return ("method", self.of(value.__func__, depth), self.of(value.__self__, depth))
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
            return ("function", *(self.of(part, depth) for part in (value.__defaults__, value.__kwdefaults__, vars(value), cells)))
        if isinstance(value, type | ModuleType):
            return ("names", tuple((name, self.of(item, depth)) for name, item in list(vars(value).items()) if not name.startswith("__")))
        if isinstance(value, itertools.count | itertools.cycle):
            return ("iterator", repr(value))
        return ("object", type(value).__qualname__, tuple(self._members(value, depth)))

    def _members(self, value: Any, depth: int) -> Iterator[tuple[str, object]]:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield name, self.of(item, depth)
        for name in (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)):
            if hasattr(value, name):
                yield name, self.of(getattr(value, name), depth)


def _users(value: FunctionType | type | ModuleType) -> bool:
    """Whether a function, class or module is the user's own."""
    if isinstance(value, FunctionType):
        return is_users(value)
    module = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    if module is None:  # a model file is run, not imported
        return True
    return is_users_file(getattr(module, "__file__", None) or "<")
