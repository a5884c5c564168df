"""State that a model keeps in Python: attributes, globals and generators that change from call to call.

A traced program keeps the values that they had when it was traced, so training would go on with the first of them. What
every call changes again is refused. What the first call sets and later calls leave as it is (a cached mask, a flag) is
harmless, if the program of the second call is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import unwrap
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from piperlang.capture.prints import Prints, is_users_own
from piperlang.capture.where import is_users, line_of_function
from piperlang.diagnostics import PiperError, error
from piperlang.source import Span

_STANDARD = frozenset(vars(nn.Module()))
"""Attributes that every module has. Of these only `training` is state, and `eval()` inside a forward would show
elsewhere."""

Snapshot: TypeAlias = Mapping[str, object]
"""By the name that a user knows it by: a value that is equal as long as the state is."""


def snapshot(model: nn.Module, loss: Callable[..., Any]) -> Snapshot:
    """All Python state that the model and its loss could read."""
    prints = Prints()
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _STANDARD}
        found |= {f"attribute `{name}` of {_module(path)}": prints.of(value) for name, value in own.items()}
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            found[f"forward hook `{getattr(hook, '__name__', type(hook).__name__)}` of {_module(path)}"] = prints.of(
                hook
            )
        if is_users(type(module).forward):
            shared = {name: value for name, value in vars(type(module)).items() if not name.startswith("__")}
            found |= {
                f"class attribute `{type(module).__qualname__}.{name}`": prints.of(value)
                for name, value in shared.items()
            }
    found |= {f"global `{name}`": prints.of(scope[name]) for name, scope in _globals_of(model, loss) if name in scope}
    return found | _generators()


def snapshot_of(kind: type) -> Snapshot:
    """Python state that methods of a class could read: of the class itself, and globals."""
    prints = Prints()
    found = {
        f"class attribute `{kind.__qualname__}.{name}`": prints.of(value)
        for name, value in vars(kind).items()
        if not name.startswith("__")
    }
    return (
        found
        | {f"global `{name}`": prints.of(scope.get(name)) for name, scope in globals_of(vars(kind).values())}
        | _generators()
    )


def _generators() -> dict[str, object]:
    return {
        "the generator of Python's `random`": hash(random.getstate()),
        "NumPy's global generator": str(np.random.get_state()),
    }


@dataclass
class Watch:
    """What a call of the model changed."""

    before: Snapshot = field(default_factory=dict)
    after: Snapshot = field(default_factory=dict)

    @property
    def changed(self) -> set[str]:
        return {name for name in {*self.before, *self.after} if self.before.get(name) != self.after.get(name)}


class Frozen:
    """Globals and class attributes that code reads which runs elsewhere, as they are now: code that runs between steps
    (data, `on_step`) may change them."""

    def __init__(
        self,
        reader: str,
        functions: Iterable[Any],
        classes: Iterable[type],
        line: Span | None,
        names: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """`reader`: whose code it is, for messages. `names`: globals that it reads, too, and the scopes they are in."""
        self.reader, self.line = reader, line
        self.classes = [kind for kind in classes if is_users_own(kind)]
        self.names = dict(names or {}) | dict(
            globals_of([*functions, *(item for kind in self.classes for item in vars(kind).values())])
        )
        self.prints = self._prints()

    def _prints(self) -> dict[str, object]:
        prints = Prints()
        found = {f"global `{name}`": prints.of(scope.get(name)) for name, scope in self.names.items()}
        for kind in self.classes:
            found |= {
                f"class attribute `{kind.__qualname__}.{name}`": prints.of(value)
                for name, value in list(vars(kind).items())
                if not name.startswith("__")
            }
        return found

    def check(self) -> None:
        """Raises P0808 where one of them has changed."""
        now = self._prints()
        for name in {**self.prints, **now}:
            if now.get(name) != self.prints.get(name):
                raise error(
                    "P0808",
                    f"{name} has changed since training was set up",
                    self.line,
                    notes=[f"{self.reader} reads it, and keeps the value that it had then"],
                    help="pass what changes from step to step in with the batch, as a tensor that `data` yields",
                )


def _globals_of(model: nn.Module, loss: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    classes = {type(module) for module in model.modules()}
    return globals_of([unwrap(loss), *(item for kind in classes for item in vars(kind).values())])


def globals_of(functions: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names, and the scopes they are in, that functions of the user's read, and those that they call. What is no
    function is passed over."""
    todo = list(functions)
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        function = getattr(function, "__func__", function)  # a static method, a class method
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
        else (
            "register it as a buffer (`self.register_buffer(...)`) and compute with that tensor; compute what only"
            " depends on the step in `data()` and pass it in with the batch; count calls outside of the model"
        )
    )
    notes = [
        "the traced program would keep the value it had in the first step",
        *(f"so does {name}" for name in others[:3]),
    ]
    return error("P0808", what, line_of_function(type(model).forward), notes=notes, help=help)


def _module(path: str) -> str:
    return f"module {path}" if path else "the model"
