"""State that a model keeps in Python: attributes, globals and generators that change from call to call.

A traced program keeps the values from the time of tracing, so training would continue with the first of them. State
that changes in every call is refused. State that the first call sets and later calls do not change (a cached mask, a
flag) is allowed, if the program of the second call is the same."""

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
"""Attributes that every module has. Of these only `training` is state, and a call of `eval()` in a forward is detected
elsewhere."""

Snapshot: TypeAlias = Mapping[str, object]
"""Fingerprints of state, by the name that the user knows."""


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
    """Python state that methods of a class could read: class attributes and globals."""
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
    """Globals and class attributes that code on workers reads, as they are now. Code that runs between steps (data,
    `on_step`) may change them."""

    def __init__(
        self,
        reader: str,
        functions: Iterable[Any],
        classes: Iterable[type],
        line: Span | None,
        names: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """`reader`: the code that reads them, for messages. `names`: additional globals that it reads, with their
        scopes."""
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
        """Raises P0808 if one of them has changed."""
        now = self._prints()
        for name in {**self.prints, **now}:
            if now.get(name) != self.prints.get(name):
                raise error(
                    "P0808",
                    f"{name} has changed since training was set up",
                    self.line,
                    notes=[f"{self.reader} reads it and keeps the value from then"],
                    help="pass values that change from step to step with the batch, as a tensor that `data` yields",
                )


def _globals_of(model: nn.Module, loss: Callable[..., Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    classes = {type(module) for module in model.modules()}
    return globals_of([unwrap(loss), *(item for kind in classes for item in vars(kind).values())])


def globals_of(functions: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The global names that user functions, and the functions they call, read, with their scopes. Values that are not
    functions are skipped."""
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
        "use nn.Dropout, whose masks do not depend on the schedule, or draw the numbers outside of the model and pass"
        " them with the batch"
        if generator
        else (
            "register it as a buffer (`self.register_buffer(...)`) and compute with that tensor; compute values that"
            " depend only on the step in `data()` and pass them with the batch; count calls outside of the model"
        )
    )
    notes = [
        "the traced program would keep the value from the first step",
        *(f"{name} changes, too" for name in others[:3]),
    ]
    return error("P0808", what, line_of_function(type(model).forward), notes=notes, help=help)


def _module(path: str) -> str:
    return f"module {path}" if path else "the model"
