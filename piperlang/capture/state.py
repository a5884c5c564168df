"""State that a model keeps in Python: attributes, globals and generators that change from call to call.

A traced program keeps the values that they had when it was traced, so training would go on with the first of them. What every call changes again is refused. What the
first call sets and later calls leave as it is (a cached mask, a flag) is harmless, if the program of the second call is the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from piperlang.capture.where import is_users, line_of_function
from piperlang.diagnostics import PiperError, error

_DEEPEST = 6
_OPAQUE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type, nn.Module)
_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has. Of these only `training` is state, and `eval()` inside a forward would show elsewhere."""

Snapshot: TypeAlias = Mapping[str, object]
"""By the name that a user knows it by: a value that is equal as long as the state is."""


def snapshot(model: nn.Module, loss: Callable[..., Any]) -> Snapshot:
    """All Python state that the model and its loss could read."""
    prints = _Prints()
    found: dict[str, object] = {}
    functions: list[Any] = [loss]
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _STANDARD}
        found |= {f"attribute `{name}` of {_module(path)}": prints.of(value) for name, value in own.items()}
        functions.append(type(module).forward)
        if is_users(type(module).forward):
            shared = {name: value for name, value in vars(type(module)).items() if not name.startswith("__")}
            found |= {f"class attribute `{type(module).__qualname__}.{name}`": prints.of(value) for name, value in shared.items()}
    scopes = {id(f.__globals__): f for f in functions if isinstance(f, FunctionType) and is_users(f)}
    for function in scopes.values():
        names = {name: value for name, value in function.__globals__.items() if not name.startswith("__")}
        found |= {f"global `{name}`": prints.of(value) for name, value in names.items()}
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
        if depth > _DEEPEST or isinstance(value, _OPAQUE):
            return "opaque"
        if id(value) not in self.known:
            self.known[id(value)] = "under way"  # it may contain itself
            self.known[id(value)] = self._inside(value, depth + 1)
        return self.known[id(value)]

    def _inside(self, value: Any, depth: int) -> object:
        if isinstance(value, Mapping):
            return ("mapping", tuple((str(key), self.of(item, depth)) for key, item in list(value.items())))
        if isinstance(value, list | tuple):
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
            return ("random", value.get_state().numpy().tobytes())
        if isinstance(value, itertools.count | itertools.cycle):
            return ("iterator", repr(value))
        return ("object", type(value).__qualname__, tuple(self._members(value, depth)))

    def _members(self, value: Any, depth: int) -> Iterator[tuple[str, object]]:
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield name, self.of(item, depth)
